"""Which graph all ranks run: one small exchange before each step, a second one where their rows differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from lightning_spmd.errors import BatchError, RankDisagreementError
from lightning_spmd.parallel.mesh import Mesh
from lightning_spmd.stages.capture.batch import Batch
from lightning_spmd.stages.runtime.control import ControlPlane, stable_hash
from lightning_spmd.strategy.graph_table import Found, GraphTable
from lightning_spmd.strategy.places import Moment
from lightning_spmd.strategy.run_context import StepRequest
from lightning_spmd.strategy.shared_leaves import check_shared


def agreed_choice(control: ControlPlane, mesh: Mesh, table: GraphTable, request: StepRequest, moment: Moment) -> Found:
    """The split and the graph on which all ranks agree; no graph if one of them has none.

    Raises:
        BatchError: on every rank; the batches cannot be one.
        RankDisagreementError: on every rank; they are not at the same batch, or have different numbers of batches.
        SIGTERMException: on every rank; one of them was told to stop.
    """
    batch = request.batch
    rows, problem = _rows(batch)
    found = table.find(request, (rows,) * mesh.batch_size)
    looks = None if batch is None else (batch.shared_key(), batch.shared_values())
    shape = stable_hash((table.step_key(request), looks, *request.numbers.items()))
    vote = control.vote(
        moment.place,
        None if problem else found.index,
        rows,
        -1 if problem else shape,
        ends=moment.ends,
        stop=moment.told_to_stop,
    )
    moment.check(control, vote)
    if vote.shape[0] != vote.shape[1] or vote.shape[0] == -1:
        _check_numbers(control, request.numbers)
        _reconcile(control, table, request, problem)
        return agreed_choice(control, mesh, table, request, moment)
    if vote.rows[0] != vote.rows[1]:
        found = table.find(request, mesh.split(control.gather(rows)))
        vote = control.vote(moment.place, found.index, 0, 0)
    same = not vote.missing and vote.graph[0] == vote.graph[1]
    return found if same else dataclasses.replace(found, index=None)


def _rows(batch: Batch | None) -> tuple[int, BatchError | None]:
    try:
        return 0 if batch is None else batch.rows(), None
    except BatchError as error:
        return 0, error


def _check_numbers(control: ControlPlane, numbers: Mapping[str, Any]) -> None:
    """Compare the numbers of Python's state that are inputs of graphs.

    Raises:
        RankDisagreementError: on every rank; one of them differs.
    """
    sides = control.gather(dict(numbers))
    for rank, side in enumerate(sides):
        for path in sorted({*side, *sides[0]}):
            ours, theirs = sides[0].get(path, "not followed"), side.get(path, "not followed")
            if repr(ours) != repr(theirs):
                raise RankDisagreementError(
                    f"{path} is {ours} on rank 0 and {theirs} on rank {rank}: a number that the step reads must be the "
                    "same on all ranks (compute it from what is logged or from self.all_gather, not from a rank's rows)"
                )


def _reconcile(control: ControlPlane, table: GraphTable, request: StepRequest, problem: BatchError | None) -> None:
    """Make batches that differ in nothing but their memory order alike.

    Raises:
        BatchError: on every rank, if they differ in more, or one of them is none.
        RankDisagreementError: on every rank, if they would run different parts of the iteration.
    """
    batch = request.batch
    told = None if problem is None else str(problem)
    look = ("no batch",) * 2 if batch is None else (batch.describe(layout=False), batch.describe())
    sides = control.gather((told, *table.step_key(request), *look))
    problems = {rank: side[0] for rank, side in enumerate(sides) if side[0] is not None}
    if problems:
        rank, text = min(problems.items())
        raise BatchError(text if len(problems) == len(sides) else f"on rank {rank}: {text}")
    rank = next((rank for rank, side in enumerate(sides) if side[:-1] != sides[0][:-1]), None)
    if rank is None:
        if batch is not None:
            check_shared(control, batch)
        if batch is None or len({side[-1] for side in sides}) == 1:
            raise RankDisagreementError(f"the ranks' batches differ in a way that nothing shows: {sides[0][-1]}")
        batch.make_contiguous()
        return
    steps = [", ".join(map(str, sides[r][1:-2])) for r in (0, rank)]
    if steps[0] != steps[1]:
        raise RankDisagreementError(
            f"the ranks are about to run different parts of the training iteration:\n  rank 0: {steps[0]}\n"
            f"  rank {rank}: {steps[1]}\nwhat decides this (accumulate_grad_batches, which parameters have gradients, "
            "hooks that call the optimizer) must be the same on all ranks"
        )
    raise BatchError(
        "the ranks hold batches that differ in more than the number of rows:\n"
        f"  rank 0: {sides[0][-1]}\n  rank {rank}: {sides[rank][-1]}\n"
        "make every batch of the same tensors, padded to the same shape (in the collate function)"
    )
