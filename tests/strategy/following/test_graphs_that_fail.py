"""A graph whose first run fails when the step's Python is done: the step goes on from its calls, as eager training."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_spmd.stages.runtime.trial_runs.trial_runs import FirstRunError
from lightning_spmd.strategy.steps.iteration import TrainingIteration
from tests.helpers.training import assert_bitwise
from tests.strategy.small import Net, Quiet, run


class _Product(Function):
    """It gives an operand's gradient as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight = ctx.saved_tensors
        return gradients[0] @ weight, gradients[0].t() @ x


class OwnFunction(Quiet):
    def forward(self, x: Tensor) -> Tensor:
        return _Product.apply(torch.tanh(self.first(x)), self.last.weight) + self.last.bias


class Checkpointed(Quiet):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(lambda x: torch.tanh(self.first(x)), x, use_reentrant=False))


class Retains(Quiet):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.hidden = torch.tanh(self.first(batch[0]))
        self.hidden.retain_grad()
        return F.cross_entropy(self.last(self.hidden), batch[1])

    def on_after_backward(self) -> None:
        gradient = self.hidden.grad
        assert gradient is not None
        self.log("gradient", gradient.abs().sum())


class SeesGradients(OwnFunction):
    def on_after_backward(self) -> None:
        gradient = self.first.weight.grad
        assert gradient is not None
        self.log("gradient", gradient.abs().sum())


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("failing", [(0,), (1, 4)])
@pytest.mark.parametrize("make", [Net, OwnFunction, Checkpointed, Retains, SeesGradients])
def test_nothing_is_lost(
    make: type[Net], failing: tuple[int, ...], window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = run(make, "auto", accumulate_grad_batches=window, max_epochs=1)
    shown, count = TrainingIteration._shown, itertools.count()

    def fails(self: Any, *args: Any) -> Any:
        if next(count) in failing:
            raise FirstRunError("the graph could not be run: planted")
        return shown(self, *args)

    monkeypatch.setattr(TrainingIteration, "_shown", fails)
    ours = run(make, "spmd", accumulate_grad_batches=window, max_epochs=1)
    assert next(count) > failing[-1]
    assert_bitwise(ours, theirs)
