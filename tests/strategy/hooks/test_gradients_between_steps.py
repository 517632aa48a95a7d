"""Gradients that are read between two steps, or in a step those of the batch before."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_spmd import ConfigurationError
from tests.helpers.ranks import RankError, RankPool
from tests.helpers.training import InOrder, assert_bitwise, assert_equals_one_device
from tests.strategy.small import ROWS, Quiet, assert_as_eager, rows, run


def _on_ranks(pool: RankPool, make: Callable[[], L.LightningModule], strategy: Any = "spmd", **settings: Any) -> Any:
    return pool.run(run, make, strategy, 2, **settings)


def _in_order() -> InOrder:
    return InOrder(rows(), ROWS)


def _norm_of(module: nn.Module) -> float:
    return float(sum(p.grad.pow(2).sum() for p in module.parameters() if p.grad is not None))


class ReadsLate(Quiet):
    def on_train_batch_end(self, *_: Any) -> None:
        self.log("norm", float(sum(p.grad.abs().sum() for p in self.parameters() if p.grad is not None)))


class ReadsThroughAFunction(Quiet):
    def on_train_batch_end(self, *_: Any) -> None:
        self.log("norm", _norm_of(self))


class ReadsThroughLightning(Quiet):
    def on_train_batch_end(self, *_: Any) -> None:
        self.log_dict(grad_norm(self, norm_type=2))


class ReadsThroughMethods(Quiet):
    """A method calls a property, which has a wrapped function, which calls what a closure has."""

    def on_train_batch_end(self, *_: Any) -> None:
        self._note()

    def _note(self) -> None:
        self.log("norm", self.norm)

    @property
    def norm(self) -> float:
        return _chosen(self)


def _chooser(how: Callable[[nn.Module], float]) -> Callable[[nn.Module], float]:
    chosen = functools.partial(how)

    @functools.wraps(how)
    def norm(module: nn.Module) -> float:
        return chosen(module)

    return norm


_chosen = _chooser(lambda module: module.of_weights())  # type: ignore[operator]
ReadsThroughMethods.of_weights = lambda self: helpers_norm(self)  # type: ignore[attr-defined]


def helpers_norm(module: nn.Module) -> float:
    return nn.utils.clip_grad_norm_(module.parameters(), 1e9).item()


class Monitor:
    """An object that reads gradients: by a method, by a name in a text, and where no name calls it."""

    def __init__(self, module: nn.Module) -> None:
        self.modules = {"all": [module]}
        self.inner = self

    def read(self) -> float:
        return sum(_norm_of(module) for module in self.modules["all"])

    def by_text(self) -> float:
        return sum(float(getattr(p, "grad").norm()) for p in self.modules["all"][0].parameters())  # noqa: B009

    def __len__(self) -> int:
        return int(self.read() > 0)


class ReadsThroughAnObject(Quiet):
    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self, "monitors", [Monitor(self)])

    def on_train_batch_end(self, *_: Any) -> None:
        self.log("norm", self.monitors[0].inner.read())


class ReadsByAText(ReadsThroughAnObject):
    def on_train_batch_end(self, *_: Any) -> None:
        self.log("norm", self.monitors[0].by_text())


class ReadsWithoutAName(ReadsThroughAnObject):
    def on_train_batch_end(self, *_: Any) -> None:
        self.log("norm", float(len(self.monitors[0])))


class ReadsThroughANewObject(Quiet):
    def on_train_batch_end(self, *_: Any) -> None:
        monitor = Monitor(self)
        self.log("norm", monitor.read())


class ByGradients(torch.optim.lr_scheduler.LRScheduler):
    def get_lr(self) -> list[float]:
        norms = [p.grad.norm() for g in self.optimizer.param_groups for p in g["params"] if p.grad is not None]
        return [g["lr"] / (1 + float(sum(norms))) for g in self.optimizer.param_groups]


class SchedulerReads(Quiet):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [{"scheduler": ByGradients(optimizer), "interval": "step"}]


class RateReads(Quiet):
    """A function of the scheduler does."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1 / (1 + _norm_of(self)))
        return [optimizer], [{"scheduler": rate, "interval": "step"}]


class LoggerReads(CSVLogger):
    seen: list[float]
    module: nn.Module

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        self.seen.append(_norm_of(self.module))


