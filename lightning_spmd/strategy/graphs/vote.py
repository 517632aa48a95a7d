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


class GraphVote:
    """The choice of a graph for one step: this rank's candidate, and the vote under way.

    Args:
        control: messages among the ranks.
        mesh: the mesh.
        table: the graphs.
        request: the step.
        moment: the place in the run.
        follows: the step's Python runs first and the graph is chosen after it, so the index found here is not used.

    Attributes:
        found: the graph that this rank would run if all ranks have equally many rows.
    """

    def __init__(
        self,
        control: ControlPlane,
        mesh: Mesh,
        table: GraphTable,
        request: StepRequest,
        moment: Moment,
        *,
        follows: bool = False,
    ) -> None:
        self._control, self._mesh, self._table, self._request, self._moment = control, mesh, table, request, moment
        self._follows = follows
        rows, self._problem = _rows(request.batch)
        self._own_rows = rows
        self.found = self._find((rows,) * mesh.batch_size)
        self._count = control.cast(
            moment.place,
            None if self._problem else self.found.index,
            rows,
            -1 if self._problem else _shape(table, request),
            ends=moment.ends,
            told=moment.told,
        )
        self._answer: Found | None = None

    def result(self) -> Found:
        """The split and the graph that all ranks agree on; no graph if one rank has none.

        Raises:
            BatchError: on every rank, if the batches cannot form one.
            RankDisagreementError: on every rank, if they are at different batches or have different numbers of batches.
            SIGTERMException: on every rank, if one of them received SIGTERM.
        """
        if self._answer is None:
            self._answer = self._counted()
        return self._answer

    def _counted(self) -> Found:
        control, request, found = self._control, self._request, self.found
        vote = self._count()
        self._moment.check(control, vote)
        if vote.shape[0] != vote.shape[1] or vote.shape[0] == -1:
            _reconcile(control, self._table, request, self._problem)
            return GraphVote(control, self._mesh, self._table, request, self._moment, follows=self._follows).result()
        if vote.rows[0] != vote.rows[1]:
            found = self._find(self._mesh.split(control.gather(self._own_rows)))
            vote = control.vote(self._moment.place, found.index, 0, 0)
        same = not vote.missing and vote.graph[0] == vote.graph[1]
        return found if same else dataclasses.replace(found, index=None)

    def _find(self, split: tuple[int, ...]) -> Found:
        return Found((), split, 0, None) if self._follows else self._table.find(self._request, split)


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
