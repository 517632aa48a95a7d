"""Which graph all ranks run: one small exchange before each step, a second one where their rows differ."""

from __future__ import annotations

import dataclasses
from typing import NoReturn

from lightning_spmd.errors import BatchError
from lightning_spmd.parallel.mesh import Mesh
from lightning_spmd.stages.capture.batch import Batch
from lightning_spmd.stages.runtime.agreement import ControlPlane, stable_hash
from lightning_spmd.strategy.graph_table import Found, GraphTable
from lightning_spmd.strategy.run_context import StepRequest


def agreed_choice(control: ControlPlane, mesh: Mesh, table: GraphTable, request: StepRequest) -> Found:
    """The split and the graph on which all ranks agree; no graph if one of them has none.

    Raises:
        BatchError: on every rank; the batches cannot be one.
    """
    batch = request.batch
    problem: BatchError | None = None
    rows = 0
    try:
        rows = 0 if batch is None else batch.rows()
    except BatchError as error:
        problem = error
    found = table.find(request, (rows,) * mesh.batch_size)
    shape = stable_hash(None if batch is None else batch.cache_key()[1:])
    vote = control.vote(None if problem else found.index, rows, -1 if problem else shape)
    if vote.shape[0] != vote.shape[1] or vote.shape[0] == -1:
        _reject_batch(control, batch, problem)
    if vote.rows[0] != vote.rows[1]:
        found = table.find(request, mesh.split(control.gather(rows)))
        vote = control.vote(found.index, 0, 0)
    same = not vote.missing and vote.graph[0] == vote.graph[1]
    return found if same else dataclasses.replace(found, index=None)


def _reject_batch(control: ControlPlane, batch: Batch | None, problem: BatchError | None) -> NoReturn:
    sides = control.gather((None if batch is None else batch.describe(), None if problem is None else str(problem)))
    told = next((text for _, text in sides if text is not None), None)
    if told is not None:
        raise BatchError(told)
    other = next(i for i, side in enumerate(sides) if side != sides[0])
    raise BatchError(
        "the ranks hold batches that differ in more than the number of rows:\n"
        f"  rank 0: {sides[0][0]}\n  rank {other}: {sides[other][0]}\n"
        "pad every batch to the same shape (in the collate function)"
    )
