"""Refuses tensors without dimensions that count this rank's rows, where a step computes with one."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from lightning_spmd.errors import CaptureError
from lightning_spmd.ir.first import first
from lightning_spmd.ir.node_info import info_of
from lightning_spmd.ir.signature import GraphInput, InputRole
from lightning_spmd.stages.capture.batch import Batch
from lightning_spmd.stages.capture.rows_of_rank import about_number


def refuse_counts(batch: Batch | None, inputs: Iterable[tuple[fx.Node, GraphInput]]) -> None:
    """Raise if an input that the graph reads is the number of this rank's rows.

    Args:
        batch: this rank's.
        inputs: of the graph.

    Raises:
        CaptureError: naming it and where it is read.
    """
    if batch is None:
        return
    for node, entry in inputs:
        if entry.role is not InputRole.SHARED_BATCH or not node.users:
            continue
        index = batch.tensors[entry.key[0]]
        if batch.counts_rows(batch.values[index]):
            reader = info_of(first(node.users, "reader of an input"))
            raise CaptureError(about_number(batch.paths[index], batch.rows()), reader.source or None)
