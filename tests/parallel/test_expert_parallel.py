"""Which parameters are stacks of experts, and the errors of the options."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_spmd import SPMDStrategy
from lightning_spmd.errors import ConfigurationError
from lightning_spmd.parallel.expert_parallel import stacks_of_experts
from lightning_spmd.parallel.mesh import shard_size


class Experts(nn.Module):
    """Eight experts.

    Args:
        count: how many.
    """

    def __init__(self, count: int = 8) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.zeros(count, 4, 6))
        self.up_bias = nn.Parameter(torch.zeros(count, 6))
        self.scale = nn.Parameter(torch.zeros(6))


class Net(nn.Module):
    """A stack, a list of linear layers, and weights of three dimensions that are no stack."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(1, 16, 4))
        self.convolution = nn.Conv1d(8, 8, 3)
        self.experts = Experts()
        self.tied = self.experts
        self.list = nn.ModuleList(nn.Linear(4, 4) for _ in range(8))


def test_stacks_are_found_by_their_shape() -> None:
    wanted = {"experts.up": (8, 4, 6), "experts.up_bias": (8, 6), "tied.up": (8, 4, 6), "tied.up_bias": (8, 6)}
    assert stacks_of_experts(Net(), "auto", 4) == wanted
    assert stacks_of_experts(Net(), ["*experts"], 2) == wanted


@pytest.mark.parametrize(
    ("module", "wanted", "size", "message"),
    [
        (Net(), ["*expert"], 2, "no module with parameters of its own matches '\\*expert'"),
        (Net(), ["*experts"], 3, "expert_parallel_plan: .*'experts' .*expert_parallel_size=3: its 8 experts"),
        (Net(), ["list.0"], 2, "it has no parameter of its own with one matrix an expert"),
        (Net(), "auto", 3, "no module with stacked expert weights"),
        (nn.Linear(2, 2), "auto", 2, "no module with stacked expert weights"),
    ],
)
def test_what_cannot_be_split_is_named(module: nn.Module, wanted: Any, size: int, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        stacks_of_experts(module, wanted, size)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"expert_parallel_size": 0}, "expert_parallel_size=0"),
        ({"expert_parallel_plan": ["*experts"]}, "no effect with expert_parallel_size=1"),
        ({"expert_parallel_size": 2, "expert_parallel_plan": "*experts"}, "give a list of patterns"),
    ],
)
def test_options_are_checked(options: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        SPMDStrategy(**options)


def test_experts_decide_among_how_many_state_is_split() -> None:
    sizes = {"data_parallel": 8, "context_parallel": 1, "tensor_parallel": 1}
    assert shard_size("auto", sizes, 8) == 8
    assert shard_size("auto", sizes, 8, experts=4) == 4
    assert shard_size(4, sizes, 8, experts=4) == 4
    with pytest.raises(ConfigurationError, match="leave data_parallel_shard_size out"):
        shard_size(2, sizes, 8, experts=4)
    with pytest.raises(ConfigurationError, match="expert_parallel_size=3 does not divide the 8"):
        shard_size("auto", sizes, 8, experts=3)


def test_a_module_is_split_over_one_axis() -> None:
    strategy = SPMDStrategy(expert_parallel_size=2, tensor_parallel_size=2, tensor_parallel_plan={"experts": "experts"})
    strategy.expert_sharing.resolve(Net())
    with pytest.raises(ConfigurationError, match="splits 'experts.up', which expert_parallel_size splits"):
        strategy.layer_sharing.resolve(Net())
