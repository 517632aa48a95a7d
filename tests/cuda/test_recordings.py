"""What of graphs for GPUs can be CUDA graphs."""

from __future__ import annotations

import pytest

from tests.cuda.models import MODELS
from tests.cuda.ranks import Wanted
from tests.cuda.recordings import recordings, recordings_of_ranks
from tests.helpers.fake_cuda.lane import Lane


@pytest.mark.parametrize("model", MODELS)
def test_on_one_device_all_but_the_update_is_one_cuda_graph(lane: Lane, model: str) -> None:
    found = lane.run(recordings, Wanted(model, count=1))
    assert found.count == 1
    assert found.left_out == {("aten._fused_adamw_", "takes a number of this step"): 1}


@pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn"])
def test_attention_is_recorded_unless_it_drops(lane: Lane, kernel: str) -> None:
    found = lane.run(recordings, Wanted("gpt", count=1, kernel=kernel, bf16=True))
    assert sum(found.left_out.values()) == 1


def test_ranks_have_the_same_recordings_and_collectives_between_them(lane: Lane) -> None:
    first, second = lane.run(recordings_of_ranks, Wanted("gpt", plan="zero3"))
    assert first == second
    assert first.kernels > 80
    outside = {name for (name, _), _ in first.left_out.items() if name.startswith("_c10d_functional")}
    assert outside == {
        f"_c10d_functional.{name}"
        for name in ("all_gather_into_tensor", "all_reduce_", "reduce_scatter_tensor", "wait_tensor")
    }


def test_numbers_of_the_step_are_never_recorded(lane: Lane) -> None:
    found = lane.run(recordings, Wanted("gpt", count=1, optimizer="adamw", clip=0.5))
    taking = {name for (name, why), _ in found.left_out.items() if why == "takes a number of this step"}
    assert "aten._foreach_addcdiv_.ScalarList" in taking
    assert found.kernels > 50
