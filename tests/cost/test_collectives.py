"""The cost model says what the formulas say, and bucket sizes follow from it alone."""

from __future__ import annotations

import pytest
import torch

from lightning_spmd.cost.collectives import (
    LARGEST_BUCKET,
    LATENCY_SHARE,
    LINKS,
    MIB,
    Link,
    bucket_bytes,
    gathering_rows_is_faster,
    link_of,
    seconds,
    wire_bytes,
)

ETHERNET = LINKS["cpu"]


def test_a_ring_all_reduce_is_a_reduce_scatter_and_an_all_gather_of_the_pieces() -> None:
    for ranks in (2, 3, 8, 1024):
        size = 1024 * 3 * 1000
        both = wire_bytes("reduce_scatter", size, ranks) + wire_bytes("all_gather", size // ranks, ranks)
        assert wire_bytes("all_reduce", size, ranks) == pytest.approx(both, rel=1e-9)


def test_one_rank_needs_no_time() -> None:
    assert seconds("all_reduce", 1 << 30, 1, ETHERNET) == 0.0


def test_a_megabyte_over_gigabit_ethernet_takes_eight_milliseconds() -> None:
    assert seconds("all_reduce", 10**6, 2, ETHERNET) == pytest.approx(8e-3 + ETHERNET.latency)


@pytest.mark.parametrize(
    ("total", "low", "high"),
    [(1_000, MIB, MIB), (21_120_000, MIB, 2 * MIB), (400 * MIB, 24 * MIB, LARGEST_BUCKET)],
    ids=["tiny", "16 layers of 1.3 MB", "hundreds of MiB"],
)
def test_reductions_are_cut_into_about_sixteen_buckets_within_bounds(total: int, low: int, high: int) -> None:
    assert low <= bucket_bytes("all_reduce", total, 2, ETHERNET) <= high


@pytest.mark.parametrize("ranks", [2, 8, 1024])
@pytest.mark.parametrize("name", LINKS)
def test_latency_is_a_small_share_of_a_full_bucket(name: str, ranks: int) -> None:
    link = LINKS[name]
    time = seconds("all_reduce", bucket_bytes("all_reduce", 64 * MIB, ranks, link), ranks, link)
    assert link.latency / time <= LATENCY_SHARE * 1.01


def test_gathers_grow_only_while_their_copies_cost_less_than_a_latency() -> None:
    size = bucket_bytes("all_gather", 400 * MIB, 2, ETHERNET)
    assert 3 * size / ETHERNET.memory <= ETHERNET.latency
    assert size < bucket_bytes("all_reduce", 400 * MIB, 2, ETHERNET)


def test_rows_are_gathered_when_they_are_few_for_the_table() -> None:
    row, table = 256 * 4, 4096 * 256 * 4
    assert gathering_rows_is_faster(512, row, 8, table, 2, ETHERNET)
    assert not gathering_rows_is_faster(8192, row, 8, table, 2, ETHERNET), "more rows than the table has"
    assert not gathering_rows_is_faster(512, row, 8, table, 64, ETHERNET), "the rows of 64 ranks"
    assert not gathering_rows_is_faster(512, row, 8, table, 2, Link(1.0, 1e12, 1e12)), "two latencies instead of one"


def test_a_link_is_chosen_by_device() -> None:
    assert link_of(torch.device("cpu")) is LINKS["cpu"]
    assert link_of(torch.device("cuda", 3)) is LINKS["cuda"]
    assert link_of(torch.device("meta")) is LINKS["cuda"]
