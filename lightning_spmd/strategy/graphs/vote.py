"""The ranks' vote on the graph of a step: one small exchange before each step, a second one if their rows differ."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from lightning_spmd.errors import BatchError, RankDisagreementError
from lightning_spmd.ir.stable_hash import stable_hash
from lightning_spmd.parallel.mesh import Mesh
from lightning_spmd.stages.capture.batch.batch import Batch
from lightning_spmd.stages.runtime.agreement.control import ControlPlane
from lightning_spmd.strategy.graphs.graph_table import Found, GraphTable
from lightning_spmd.strategy.graphs.run_context import StepRequest
from lightning_spmd.strategy.ranks.places import Moment
from lightning_spmd.strategy.steps.shared_leaves import check_shared


def voted(
    control: ControlPlane,
    mesh: Mesh,
    table: GraphTable,
    request: StepRequest,
    moment: Moment,
    *,
    follows: bool = False,
) -> Found:
    """The split and the graph that all ranks agree on; no graph if one rank has none.

    Args:
        control: messages among the ranks.
        mesh: the mesh.
        table: the graphs.
        request: the step.
        moment: the place in the run.
        follows: the step's Python runs first and the graph is chosen after it, so the index found here is not used.

    Raises:
        BatchError: on every rank, if the batches cannot form one.
        RankDisagreementError: on every rank, if they are at different batches or have different numbers of batches.
        SIGTERMException: on every rank, if one of them received SIGTERM.
    """

    def find(split: tuple[int, ...]) -> Found:
        return Found((), split, 0, None) if follows else table.find(request, split)

    rows, problem = _rows(request.batch)
    found = find((rows,) * mesh.batch_size)
    graph, shape = (None, -1) if problem else (found.index, _shape(table, request))
    vote = control.vote(moment.place, graph, rows, shape, ends=moment.ends, told=moment.told)
    moment.check(control, vote)
    if vote.shape[0] != vote.shape[1] or vote.shape[0] == -1:
        _reconcile(control, table, request, problem)
        return voted(control, mesh, table, request, moment, follows=follows)
    if vote.rows[0] != vote.rows[1]:
        found = find(mesh.split(control.gather(rows)))
        vote = control.vote(moment.place, found.index, 0, 0)
    same = not vote.missing and vote.graph[0] == vote.graph[1]
    return found if same else dataclasses.replace(found, index=None)


def agreed(control: ControlPlane | None, index: int | None) -> int | None:
    """The graph that every rank would run, or None."""
    return index if control is None or len(set(control.gather(index))) == 1 else None


def _shape(table: GraphTable, request: StepRequest) -> int:
    """A hash of what the batches of all ranks, and what is to be done with them, must have in common."""
    batch = request.batch
    looks = None if batch is None else (batch.shared_key(), batch.shared_values())
    return hash_of_step(table.step_key(request), looks)


@functools.lru_cache(maxsize=256)
def hash_of_step(key: tuple[Any, ...], looks: tuple[Any, ...] | None) -> int:
    """A hash of what all ranks must do with their batches, and of what is known about these."""
    return stable_hash((key, looks))


def _rows(batch: Batch | None) -> tuple[int, BatchError | None]:
    try:
        return 0 if batch is None else batch.rows(), None
    except BatchError as error:
        return 0, error


def check_same_part(control: ControlPlane, table: GraphTable, request: StepRequest) -> None:
    """Compare the steps that ranks are about to run on local batches, and name the difference.

    Raises:
        RankDisagreementError: on every rank.
    """
    _reconcile(control, table, dataclasses.replace(request, batch=None), None)


def _reconcile(control: ControlPlane, table: GraphTable, request: StepRequest, problem: BatchError | None) -> None:
    """Make batches that differ in nothing but their memory order alike.

    Raises:
        BatchError: on every rank, if they differ in more, or one of them is none.
        RankDisagreementError: on every rank, if they would run different parts of the iteration.
    """
    batch = request.batch
    told = None if problem is None else (str(problem), problem.is_ragged)
    look = ("no batch",) * 2 if batch is None else (batch.describe(layout=False), batch.describe())
    sides = control.gather((told, *table.step_key(request), *look))
    problems = {rank: side[0] for rank, side in enumerate(sides) if side[0] is not None}
    if problems:
        rank, (text, is_ragged) = min(problems.items())
        text = text if len(problems) == len(sides) else f"on rank {rank}: {text}"
        raise BatchError(text, is_ragged=is_ragged)
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
            f"  rank {rank}: {steps[1]}\nwhat decides this (accumulate_grad_batches, gradient_clip_val, which "
            "parameters have gradients, hooks that call the optimizer) must be the same on all ranks"
        )
    raise BatchError(
        "the ranks hold batches that differ in more than the number of rows:\n"
        f"  rank 0: {sides[0][-1]}\n  rank {rank}: {sides[rank][-1]}\n"
        "make every batch of the same tensors, padded to the same shape (in the collate function); or let each rank "
        "have a batch of its own, SPMDStrategy(batch='local')",
        is_ragged=len(set(control.gather(() if batch is None else batch.kinds()))) == 1,
    )