class Reader(L.Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        pl_module.log("norm", _norm_of(pl_module))


LATE = [ReadsLate, ReadsThroughAFunction, ReadsThroughLightning, ReadsThroughMethods, ReadsThroughAnObject]


@pytest.mark.parametrize("make", [*LATE, ReadsByAText, ReadsWithoutAName, ReadsThroughANewObject])
def test_gradients_read_after_the_step(make: type[Quiet]) -> None:
    result = assert_as_eager(make, "split", max_epochs=1)
    assert all(value > 0 for row in result.logged for key, value in row.items() if "norm" in key)


def test_gradients_read_by_a_callback_after_the_step() -> None:
    result = assert_as_eager(Quiet, "split", max_epochs=1, callbacks=lambda: [Reader()])
    assert result.final["norm"] > 0


@pytest.mark.parametrize("make", [SchedulerReads, RateReads])
def test_gradients_read_by_a_scheduler(make: type[Quiet]) -> None:
    assert_as_eager(make, "split", max_epochs=1)


def test_gradients_read_by_a_logger(tmp_path: Path) -> None:
    seen: dict[str, list[float]] = {}
    for strategy in ("auto", "spmd"):
        torch.manual_seed(0)
        module, logger = Quiet(), LoggerReads(tmp_path / strategy)
        logger.module, logger.seen = module, seen.setdefault(strategy, [])
        trainer = L.Trainer(
            strategy=strategy, accelerator="cpu", devices=1, max_epochs=1, logger=logger, log_every_n_steps=1
        )
        trainer.fit(module, _in_order())
    assert seen["spmd"] == seen["auto"]
    assert any(seen["auto"])


class ReadsInTheStep(Quiet):
    """The step reads gradients of the batch before, and adds them to its loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        before = [p.grad for p in self.parameters() if p.grad is not None]
        self.log("count", float(len(before)))
        return self.loss(batch) + 0.1 * sum(g.square().sum() for g in before)


class ReadsInALaterStep(ReadsInTheStep):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) if batch_idx == 2 else self.loss(batch)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_gradients_read_in_the_step(accumulate: int) -> None:
    result = assert_as_eager(ReadsInTheStep, "split", accumulate_grad_batches=accumulate, max_epochs=2)
    assert result.logged[-1]["count"] > 0


@pytest.mark.parametrize("plan", ["replicate", "zero2"])
def test_gradients_read_in_the_step_on_ranks(two_ranks: RankPool, plan: str) -> None:
    results = _on_ranks(two_ranks, ReadsInTheStep, {"data_parallel": plan}, max_epochs=2)
    assert all(result.mode == "split" for result in results)
    assert_equals_one_device(results, run(ReadsInTheStep, "auto", data=_in_order, max_epochs=2))


def test_gradients_that_were_not_kept_are_an_error() -> None:
    with pytest.raises(
        ConfigurationError, match=r"reads p.grad of the batch before \(.*test_gradients_between_steps.py:\d+\)"
    ):
        run(ReadsInALaterStep, max_epochs=1)


_HIDDEN = "gr" + "ad"


class ReadsByAComputedName(Quiet):
    def on_train_batch_end(self, *_: Any) -> None:
        self.log("norm", float(getattr(self.first.weight, _HIDDEN).norm()))


class StepsAgain(Quiet):
    def on_train_batch_end(self, *_: Any) -> None:
        self.trainer.optimizers[0].step()


class ReadsAtTheEnd(Quiet):
    def on_train_epoch_end(self) -> None:
        self.norm = getattr(self.first.weight, _HIDDEN) + 1


class StepsInACallback(L.Callback):
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        trainer.optimizers[0].step()


NOT_KEPT = r"p.grad of the step before is used \(.*test_gradients_between_steps.py:\d+\)"


@pytest.mark.parametrize("make", [ReadsByAComputedName, StepsAgain, ReadsAtTheEnd])
def test_gradients_that_no_code_shows_to_be_read_are_an_error(make: type[Quiet]) -> None:
    with pytest.raises(ConfigurationError, match=NOT_KEPT):
        run(make, max_epochs=1)


def test_gradients_that_no_code_shows_to_be_read_by_a_callback_are_an_error() -> None:
    with pytest.raises(ConfigurationError, match=NOT_KEPT):
        run(Quiet, max_epochs=1, callbacks=lambda: [StepsInACallback()])


class Probed(Quiet):
    """A layer that no optimizer of the Trainer has, of which the step computes nothing."""

    is_used = False

    def __init__(self) -> None:
        super().__init__()
        self.probe = nn.Linear(6, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch) + (self.probe(batch[0]).mean() if self.is_used else 0)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.first.parameters(), *self.last.parameters()], lr=0.05)


class ProbedAndUsed(Probed):
    is_used = True


class TrainsTheProbe(L.Callback):
    """An online evaluator, with an optimizer of its own."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.optimizer = torch.optim.SGD(pl_module.probe.parameters(), lr=0.1)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        pl_module.probe(batch[0]).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_callback_trains_a_layer_that_steps_do_not_use(accumulate: int) -> None:
    assert_as_eager(Probed, callbacks=lambda: [TrainsTheProbe()], accumulate_grad_batches=accumulate, max_epochs=2)


def test_a_callback_that_trains_a_layer_of_the_step_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match=NOT_KEPT):
        run(ProbedAndUsed, max_epochs=1, callbacks=lambda: [TrainsTheProbe()])


