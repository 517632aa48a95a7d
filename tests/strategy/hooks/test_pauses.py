"""Hooks on gradients in iterations that overlap: they see, and change, what they would between two graphs."""

from __future__ import annotations

import functools
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_spmd import SPMDStrategy
from lightning_spmd import _private_api as private
from tests.helpers.ranks import RankError, RankPool
from tests.helpers.training import InOrder, Result, assert_equals_one_device
from tests.strategy.hooks.test_overlap import SMALL, deferring
from tests.strategy.small import ROWS, Quiet, rows, run

HOOKS = ("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step")


def norm(module: Any) -> float:
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    total = torch.nn.utils.get_total_norm(grads)
    return float(getattr(total, "full_tensor", lambda: total)())


class Six(L.Callback):
    """All six hooks between two batches' forward passes; what they do is to be said."""

    def __init__(self, does: str = "nothing", every: int = 1) -> None:
        self.does, self.every = does, every
        self.seen: list[Any] = []
        self.calls: list[str] = []

    def _is(self, trainer: Any, *does: str) -> bool:
        return self.does in does and trainer.fit_loop.batch_idx % self.every == 0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.calls.append("start")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.calls.append("end")

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.calls.append("zero")

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        self.calls.append("backward")
        if self._is(trainer, "loss"):
            self.seen.append((float(loss), trainer.callback_metrics["loss"].item()))

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self.calls.append("after")
        if self._is(trainer, "read") or (self._is(trainer, "one rank") and trainer.is_global_zero):
            self.seen.append(norm(pl_module))
        if self._is(trainer, "halve"):
            for p in pl_module.parameters():
                if p.grad is not None:
                    p.grad.data.mul_(0.5)
        if self._is(trainer, "mask") and trainer.is_global_zero:  # rows that are this rank's alone
            for p in pl_module.parameters():
                if isinstance(p.grad, DTensor):
                    p.grad.to_local().mul_(0.5)
        if self._is(trainer, "drop"):
            next(pl_module.parameters()).grad = None
        if self._is(trainer, "add"):
            with torch.enable_grad():
                sum(p.square().sum() for p in pl_module.parameters()).backward()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.calls.append("step")
        if self._is(trainer, "replace"):
            for p in pl_module.parameters():
                p.grad = None if p.grad is None else p.grad * 2
        if self._is(trainer, "rate"):
            optimizer.param_groups[0]["lr"] = 1e-3 * (1 + trainer.fit_loop.batch_idx)
        if self._is(trainer, "weights"):
            self.seen.append([float(torch.linalg.vector_norm(p).detach()) for p in pl_module.parameters()])
            with torch.no_grad():
                for p in pl_module.parameters():
                    p.clamp_(-0.05, 0.05)


