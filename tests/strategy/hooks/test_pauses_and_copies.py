"""What hooks write into gradients reaches an update that first makes something of them: a copy, or their negative."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from tests.helpers.ranks import RankPool
from tests.helpers.training import InOrder, Result, assert_equals_one_device, fit


class Linear(L.LightningModule):
    """Two layers, and an optimizer that begins with arithmetic which is as good on the parts of a sum."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3))
        self.options = options

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, **self.options)


class Halves(L.Callback):
    """Gradients of the first steps, in place or by giving them other memory."""

    def __init__(self, assigns: bool = False) -> None:
        self.assigns = assigns

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        for p in pl_module.parameters() if trainer.global_step < 2 else ():
            if self.assigns:
                p.grad.data = p.grad.data * 0.5
            else:
                p.grad.mul_(0.5)


def halved(strategy: Any, devices: int, assigns: bool = False, **options: Any) -> Result:
    L.seed_everything(3, verbose=False)
    rows = torch.randn(16 * 4, 12, generator=torch.Generator().manual_seed(2))
    data = [(row, row[:3].argmax()) for row in rows]
    return fit(Linear(**options), InOrder(data, 16), strategy, devices, [Halves(assigns)], max_epochs=1)[0]


FIRST = [({"momentum": 0.9}, "replicate"), ({"momentum": 0.9, "maximize": True}, "zero2")]
MORE = [({"maximize": True}, "replicate"), ({"momentum": 0.9}, "zero3"), ({"maximize": True}, "zero3")]


@pytest.mark.parametrize(("options", "plan"), FIRST + [pytest.param(*way, marks=pytest.mark.matrix) for way in MORE])
def test_halved_gradients_are_halved_for_the_update(two_ranks: RankPool, options: dict[str, Any], plan: str) -> None:
    results = two_ranks.run(halved, {"data_parallel": plan}, 2, **options)
    assert_equals_one_device(results, halved("auto", 1, **options))


@pytest.mark.parametrize("plan", ["replicate", "zero2", "zero3"])
def test_gradients_that_get_other_memory_are_seen(two_ranks: RankPool, plan: str) -> None:
    results = two_ranks.run(halved, {"data_parallel": plan}, 2, assigns=True)
    assert_equals_one_device(results, halved("auto", 1))
