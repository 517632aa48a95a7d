"""Optimizers whose settings are tensors: each takes their values as Python numbers, which stay inputs of the graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adadelta, Adam, Optimizer, RMSprop

from tests.helpers.ranks import RankPool
from tests.helpers.training import InOrder, assert_compiled, assert_equals_one_device
from tests.strategy.small import ROWS, Quiet, assert_as_eager, rows, run

OPTIMIZERS: dict[str, Callable[[Iterable[Tensor]], Optimizer]] = {
    "SGD": lambda p: SGD(p, lr=torch.tensor(0.1), momentum=0.9),
    "Adam": lambda p: Adam(p, lr=torch.tensor(0.1)),
    "betas": lambda p: Adam(p, lr=torch.tensor(0.1), betas=(torch.tensor(0.9), torch.tensor(0.99)), foreach=False),
    "RMSprop": lambda p: RMSprop(p, lr=torch.tensor([0.01])),
    "Adadelta": lambda p: Adadelta(p, lr=torch.tensor(0.1)),
}


class Scheduled(Quiet):
    name = "SGD"

    def configure_optimizers(self) -> Any:
        optimizer = OPTIMIZERS[self.name](self.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


MAKERS = {name: type("Scheduled", (Scheduled,), {"name": name, "__module__": __name__}) for name in OPTIMIZERS}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_tensor_as_learning_rate_is_bitwise_eager(name: str) -> None:
    assert assert_as_eager(MAKERS[name], max_epochs=1).captures <= 2


def test_on_two_ranks_it_equals_one_device(two_ranks: RankPool) -> None:
    results = two_ranks.run(run, Scheduled, "spmd", 2, max_epochs=1)
    assert_compiled(*results)
    assert_equals_one_device(results, run(Scheduled, "auto", data=lambda: InOrder(rows(), ROWS), max_epochs=1))