class ReadsTheProbe(ProbedAndUsed):
    def on_train_batch_end(self, *_: Any) -> None:
        self.log("norm", float(getattr(self.probe.weight, _HIDDEN).norm()))


def test_gradients_of_a_layer_of_the_step_that_are_read_are_an_error_on_ranks(two_ranks: RankPool) -> None:
    with pytest.raises(RankError, match=NOT_KEPT):
        _on_ranks(two_ranks, ReadsTheProbe, {"data_parallel": "zero3"}, max_epochs=1)


class ClipsByWeights(Quiet):
    """Adaptive clipping: gradients are scaled in place by what has an autograd history."""

    def scale(self) -> None:
        for parameter in self.parameters():
            parameter.grad.mul_((0.1 * parameter.norm() / parameter.grad.norm()).clamp(max=1))


class ClipsAfterBackward(ClipsByWeights):
    def on_after_backward(self) -> None:
        self.scale()


class ClipsBeforeTheStep(ClipsByWeights):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.scale()


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("make", [ClipsAfterBackward, ClipsBeforeTheStep])
def test_gradients_are_scaled_by_what_has_a_history(make: type[Quiet], accumulate: int) -> None:
    theirs = run(make, "auto", accumulate_grad_batches=accumulate, max_epochs=1)
    ours = run(make, "spmd", accumulate_grad_batches=accumulate, max_epochs=1)
    assert ours.captures > 0
    assert_bitwise(ours, theirs)


class Rows(torch.utils.data.Dataset[Any]):
    """Data that looks at the module."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        gradient = getattr(self.module.first.weight, _HIDDEN)
        return torch.full((6,), 1.0 if gradient is None else float(gradient.norm())), 0


def test_gradients_read_by_data_are_an_error() -> None:
    module = Quiet()
    trainer = L.Trainer(strategy="spmd", accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False)
    with pytest.raises(ConfigurationError, match=NOT_KEPT):
        trainer.fit(module, DataLoader(Rows(module), batch_size=4))


@pytest.mark.parametrize("plan", ["replicate", "zero3"])
def test_gradients_that_no_code_shows_to_be_read_are_an_error_on_ranks(two_ranks: RankPool, plan: str) -> None:
    with pytest.raises(RankError, match=NOT_KEPT):
        _on_ranks(two_ranks, ReadsByAComputedName, {"data_parallel": plan}, max_epochs=1)


class ZeroesBetween(Quiet):
    """Zeroes gradients in the middle of an accumulation, and asks whether there are any, of which eager has some."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("count", float(sum(getattr(p, _HIDDEN) is not None for p in self.parameters())))
        if batch_idx % 4 == 1:
            self.trainer.optimizers[0].zero_grad()
        self.log("left", float(sum(getattr(p, _HIDDEN) is not None for p in self.parameters())))

    def on_train_epoch_end(self) -> None:
        self.log("there", float(sum(getattr(p, _HIDDEN) is not None for p in self.parameters())))


@pytest.mark.parametrize("accumulate", [1, 3])
def test_gradients_that_are_zeroed_between_steps(accumulate: int) -> None:
    result = assert_as_eager(ZeroesBetween, accumulate_grad_batches=accumulate, max_epochs=2)
    assert result.final["count"] > 0


class NeverReads(Quiet):
    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            self.log("weights", self.first.weight.abs().sum())


def test_hooks_that_read_no_gradients_keep_one_graph() -> None:
    assert_as_eager(NeverReads, max_epochs=1)