class Deep(L.LightningModule):
    """Eight layers: several buckets, some of whose updates run in the next iteration."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(32, 32) for _ in range(8)))
        self.losses: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = (self.net(batch) - batch).square().mean()
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].detach().clone())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [
            {"scheduler": torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, 20), "interval": "step"}
        ]


def trained(overlap: Any, callback: Six, batch: int = 2, **options: Any) -> tuple[list[Any], list[Any], int, str]:
    """Losses and weights, what the callback saw, how many graphs deferred work, and the mode."""
    L.seed_everything(5, verbose=False)
    module = Deep()
    trainer = L.Trainer(
        accelerator="cpu", devices=2, max_epochs=1, logger=False, callbacks=[callback],
        strategy=SPMDStrategy(overlap_iterations=overlap, bucket_size_mb=SMALL, **options),
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    rows = torch.randn(4 * 16, 32, generator=torch.Generator().manual_seed(4))
    trainer.fit(module, DataLoader(rows, batch_size=batch))
    assert not [hook for hook in HOOKS if hook in vars(callback)], "the callback is the user's own again"
    batches = len(callback.calls) // 6
    assert callback.calls == ["start", "zero", "backward", "after", "step", "end"] * batches
    weights = [private.local_tensor(p.detach()).clone() for p in module.parameters()]
    return module.losses + weights, callback.seen, deferring(trainer), trainer.strategy.mode.value


WAYS = [("loss", 1), ("one rank", 2), ("halve", 2), ("replace", 1), ("rate", 3)]
MORE = [("nothing", 1), ("read", 1), ("read", 3), ("halve", 1), ("drop", 3), ("add", 2), ("rate", 1), ("weights", 1)]


@pytest.mark.parametrize(("does", "every"), WAYS + [pytest.param(*way, marks=pytest.mark.long) for way in MORE])
def test_hooks_see_and_change_what_they_would_between_two_graphs(two_ranks: RankPool, does: str, every: int) -> None:
    plain, ours = (two_ranks.run(trained, overlap, Six(does, every)) for overlap in (False, True))
    always = every == 1 and does in ("replace", "rate")  # then two graphs are the better choice
    for (values, seen, deferred, mode), (expected, wanted, undeferred, split) in zip(ours, plain, strict=True):
        assert (mode, deferred > 0) == (("split", False) if always else ("compiled", True))
        assert (split, undeferred) == ("split", 0)
        assert seen == wanted
        assert all(torch.equal(a, b) for a, b in zip(values, expected, strict=True))
    assert bool(plain[0][1]) == (does in ("loss", "read", "one rank", "weights"))


@pytest.mark.parametrize(
    ("plan", "does"), [("zero3", "read"), pytest.param("zero3", "halve", marks=pytest.mark.long), ("zero2", "read")]
)
def test_gradients_in_parts_are_shown_as_parts(two_ranks: RankPool, plan: str, does: str) -> None:
    plain, ours = (two_ranks.run(trained, overlap, Six(does), data_parallel=plan) for overlap in (False, True))
    for (values, seen, _, mode), (expected, wanted, _, split) in zip(ours, plain, strict=True):
        # whole gradients would be gathered for the look alone
        assert (mode, split) == ("split" if plan == "zero2" else "compiled", "split")
        assert seen == wanted
        assert all(torch.equal(a, b) for a, b in zip(values, expected, strict=True))


SHARED = {"net.*[0246]": "colwise", "net.*[1357]": "rowwise"}


def test_rows_of_one_rank_that_a_hook_changes_change_all_ranks_ways(two_ranks: RankPool) -> None:
    options = {"tensor_parallel_size": 2, "tensor_parallel_plan": SHARED}
    plain, ours = (two_ranks.run(trained, overlap, Six("mask", 2), batch=4, **options) for overlap in (False, True))
    for (values, _, _, mode), (expected, _, _, split) in zip(ours, plain, strict=True):
        assert (mode, split) == ("compiled", "split")
        assert all(torch.equal(a, b) for a, b in zip(values, expected, strict=True))


class LooksBack(Six):
    """At gradients of the step before; how, no code of a hook shows."""

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.calls.append("zero")
        if trainer.fit_loop.batch_idx == 5:
            self.seen.append(getattr(next(pl_module.parameters()), "".join(("gr", "ad"))))


class LooksBackOpenly(Six):
    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.calls.append("zero")
        grads = [p.grad for p in pl_module.parameters() if p.grad is not None]
        self.seen.append(sum(float(g.sum()) for g in grads))


def test_gradients_of_the_step_before_are_kept_for_who_is_known_to_look(two_ranks: RankPool) -> None:
    ours, plain = (two_ranks.run(trained, overlap, LooksBackOpenly()) for overlap in (True, False))
    assert [side[1] for side in ours] == [side[1] for side in plain]
    assert ours[0][3] == "split"
    with pytest.raises(RankError, match="on_before_zero_grad looks at p.grad of the step before"):
        two_ranks.run(trained, True, LooksBack())


class Looks(L.Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        whole = [getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in pl_module.parameters()]
        self.seen.append(float(sum(g.double().square().sum() for g in whole)))


def _looked(strategy: Any, devices: int) -> tuple[Result, list[float]]:
    looks = Looks()
    return run(Quiet, strategy, devices, callbacks=lambda: [looks], data=lambda: InOrder(rows(), ROWS)), looks.seen


def test_a_gradient_that_is_made_of_the_batch_alone_is_shown(two_ranks: RankPool) -> None:
    """On an axis of tensor parallelism nothing reduces it: what it is made of is an input of the graph."""
    options = {"tensor_parallel_size": 2, "tensor_parallel_plan": {"first": "colwise", "last": "rowwise"}}
    theirs, wanted = _looked("auto", 1)
    ours = two_ranks.run(_looked, {**options, "overlap_iterations": True}, 2)
    assert_equals_one_device([result for result, _ in ours], theirs)
    assert ours[0][0].mode == "compiled"
    assert all(seen == pytest.approx(wanted, rel=1e-5) for _, seen in ours)


class PutsOtherMemory(Quiet):
    """Under zero2 the update has taken its part of the parameter before the hook puts another memory there."""

    def __init__(self, hook: str) -> None:
        super().__init__()
        vars(self)[f"_{hook}"] = True

    def _decay(self, hook: str) -> None:
        for parameter in self.parameters() if f"_{hook}" in vars(self) else ():
            parameter.data = parameter.data * 0.9

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self._decay("zero")

    def on_after_backward(self) -> None:
        self._decay("backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self._decay("step")


@pytest.mark.parametrize("plan", ["replicate", "zero2"])
@pytest.mark.parametrize("hook", ["zero", "backward", "step"])
def test_parameters_whose_data_hooks_replace(two_ranks: RankPool, hook: str, plan: str) -> None:
    make = functools.partial(PutsOtherMemory, hook)
    results = two_ranks.run(run, make, {"data_parallel": plan}, 2, max_epochs=1)
    assert_equals_one_device(results, run(make, "auto", data=lambda: InOrder(rows(), ROWS), max_epochs=1))


CALLED: list[str] = []


def _traced(method: Any) -> Any:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        CALLED.append(method.__name__)
        return method(*args, **kwargs)

    return call


class Decorated(Quiet):
    """Lightning's own look takes these for hooks that are not overridden."""

    on_before_optimizer_step = _traced(L.LightningModule.on_before_optimizer_step)
    on_after_backward = _traced(L.LightningModule.on_after_backward)
    configure_gradient_clipping = _traced(L.LightningModule.configure_gradient_clipping)


def test_decorated_hooks_are_called() -> None:
    CALLED.clear()
    run(Decorated, "auto", max_epochs=1)
    eager = CALLED.copy()
    CALLED.clear()
    run(Decorated, max_epochs=1)
    assert eager == CALLED
