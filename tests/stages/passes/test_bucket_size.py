"""Bucket sizes, and whether rows are gathered, follow from the cost model alone."""

from __future__ import annotations

import pytest

from lightning_spmd.cost.collectives import LINKS, Link, seconds
from lightning_spmd.stages.passes.bucket_size import LARGEST_BUCKET, LATENCY_SHARE, MIB, bucket_bytes
from lightning_spmd.stages.passes.gather_embedding_rows import gathering_rows_is_faster

ETHERNET = LINKS["cpu"]


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
