"""State that an optimizer would create in its first step: made before it where that changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.ranks import RankPool
from tests.helpers.training import TrainingCase, assert_bitwise, assert_compiled, one_device, train, train_on
from tests.strategy.small import Quiet, assert_as_eager

# SGD's momentum begins as the first gradient; Lion's step is no part of a graph
GRAPHS = {
    "adamw": 1,
    "adamw_fused": 1,
    "rmsprop_centered": 1,
    "nadam": 1,
    "adadelta": 1,
    "adagrad": 1,
    "sgd": 2,
    "lion": 1,
}


@pytest.mark.parametrize(("name", "graphs"), GRAPHS.items())
def test_one_graph_where_the_first_step_is_like_the_others(name: str, graphs: int) -> None:
    case = TrainingCase("mlp", name, batches=4, count=64)
    ours = train(case, "spmd")
    assert_bitwise(ours, one_device(case))
    assert ours.captures == graphs


class Reads(Quiet):
    """Python reads a value in every step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return loss * 0.5 if loss.item() > 0 else loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def test_one_graph_where_python_reads() -> None:
    assert assert_as_eager(Reads).captures == 1


@pytest.mark.parametrize("data_parallel", ["replicate", "zero2", "zero3"])
def test_ranks_make_their_parts(two_ranks: RankPool, data_parallel: str) -> None:
    case = TrainingCase("mlp", "adamw", batches=4, count=64)
    for ours in train_on(two_ranks, case, {"data_parallel": data_parallel}):
        assert_compiled(ours)
        assert ours.captures == 1
        assert len(ours.optimizer_state) >= 3 * 4
