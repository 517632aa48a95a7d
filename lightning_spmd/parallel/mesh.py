"""Mesh axes: names, sizes and process groups."""

from __future__ import annotations

from lightning_spmd.ir.placement import ShardAxis

DATA_PARALLEL = "data_parallel"


def data_parallel_axis(split: tuple[int, ...], rank: int, group: str) -> ShardAxis:
    """The data-parallel axis over all ranks.

    Args:
        split: rows of the global batch on each rank.
        rank: this rank.
        group: name of a process group of the axis' own, never the default one.
    """
    return ShardAxis(DATA_PARALLEL, len(split), rank, group, split)
