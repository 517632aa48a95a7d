"""Which way keys and values travel."""

from __future__ import annotations

import pytest
import torch

from lightning_spmd.cost.attention import AttentionShape, gathered_bytes, machine_of, ring_bytes, ring_is_better

CUDA, CPU = machine_of(torch.device("cuda")), machine_of(torch.device("cpu"))


def shape_of(positions: int, *, groups: int = 32) -> AttentionShape:
    """One sequence through a layer of 32 heads of 128, in bfloat16."""
    return AttentionShape(1, 32, groups, positions, positions, 128, 2)


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_every_rank_sends_its_keys_to_all_others_and_gets_their_gradients(ranks: int) -> None:
    shape = shape_of(ranks)
    own = 2 * 32 * 128 * 2
    assert shape.key_bytes == ranks * own
    assert gathered_bytes(shape, ranks, backward=False) == ring_bytes(shape, ranks, backward=False) == (ranks - 1) * own
    assert gathered_bytes(shape, ranks, backward=True) == 2 * (ranks - 1) * own
    assert ring_bytes(shape, ranks, backward=True) == (2 * ranks - 1) * own  # the gradients go all the way round


@pytest.mark.parametrize("backward", [False, True])
def test_a_ring_hides_what_a_gather_waits_for(backward: bool) -> None:
    for causal in (False, True):
        assert not ring_is_better(shape_of(4096), 8, CUDA, causal=causal, backward=backward), "hops of latency"
        assert ring_is_better(shape_of(131072), 8, CUDA, causal=causal, backward=backward), "scores beside hops"


def test_fewer_heads_of_keys_are_gathered_longer() -> None:
    lengths = [1 << n for n in range(10, 20)]

    def first(groups: int) -> int:
        better = [
            n for n in lengths if ring_is_better(shape_of(n, groups=groups), 8, CUDA, causal=True, backward=False)
        ]
        return min(better)

    assert first(groups=2) >= first(groups=32)


def test_keys_that_would_fill_the_memory_go_round() -> None:
    slow = shape_of(1 << 19)
    assert 2 * slow.key_bytes > 1 << 30
    assert ring_is_better(slow, 2, CPU, causal=False, backward=False)


def test_many_ranks_with_short_pieces_gather() -> None:
    assert not ring_is_better(shape_of(8192), 1024, CUDA, causal=True, backward=True)
    assert not ring_is_better(shape_of(8192), 1024, CPU, causal=True, backward=True)
