"""Loggers that training_step calls itself: the step stays a graph, and loggers get what eager training gives them."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only
from torch import Tensor

from tests.helpers.ranks import RankPool
from tests.helpers.training import InOrder, assert_compiled
from tests.strategy.kept_calls import Keeper, Writer, told
from tests.strategy.small import ROWS, Net, Quiet, rows


class Usual(Quiet):
    """What people write."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        logger, step = self.logger, self.global_step
        if logger is not None and isinstance(logger, Keeper):
            logger.experiment.add_scalar("loss", loss.item(), step)
            logger.log_metrics({"loss": loss, "twice": 2 * loss.detach()}, step=step)
            self.log("loss", loss)
            logger.experiment.add_histogram("weights", self.first.weight, global_step=step)
            logger.experiment.add_text("text", f"loss {loss.item():.3f} at {batch_idx}", step)
            if step % 4 == 0:
                logger.experiment.add_images("x", batch[0].reshape(-1, 2, 3), step)
            if batch_idx == 0:
                logger.log_hyperparams({"lr": 0.1, "epoch": self.current_epoch})
                logger.experiment["classes"].append(batch[1].float().mean())
            print(logger.experiment.log_dir, f"{loss.item():.3f}")
        return loss


class Asking(Quiet):
    """Names, kinds, all loggers, writers under another name."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        assert type(self.logger) is Keeper
        assert [number for number, each in enumerate(self.loggers) if each is self.logger] == [0]
        assert hasattr(self.logger, "log_metrics")
        assert not hasattr(self.logger.experiment, "watch")
        write = getattr(self.trainer.logger.experiment, "add_scalar")  # type: ignore[union-attr] # noqa: B009
        for number, logger in enumerate(self.loggers):
            where = f"{logger.prefix}{logger.name}/{logger.version}"  # type: ignore[attr-defined]
            logger.log_metrics({f"{where}/{number}": loss}, self.global_step)
        write("mean", self.mean(batch), self.global_step)
        self.tell(self.logger, loss)
        return loss

    def mean(self, batch: Any) -> Tensor:
        return batch[0].mean()

    @staticmethod
    def tell(logger: Any, loss: Tensor) -> None:
        logger.experiment.add_scalars("both", {"one": loss, "other": loss.square()}, walltime=None)


FLAGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"accumulate_grad_batches": 2},
    "clipped": {"gradient_clip_val": 0.2},
}


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("kind", [Usual, Asking])
def test_loggers_are_told_what_eager_training_tells(
    kind: type[Net], flags: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, theirs = told(kind, "auto", **FLAGS[flags])
    printed = capsys.readouterr().out
    ours, mine = told(kind, **FLAGS[flags])
    assert_compiled(ours)
    assert mine == theirs
    assert capsys.readouterr().out == printed


class Alone(Usual):
    """Functions that rank 0 alone runs, and what Lightning says on it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.tell(loss)
        rank_zero_info(f"loss {loss.item():.2f}")
        return loss

    @rank_zero_only
    def tell(self, loss: Tensor) -> None:
        assert self.logger is not None
        self.logger.experiment.add_scalar("alone", loss, self.global_step)
        self.logger.log_metrics({"norm": self.last.weight.norm().item()})


def test_functions_for_rank_zero_leave_the_graph_to_all_ranks(two_ranks: RankPool) -> None:
    _, expected = told(Alone, "auto", max_epochs=1, data=lambda: InOrder(rows(), ROWS, shuffle=False))
    found = two_ranks.run(told, Alone, "spmd", 2, max_epochs=1)
    assert_compiled(*[result for result, _ in found])
    assert_close(found[0][1], expected)
    names = [[call[1][0] if call[1] else "" for call in mine[0][0]] for _, mine in found]
    assert [name for name in names[0] if name != "alone" and name != {"norm": 0}]  # something is said
    assert "alone" in names[0]
    assert "alone" not in names[1]


class AsksForItsRank(Quiet):
    """Rank 0 logs more than the others."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if self.trainer.is_global_zero:
            self.logger.experiment.add_histogram("weights", self.first.weight)  # type: ignore[union-attr]
        return loss


def test_a_step_that_calls_torch_on_one_rank_alone_is_a_graph(two_ranks: RankPool) -> None:
    found = two_ranks.run(told, AsksForItsRank, "spmd", 2, max_epochs=1)
    assert_compiled(*[result for result, _ in found])
    assert [len(mine[0][0]) > 0 for _, mine in found] == [True, False]


ON_RANKS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "replicate": ("Usual", {}, {}),
    "zero3": ("Usual", {"data_parallel": "zero3", "overlap_iterations": True}, {"max_epochs": 2}),
    "zero2": ("Usual", {"data_parallel": "zero2"}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.2}),
    "by hand": ("ByHand", {"data_parallel": "zero3"}, {}),
    "paused": ("Hooked", {}, {"max_epochs": 2}),
    "evaluated": ("Validates", {"data_parallel": "zero3"}, {"limit_val_batches": 2}),
}


@pytest.mark.parametrize("case", ON_RANKS)
def test_loggers_of_two_ranks_are_told_one_devices_values(case: str, two_ranks: RankPool) -> None:
    name, options, flags = ON_RANKS[case]
    make, flags = globals()[name], {"max_epochs": 1, **flags}
    _, expected = told(make, "auto", data=lambda: InOrder(rows(), ROWS, shuffle=False), **flags)
    found = two_ranks.run(told, make, options, 2, **flags)
    # a graph that gives what Python reads does not pause
    assert {result.mode for result, _ in found} == {"split" if case == "paused" else "compiled"}
    for _, mine in found:
        assert_close(mine, expected)


def assert_close(mine: Any, expected: Any) -> None:
    """Equal, with numbers to rounding."""
    if isinstance(expected, float):
        assert mine == pytest.approx(expected, rel=1e-5, abs=1e-6)
    elif isinstance(expected, dict):
        assert list(mine) == list(expected)
        for key in expected:
            assert_close(mine[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        assert len(mine) == len(expected)
        if expected[:1] == ("add_images",):  # ranks have every second row, and their batches stand one behind the other
            mine, expected = (sorted(call[1][1][2]) for call in (mine, expected))
        for one, other in zip(mine, expected, strict=True):
            assert_close(one, other)
    else:
        assert mine == expected


class Validates(Usual):
    """Evaluation that is a graph, where parameters are in parts."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.logger.experiment.add_scalar("val", loss.item(), self.global_step)  # type: ignore[union-attr]
        self.logger.experiment.add_histogram("weights", self.first.weight)  # type: ignore[union-attr]
        self.log("val_loss", loss)


