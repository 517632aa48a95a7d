"""The loss in chunks in graphs for GPUs, as plain values."""

from __future__ import annotations

import dataclasses

from lightning_spmd.ir.stable_hash import stable_hash
from lightning_spmd.stages import BuildOptions
from lightning_spmd.stages import build as build_graphs
from lightning_spmd.stages.runtime.agreement.same_graphs import describe
from tests.cuda.ranks import Wanted, build, process_groups
from tests.cuda.stand_ins import gpus


def in_chunks(wanted: Wanted) -> list[tuple[str, int]]:
    """Of all ranks: what was done, and what ranks compare."""
    return [_in_chunks(dataclasses.replace(wanted, rank=rank)) for rank in range(wanted.count)]


def _in_chunks(wanted: Wanted) -> tuple[str, int]:
    with gpus(wanted.kernel), process_groups(wanted.rank, wanted.count):
        built = build(wanted)
        captured, ranks = built.executable.captured, built.ranks
        axes = () if ranks.mesh is None else ranks.mesh.axes((wanted.rows,) * wanted.count)
        ours = build_graphs(captured, axes, BuildOptions(loss_chunks=4), ranks.plan(captured.variant))
        (remark,) = ours.remarks
        return remark, stable_hash(describe(ours.main))
