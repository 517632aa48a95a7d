"""``p.data = x`` is no operator: a graph would go on with what ``p`` was, so such a step runs eagerly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.strategy.small import Net, assert_as_eager


class Quiet(Net):
    """Nothing but the step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)


class HalfTheWeights(Quiet):
    """Computes with half the weights, and puts the others back."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        weight = self.first.weight
        before = weight.data
        weight.data = before * 0.5
        loss = self.loss(batch)
        weight.data = before
        return loss


class Assigning(torch.optim.SGD):
    """As many published optimizers end their step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Tensor | None:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in group["params"]:
                p.data = p.data - group["lr"] * p.grad
        return loss


class AssignedByTheOptimizer(Quiet):
    def configure_optimizers(self) -> Any:
        return Assigning(self.parameters(), lr=0.1)


@pytest.mark.parametrize(("make", "mode"), [(HalfTheWeights, "eager"), (AssignedByTheOptimizer, "split")])
def test_assigned_data_runs_eagerly(make: type[Net], mode: str) -> None:
    assert_as_eager(make, mode=mode)
