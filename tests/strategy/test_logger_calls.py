"""Loggers that training_step calls itself: the step stays a graph, and loggers get what eager training gives them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only
from torch import Tensor

from tests.helpers.ranks import RankPool
from tests.helpers.training import InOrder, Result, assert_compiled
from tests.strategy.small import ROWS, Net, Quiet, rows, run


def plain(value: Any) -> Any:
    """What a logger was given, as it was at that moment."""
    if isinstance(value, Tensor):
        return "tensor", value.dtype, value.detach().tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


class Writer:
    """An experiment: keeps every call of any of its methods."""

    log_dir = "somewhere"

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.series: dict[str, list[Any]] = {}

    def _keep(self, name: str, *args: Any, **kwargs: Any) -> str:
        self.told.append((name, plain(args), plain(kwargs)))
        return f"call {len(self.told)}"

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("add_", "log_")):
            return functools.partial(self._keep, name)
        raise AttributeError(name)

    def __getitem__(self, name: str) -> list[Any]:
        return self.series.setdefault(name, [])


class Keeper(Logger):
    """Keeps what it is told, on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.writer = Writer()
        self.prefix = "p/"

    @property
    def name(self) -> str:
        return "keeper"

    @property
    def version(self) -> int:
        return 3

    @property
    def experiment(self) -> Writer:
        return self.writer

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        self.writer._keep("log_hyperparams", *args, **kwargs)

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.writer._keep("log_metrics", metrics, step)


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


def told(
    make: Callable[[], Net], strategy: Any = "spmd", devices: int = 1, number: int = 2, **flags: Any
) -> tuple[Result, list[Any]]:
    """A run, and all that its loggers were told."""
    loggers = [Keeper() for _ in range(number)]
    result = run(make, strategy, devices, logger=loggers, log_every_n_steps=2, **flags)
    return result, [(logger.writer.told, plain(logger.writer.series)) for logger in loggers]


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


def test_functions_for_rank_zero_are_in_the_graph_of_all_ranks(two_ranks: RankPool) -> None:
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
        if self.trainer.is_global_zero:  # HERE
            self.logger.experiment.add_histogram("weights", self.first.weight)  # type: ignore[union-attr]
        return loss


def test_a_step_that_asks_for_its_rank_is_told_what_to_write(two_ranks: RankPool) -> None:
    found = two_ranks.run(told, AsksForItsRank, "spmd", 2, max_epochs=1)
    assert [result.mode for result, _ in found] == ["eager", "eager"]
    assert any("asks which rank it is on" in text and "test_logger_calls.py" in text for text in found[0][0].warnings)
    assert [len(mine[0][0]) > 0 for _, mine in found] == [True, False]


@pytest.mark.parametrize("plan", ["replicate", "zero3"])
def test_loggers_of_two_ranks_are_told_one_devices_values(plan: str, two_ranks: RankPool) -> None:
    _, expected = told(Usual, "auto", max_epochs=1, data=lambda: InOrder(rows(), ROWS, shuffle=False))
    found = two_ranks.run(told, Usual, {"data_parallel": plan}, 2, max_epochs=1)
    assert_compiled(*[result for result, _ in found])
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
