"""What is said of an optimizer whose groups are no longer those of a captured graph: in words, not by objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_spmd.stages.capture.optimizer.optimizer_swap import OptimizerSwap


def _of_first(change: Callable[[dict[str, Any]], Any]) -> Callable[[torch.optim.Optimizer], Any]:
    return lambda optimizer: change(optimizer.param_groups[0])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda o: o.add_param_group({"params": [nn.Parameter(torch.ones(1))]}), "there are 2 groups and were 1"),
        (_of_first(lambda group: group["params"].pop()), "group 0 has other parameters"),
        (_of_first(lambda group: group.update(swa_lr=0.1)), "group 0 has 'swa_lr' now"),
        (_of_first(lambda group: group.pop("nesterov")), "group 0 has 'nesterov' no more"),
        (_of_first(lambda group: group.update(nesterov=True)), "'nesterov' of group 0 is True and was False"),
        (_of_first(lambda group: group.update(lr=group.pop("lr"))), "its entries are in another order"),
    ],
)
def test_a_change_of_groups_is_named(change: Callable[[torch.optim.Optimizer], Any], said: str) -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1, momentum=0.9)
    inputs: Any = None  # no step is captured
    guard = OptimizerSwap(optimizer, {}, inputs).guards(stepped=False)[0]
    assert guard.failure() is None
    change(optimizer)
    assert guard.failure() == f"optimizer.param_groups changed: {said}"