class ZeroesInTheStep(Quiet):
    """In the middle of an accumulation, before or behind what it computes; all gradients or one layer's."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 1:
            self.trainer.optimizers[0].zero_grad()
        loss = self.loss(batch)
        if batch_idx == 5:
            self.first.zero_grad()
        return loss


class SetsNoneInTheStep(Quiet):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if batch_idx == 1:
            del self.first.weight.grad
        elif batch_idx == 5:
            for parameter in self.parameters():
                parameter.grad = None
        return loss


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("make", [ZeroesInTheStep, SetsNoneInTheStep])
def test_gradients_that_a_step_zeroes(make: type[Quiet], accumulate: int) -> None:
    result = assert_as_eager(make, accumulate_grad_batches=accumulate, max_epochs=2)
    if accumulate > 1:
        assert result.losses != run(Quiet, accumulate_grad_batches=accumulate, max_epochs=2).losses


@pytest.mark.parametrize("make", [ZeroesInTheStep, SetsNoneInTheStep])
def test_gradients_that_a_step_zeroes_on_ranks(two_ranks: RankPool, make: type[Quiet]) -> None:
    flags = {"accumulate_grad_batches": 3, "max_epochs": 2}
    results = _on_ranks(two_ranks, make, {"data_parallel": "zero2"}, **flags)
    assert_equals_one_device(results, run(make, "auto", data=_in_order, **flags))


class ReplacesInTheStep(Quiet):
    """By a gradient of its own, to which those of the batch are added."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if batch_idx in (1, 5):
            self.first.weight.grad = self.first.weight.detach() * 0.1
        return loss


@pytest.mark.parametrize("accumulate", [1, 3])
def test_gradients_that_a_step_replaces(accumulate: int) -> None:
    flags = {"accumulate_grad_batches": accumulate, "max_epochs": 2}
    assert run(ReplacesInTheStep, **flags).losses == run(ReplacesInTheStep, "auto", **flags).losses


class AccumulatesLater(Quiet):
    accumulate, at = 2, 2

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.at:
            self.trainer.accumulate_grad_batches = self.accumulate


class AccumulatesLaterInTheStep(AccumulatesLater):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Not here."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        super().on_train_batch_start(batch, batch_idx)
        return self.loss(batch)


class AccumulatesMore(AccumulatesLater):
    accumulate, at = 3, 1


@pytest.mark.parametrize("make", [AccumulatesLaterInTheStep, AccumulatesMore])
def test_gradients_of_an_update_that_lightning_would_not_zero_are_spoken_of(make: type[Quiet]) -> None:
    result = run(make, max_epochs=1)
    assert sum("which it has not zeroed" in told for told in result.warnings) == 1


def test_accumulation_that_changes_where_gradients_are_zeroed() -> None:
    for result in (
        assert_as_eager(AccumulatesLater, max_epochs=1),
        assert_as_eager(Quiet, accumulate_grad_batches=4, max_epochs=3),
    ):
        assert not any("which it has not zeroed" in told for told in result.warnings)


class JoinsLate(Quiet):
    at, is_new = 2, False

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Parameter(torch.zeros(1))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.first.parameters(), *self.last.parameters()], lr=0.05)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == self.at and self.trainer.current_epoch == 0:
            if self.is_new:
                self.other = nn.Parameter(torch.zeros(1))
            self.optimizers().optimizer.add_param_group({"params": [self.other if self.is_new else self.extra]})
        return self.loss(batch) + sum((p - 1).square().sum() for p in self.parameters() if p.numel() == 1)


class JoinsWhereZeroed(JoinsLate):
    at = 3


class IsNewAndJoins(JoinsLate):
    is_new = True


def test_parameters_that_join_the_optimizer_amid_an_accumulation() -> None:
    text = "extra joined the optimizer in the middle of an accumulation (training batch 2, accumulate_grad_batches=3)"
    late = run(JoinsLate, accumulate_grad_batches=3, max_epochs=2)
    assert sum(text in told for told in late.warnings) == 1
    for make in (JoinsWhereZeroed, IsNewAndJoins):
        result = assert_as_eager(make, accumulate_grad_batches=3, max_epochs=2)
        assert not any("joined the optimizer" in told for told in result.warnings)


class Moves(Quiet):
    def on_train_batch_end(self, *_: Any) -> None:
        self.to(self.device)

    def on_train_epoch_end(self) -> None:
        self.double()
        self.float()


def test_modules_may_move_between_two_steps() -> None:
    assert_as_eager(Moves, max_epochs=2)


@pytest.mark.parametrize("plan", [{"data_parallel": "zero3"}, {"tensor_parallel_size": 2}])
def test_modules_may_move_between_two_steps_on_ranks(two_ranks: RankPool, plan: dict[str, Any]) -> None:
    plan = {**plan, "tensor_parallel_plan": "auto"} if "tensor_parallel_size" in plan else plan
    assert_equals_one_device(
        _on_ranks(two_ranks, Moves, plan, max_epochs=2), run(Moves, "auto", data=_in_order, max_epochs=2)
    )