class Uses(Quiet):
    """What a call gives decides."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if self.logger.experiment.log_it("loss", loss) == "call 3":  # type: ignore[union-attr]
            loss = loss * 2
        return loss


class Gives(Quiet):
    """An object that the step changes afterwards."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        state = Writer()
        self.logger.experiment.log_it(state.told)  # type: ignore[union-attr]
        self.logger.experiment.log_it(state)  # type: ignore[union-attr]
        return self.loss(batch)


class Assigns(Quiet):
    """To a logger."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.logger.prefix = f"{batch_idx}/"  # type: ignore[union-attr]
        return self.loss(batch)


class ReadsBehind(Quiet):
    """What a call has changed."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.logger.log_metrics({"loss": loss})  # type: ignore[union-attr]
        return loss * self.logger.count  # type: ignore[union-attr]


class HasTheModule(Quiet):
    """A logger that looks at weights."""

    def on_fit_start(self) -> None:
        self.logger.experiment.model = self  # type: ignore[union-attr]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.logger.log_metrics({"loss": loss})  # type: ignore[union-attr]
        return loss


class Asks(Quiet):
    """How much a logger has."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.logger.experiment.series["losses"] = loss  # type: ignore[union-attr]
        return loss * (1 + len(self.logger.experiment.told))  # type: ignore[union-attr]


class Contains(Quiet):
    """The same, by ``in``, and by what there is of a result."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        found = self.logger.experiment["losses"]  # type: ignore[union-attr]
        return loss * 2 if hasattr(found, "append") else loss


@pytest.mark.parametrize("kind", [Uses, Gives, Assigns, ReadsBehind, HasTheModule, Asks, Contains])
def test_whatever_a_step_does_with_its_logger_is_as_in_eager_training(kind: type[Net]) -> None:
    theirs, expected = told(kind, "auto", number=1)
    ours, mine = told(kind, number=1)
    assert_compiled(ours)
    assert [text for text in ours.warnings if "spmd" in text] == []
    assert str(mine) == str(expected)
    assert ours.losses == theirs.losses


class ReadsBefore(Quiet):
    """A number that each call changes."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch) * (1 + 0.1 * self.logger.count)  # type: ignore[union-attr]
        self.logger.log_metrics({"loss": loss, "count": self.global_step})  # type: ignore[union-attr]
        if self.logger.name == "keeper" and batch_idx % 2:
            self.logger.experiment.series["last"] = loss.detach()  # type: ignore[union-attr]
            self.logger.experiment.told.append(loss.item())  # type: ignore[union-attr]
        return loss


class ChangesLoggers(Quiet):
    """In mid-run, in a hook."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if self.logger is not None:
            self.logger.log_metrics({"loss": loss}, self.global_step)
        return loss

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.trainer.loggers = self.trainer.loggers[1:]
        if self.current_epoch == 2:
            self.trainer.loggers = []


class ByHand(Quiet):
    """Weights before and behind two updates."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer, logger = self.optimizers(), self.logger
        for _ in range(2):
            loss = self.loss(batch)
            optimizer.zero_grad()  # type: ignore[union-attr]
            self.manual_backward(loss)
            logger.experiment.add_histogram("gradient", self.first.bias.grad, self.global_step)  # type: ignore[union-attr]
            logger.experiment.add_histogram("weight", self.first.bias, self.global_step)  # type: ignore[union-attr]
            optimizer.step()  # type: ignore[union-attr]
            logger.experiment.add_histogram("weight", self.first.bias, self.global_step)  # type: ignore[union-attr]
        self.log("loss", loss)
        logger.experiment.add_scalar("loss", loss.item(), self.global_step)  # type: ignore[union-attr]


class Hooked(Usual):
    """Gradients are looked at between backward and update."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.logger.experiment.add_scalar("norm", self.first.weight.grad.norm())  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("kind", "mode"),
    [(ReadsBefore, "compiled"), (ChangesLoggers, "compiled"), (ByHand, "compiled"), (Hooked, "split")],
)
def test_calls_are_those_of_eager_training(kind: type[Net], mode: str) -> None:
    theirs, expected = told(kind, "auto")
    ours, mine = told(kind)
    assert (ours.mode, [text for text in ours.warnings if "spmd" in text]) == (mode, [])
    assert mine == expected
    assert ours.losses == theirs.losses
