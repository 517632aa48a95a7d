"""Under mixed precision a sharded weight is cast where it lies and gathered in half the bytes; the numbers stay."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_spmd.ir.node_info import spec_of
from lightning_spmd.ir.steps import ShardedStep
from lightning_spmd.stages.expand.propagation import placing
from tests.helpers.simulated_training import SimulatedTraining

WIDTH = 16


class Mixed(nn.Module):
    """Layers that autocast runs in bfloat16, one that it does not, and a table that is read both ways."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, targets = batch
        with torch.autocast("cpu", torch.bfloat16):
            h = self.layers(self.norm(self.table(tokens)).relu())
            return F.cross_entropy(h @ self.table.weight.t(), targets)


def _trained(module: nn.Module, split: tuple[int, ...]) -> list[ShardedStep]:
    torch.manual_seed(1)
    training = SimulatedTraining(module, torch.optim.AdamW(module.parameters(), lr=0.1), split, plan="zero3")
    for _ in range(2):
        training.train([torch.randint(7, (sum(split),)), torch.randint(7, (sum(split),))])
    return training.graphs[-1][2]


def _gathered(step: ShardedStep) -> dict[torch.dtype, int]:
    found: dict[torch.dtype, int] = {}
    for node in step.graph_module.graph.nodes:
        if "all_gather" in str(node.target):
            spec = spec_of(node)
            found[spec.dtype] = found.get(spec.dtype, 0) + spec.numel
    return found


@pytest.mark.parametrize("split", [(4, 4), (2, 2, 2)], ids=str)
def test_weights_are_cast_before_they_are_gathered_and_train_to_the_same_bits(split: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    early = Mixed()
    late = copy.deepcopy(early)
    steps = _trained(early, split)
    with mock.patch.object(placing, "casts_to_less", return_value=[]):
        late_steps = _trained(late, split)
    for name, value in early.state_dict().items():
        assert torch.equal(value, late.state_dict()[name]), name
    found, before = _gathered(steps[0]), _gathered(late_steps[0])
    assert set(before) == {torch.float32}
    matrices = 3 * WIDTH * WIDTH
    assert found[torch.bfloat16] >= 2 * matrices - WIDTH * WIDTH  # forward, and but for the last one backward
    assert found[torch.float32] < before[torch.float32] - matrices


def test_a_table_that_is_read_in_both_precisions_is_gathered_once() -> None:
    torch.manual_seed(0)
    module = Mixed()
    module.layers = nn.Sequential()
    (found,) = {tuple(_gathered(step)) for step in _trained(module, (2, 2))}
    assert found == (torch.float32,)