class SteppedByAHook(Quiet):
    """A parameter of the module that only an optimizer of the user's has."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(6))
        self.own = torch.optim.SGD([self.shift], 0.5)

    def loss(self, batch: Any) -> Tensor:
        return super().loss((batch[0] + self.shift, batch[1]))

    def on_train_batch_end(self, *_: Any) -> None:
        self.own.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.first.parameters(), *self.last.parameters()], lr=0.1)


class SteppedInSight(SteppedByAHook):
    def on_train_batch_end(self, *_: Any) -> None:
        assert self.shift.grad is not None
        super().on_train_batch_end()
        self.own.zero_grad()


def test_an_optimizer_that_a_hook_steps(two_ranks: RankPool) -> None:
    with pytest.raises(ConfigurationError, match=NOT_KEPT):
        run(SteppedByAHook, max_epochs=1)
    with pytest.raises(RankError, match=NOT_KEPT):
        _on_ranks(two_ranks, SteppedByAHook, max_epochs=1)
    assert_as_eager(SteppedInSight, "split", max_epochs=2)


class Leaf(Quiet):
    """Looks at the gradient of a tensor that is no parameter."""

    def __init__(self, kind: str, *, retains: bool = False) -> None:
        super().__init__()
        self.kind, self.retains = kind, retains
        self.held: Any = torch.zeros(8, 6, requires_grad=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        if self.kind == "batch":
            self.held = x.requires_grad_()
        elif self.kind == "copy":
            self.held = x.clone().requires_grad_()
        elif self.kind == "made":
            self.held = torch.zeros(x.shape, requires_grad=True)
        if self.retains:
            self.held.retain_grad()
        return self.loss((self.held if self.kind in ("batch", "copy") else x + self.held, y))

    def on_train_batch_end(self, *_: Any) -> None:
        self.log("sum", self.held.grad.abs().sum())


@pytest.mark.parametrize("kind", ["batch", "copy", "made", "attribute"])
def test_gradients_of_other_leaves_are_an_error(kind: str) -> None:
    with pytest.raises(ConfigurationError, match=r"no parameter of the module is used .*test_gradients.*retain_grad"):
        run(lambda: Leaf(kind), max_epochs=1)


@pytest.mark.parametrize("kind", ["batch", "copy", "made"])
def test_gradients_of_other_leaves_that_are_retained(kind: str) -> None:
    assert_as_eager(lambda: Leaf(kind, retains=True), "split", max_epochs=1)


class LeafOfNoInterest(Leaf):
    def on_train_batch_end(self, *_: Any) -> None:
        """Nobody looks."""


@pytest.mark.parametrize("kind", ["batch", "copy", "made", "attribute"])
def test_leaves_whose_gradient_nobody_uses(kind: str) -> None:
    assert_as_eager(lambda: LeafOfNoInterest(kind), max_epochs=2)


class GoesBackward(Quiet):
    """Between two steps, in the middle of an accumulation and behind an update, on weights alone."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.enable_grad():
            sum(p.square().sum() for p in self.parameters()).backward()


class GoesBackwardThroughALayer(Quiet):
    """Of a part of the parameters, and with a graph of the gradients."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        with torch.enable_grad():
            self.last.weight.sin().mean().backward(create_graph=batch_idx % 2 == 0)


class GoesBackwardOnRows(Quiet):
    """The rows of the batch that it is given: on ranks their means have a mean."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.enable_grad():
            self(batch[0]).square().mean().backward()


GO_BACKWARD = [GoesBackward, GoesBackwardThroughALayer, GoesBackwardOnRows]


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("make", GO_BACKWARD)
def test_backward_passes_between_steps(make: type[Quiet], accumulate: int) -> None:
    assert_as_eager(make, accumulate_grad_batches=accumulate, max_epochs=2)


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("make", GO_BACKWARD)
def test_backward_passes_between_steps_on_ranks(two_ranks: RankPool, make: type[Quiet], accumulate: int) -> None:
    settings = {"accumulate_grad_batches": accumulate, "max_epochs": 2}
    results = _on_ranks(two_ranks, make, data=_in_order, **settings)
    assert_equals_one_device(results, run(make, "auto", data=_in_order, **settings))


def test_backward_passes_on_parameters_in_parts(two_ranks: RankPool) -> None:
    settings = {"accumulate_grad_batches": 3, "max_epochs": 2}
    results = _on_ranks(two_ranks, GoesBackward, {"data_parallel": "zero3"}, **settings)
    assert_equals_one_device(results, run(GoesBackward, "auto", data=_in_order, **settings))


def test_backward_passes_amid_sums_in_parts_are_an_error(two_ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"a backward pass between two steps \(.*\) adds to the gradient of"):
        _on_ranks(two_ranks, GoesBackward, {"data_parallel": "zero2"}, accumulate_grad_batches=3, max_epochs=1)
