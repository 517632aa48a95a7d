"""Which kernels graphs for GPUs are made of, and what travels between the ranks."""

from __future__ import annotations

import pytest

from tests.cuda.facts import facts, in_regions, said_of_backends
from tests.cuda.ranks import Wanted
from tests.helpers.fake_cuda.lane import Lane

BATCH_NORM = (
    "batch_norm_stats",
    "batch_norm_gather_stats_with_counts",
    "batch_norm_elemt",
    "batch_norm_backward_reduce",
    "batch_norm_backward_elemt",
)


@pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn"])
def test_attention_stays_one_kernel_without_a_gather(lane: Lane, kernel: str) -> None:
    found = lane.run(facts, Wanted("gpt", kernel=kernel, bf16=True))
    name = f"aten._scaled_dot_product_{kernel}_attention"
    assert (found.operators[name], found.operators[f"{name}_backward"]) == (1, 1)
    assert found.fallbacks == found.activations == []


def test_the_loss_of_classes_is_in_regions(lane: Lane) -> None:
    """Else its steps in float32 are the largest tensors of a language model, and slow."""
    found = lane.run(in_regions, Wanted("gpt", count=1, bf16=True))
    assert {"aten.nll_loss_forward", "aten.nll_loss_backward", "aten.native_layer_norm_backward"} <= found


def test_collectives_that_gloo_has_not_are_refused_before_they_run(lane: Lane) -> None:
    """It would end the process."""
    backends = ["gloo", "cpu:gloo,cuda:gloo", "nccl", "cpu:gloo,cuda:nccl"]
    gloo, both, *fine = lane.run(said_of_backends, Wanted("gpt", plan="zero3"), backends)
    assert "needs all_gather_into_tensor, reduce_scatter_tensor of a GPU's tensors" in gloo
    assert "Gloo has not" in both
    assert [*fine, *lane.run(said_of_backends, Wanted("gpt"), ["gloo"])] == ["", "", ""]


def test_batch_norm_on_ranks_is_torchs_kernels_for_it(lane: Lane) -> None:
    one, two = (lane.run(facts, Wanted("conv", count=count)) for count in (1, 2))
    assert [two.operators[f"aten.{name}"] for name in BATCH_NORM] == [2] * len(BATCH_NORM)
    assert not any(name in one.operators for name in BATCH_NORM)
    assert one.nodes == 57
    assert two.nodes <= 128  # with plain operators 190; without batch norm 72, and 37 on one device


@pytest.mark.parametrize("options", [{"bf16": True}, {"half": True}, {"true": True}], ids=str)
def test_batch_norms_kernels_are_given_one_precision(lane: Lane, options: dict[str, bool]) -> None:
    """They raise where running statistics or weights are in another one than sums."""
    found = lane.run(facts, Wanted("conv", **options))
    kernels = [found.operators[f"aten.{name}"] for name in BATCH_NORM]
    assert kernels == [0 if options.get("true") else 2] * len(BATCH_NORM)
    assert not found.fallbacks


def test_sharded_weights_travel_in_the_precision_in_which_they_are_read(lane: Lane) -> None:
    plain, mixed = (lane.run(facts, Wanted("gpt", plan="zero3", bf16=bf16)) for bf16 in (False, True))
    assert set(plain.gathers) == {"torch.float32"}
    assert plain.gathered["torch.float32"] == mixed.gathered["torch.float32"] + mixed.gathered["torch.bfloat16"]
    assert mixed.gathered["torch.bfloat16"] > 0.5 * plain.gathered["torch.float32"]
