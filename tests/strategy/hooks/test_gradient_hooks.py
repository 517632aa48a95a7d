"""Hooks and overrides that look at gradients or at the update: split mode, and optimizer_step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.ranks import RankPool
from tests.helpers.training import (
    InOrder,
    Result,
)
from tests.strategy.small import ROWS, Net, Quiet, assert_as_eager, rows, run

SEEN: list[float] = []


class GradientHooks(Net):
    """Reads gradients, halves them, clips one of them by hand."""

    def on_before_zero_grad(self, optimizer: Any) -> None:
        SEEN.append(sum(float(p.grad.sum()) for p in self.parameters() if p.grad is not None))

    def on_before_backward(self, loss: Tensor) -> None:
        SEEN.append(float(loss))

    def on_after_backward(self) -> None:
        SEEN.append(float(self.first.weight.grad.norm()))
        for p in self.parameters():
            p.grad.mul_(0.5)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        nn.utils.clip_grad_norm_(self.last.parameters(), 0.1)
        SEEN.append(float(self.last.weight.grad.norm()))


def _hooked(strategy: str, devices: int = 1, **flags: Any) -> tuple[Result, list[float]]:
    SEEN.clear()
    result = run(
        QuietGradientHooks if devices > 1 or flags.pop("quiet", False) else GradientHooks, strategy, devices, **flags
    )
    return result, list(SEEN)


class QuietGradientHooks(GradientHooks, Quiet):
    pass


@pytest.mark.parametrize("flags", [{}, {"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.05}], ids=str)
def test_gradient_hooks_see_and_change_gradients(flags: dict[str, Any]) -> None:
    theirs, seen = _hooked("auto", **flags)
    ours, seen_ours = _hooked("spmd", **flags)
    assert (ours.mode, ours.captures > 0) == ("split", True)
    assert seen_ours == seen
    assert (ours.losses, ours.logged) == (theirs.losses, theirs.logged)
    assert all(torch.equal(ours.weights[k], v) for k, v in theirs.weights.items())


def test_gradient_hooks_on_two_ranks_see_the_global_gradient(two_ranks: RankPool) -> None:
    _, seen = _hooked("auto", quiet=True, data=lambda: InOrder(rows(), ROWS))
    for result, seen_ours in two_ranks.run(_hooked, "spmd", 2):
        assert result.mode == "split"
        assert seen_ours == pytest.approx(seen, rel=1e-4, abs=1e-6)


class OwnClipping(Net):
    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        if self.current_epoch < 2:
            self.clip_gradients(
                optimizer, gradient_clip_val=0.02 * (self.current_epoch + 1), gradient_clip_algorithm="norm"
            )


def test_overridden_clipping_is_honoured() -> None:
    assert_as_eager(OwnClipping, mode="split")


class EverySecondZeroGrad(Net):
    """Gradients of two batches add up."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 2 == 0:
            optimizer.zero_grad(set_to_none=False)


def test_overridden_zero_grad_is_honoured() -> None:
    assert_as_eager(EverySecondZeroGrad, mode="split")


class StepHooks(Net):
    """A hook before and one after each step, as third-party libraries register them."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        optimizer.register_step_pre_hook(lambda o, args, kwargs: SEEN.append(float(self.first.weight.norm())))
        optimizer.register_step_post_hook(lambda o, args, kwargs: SEEN.append(float(self.first.weight.grad.norm())))
        return optimizer


def test_optimizer_step_hooks_run_each_step() -> None:
    SEEN.clear()
    run(StepHooks, "auto")
    expected = list(SEEN)
    SEEN.clear()
    ours = run(StepHooks, "spmd")
    assert ours.mode == "split"
    assert expected == SEEN
    assert len(expected) == 36


class CallsClosure(Net):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        optimizer.step()


class Warmup(Net):
    """The documented recipe: delegate, then change lr."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * min(1.0, (self.trainer.global_step + 1) / 10)


class EveryOtherStep(Net):
    """Steps on every second batch, runs the closure on all."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 2 == 0:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


@pytest.mark.parametrize("make", [CallsClosure, Warmup])
@pytest.mark.parametrize("flags", [{}, {"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.05}], ids=str)
def test_optimizer_step_that_calls_the_closure_itself(make: type[Net], flags: dict[str, Any]) -> None:
    assert_as_eager(make, **flags)


def test_optimizer_step_that_skips_steps() -> None:
    assert_as_eager(EveryOtherStep)
