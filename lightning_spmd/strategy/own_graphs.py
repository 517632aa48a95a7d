"""Graphs of this rank's own batches: chosen by each rank for itself, built while the others wait, never in step.

Before each step the ranks exchange whether one of them has to build a graph, or to trace one again, and a hash of what
they will exchange in it. Mostly nobody has: then each runs its own. Otherwise all of them meet; those that have their
graph already wait for the others, and afterwards all compare what they are about to exchange.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from lightning_spmd.errors import StaleGraphError
from lightning_spmd.ir.stable_hash import stable_hash
from lightning_spmd.messages import tell, warn
from lightning_spmd.stages.runtime.agreement import exchanges
from lightning_spmd.stages.runtime.control import ControlPlane
from lightning_spmd.stages.runtime.executor import Executable
from lightning_spmd.strategy.building import GraphBuilder
from lightning_spmd.strategy.choice import check_same_part, hash_of_step
from lightning_spmd.strategy.graph_table import MOST_GRAPHS, Found, GraphTable
from lightning_spmd.strategy.meeting import DONE, Done, Meeting
from lightning_spmd.strategy.not_built import CannotBeBuilt, OtherGradients
from lightning_spmd.strategy.places import Moment
from lightning_spmd.strategy.recheck import Rechecks
from lightning_spmd.strategy.run_context import RunContext, StepRequest


class OwnGraphs:
    """The graphs of this rank's own batches of one run.

    Args:
        context: what they are made in.
        builder: what makes them.
        table: where they are kept.
        rechecks: looks after them.
        flush: finishes what another iteration left.
    """

    def __init__(
        self,
        context: RunContext,
        builder: GraphBuilder,
        table: GraphTable,
        rechecks: Rechecks,
        flush: Callable[[], None],
    ) -> None:
        self.table = table
        self.rechecks = rechecks
        self._context = context
        self._builder = builder
        self._flush = flush
        self._exchanges: dict[int, int] = {}

    def ballot(self, control: ControlPlane, request: StepRequest, moment: Moment) -> OwnBallot:
        """The exchange before a step, begun."""
        found = self.table.find(request, ())
        ready = found.index is not None and not self.rechecks.is_due(found.index)
        return OwnBallot(control, self.table, request, moment, found, self._exchanged(found) if ready else None)

    def meet(self, control: ControlPlane, request: StepRequest, moment: Moment, can_be_followed: bool) -> bool:
        """All ranks are at this step; whether all of them can run its Python.

        Args:
            control: messages among the ranks.
            request: the step.
            moment: where in the run it is.
            can_be_followed: whether this rank can.

        Raises:
            RankDisagreementError: on every rank; they are not at the same batch, or about to do different things.
            SIGTERMException: on every rank; one of them was told to stop.
        """
        shape = hash_of_step(self.table.step_key(request), None)
        graph = 0 if can_be_followed else None
        vote = control.cast(moment.place, graph, 0, shape, ends=moment.ends, told=moment.told)()
        moment.check(control, vote)
        if vote.shape[0] != vote.shape[1]:
            check_same_part(control, self.table, request)
        return not vote.missing

    def done(self, request: StepRequest, meeting: Meeting) -> OwnDone:
        """The exchange once the Python of a step is done, begun."""
        found = self.table.find(request, ())
        return OwnDone(found, meeting.cast(DONE, 0, self._exchanged(found)), meeting.met)

    def executable(self, request: StepRequest, ballot: OwnBallot | OwnDone) -> Executable:
        """This rank's graph of a step, found or built.

        Raises:
            CannotBeBuilt: on all ranks; one of them has none, or they would not exchange the same.
            StaleGraphError: on all ranks; a graph is out of date, and steps have run with it.
        """
        found = ballot.found
        if ballot.result().index is not None and found.index is not None:
            self.rechecks.count_use(found.index)
            return self.table.graph(found.index)
        self._flush()
        found, refusal = self._looked_at(request, found)
        try:
            return self._built(request, found, refusal)
        except OtherGradients as found_elsewhere:
            names = {name.removeprefix("gradient of ") for name in found_elsewhere.names}
            request = dataclasses.replace(request, needed=frozenset(names))
            found, refusal = self._looked_at(request, self.table.find(request, ()))
        try:
            return self._built(request, found, refusal)
        except OtherGradients as still:
            raise CannotBeBuilt(str(still)) from None

    # ------------------------------------------------------------------ pieces
    def _built(self, request: StepRequest, found: Found, refusal: str | None) -> Executable:
        """The graph that was found, or a new one; all ranks do this together."""
        known = None if found.index is None else self.table.graph(found.index)
        if known is None:
            refusal = refusal or self.table.surplus(found)
            if found.reason is not None and not self.table.follows_a_first_step(found.key):
                tell(f"strategy='spmd' builds another graph: {found.reason}")
        changes = [] if known is not None else self.table.changes(found)
        self._builder.follow_numbers(changes, self.table.executables)
        try:
            executable = self._builder.build(request, (), known, refusal)
        except OtherGradients as other:
            if known is None and other.built is not None:
                self.rechecks.begin(self.table.add(found.key, other.built))
            raise
        if found.index is None:
            self.rechecks.begin(self.table.add(found.key, executable))
            for index in self.rechecks.unused_for_longest(MOST_GRAPHS):
                self.table.forget(index)
                self._exchanges.pop(index, None)
        else:
            self.rechecks.count_use(found.index)
        return executable

    def _exchanged(self, found: Found) -> int | None:
        """A hash of what a graph exchanges with the other ranks."""
        if found.index is None:
            return None
        if found.index not in self._exchanges:
            executable = self.table.graph(found.index)
            self._exchanges[found.index] = stable_hash(exchanges(executable.graphs.main, executable.captured))
        return self._exchanges[found.index]

    def _looked_at(self, request: StepRequest, found: Found) -> tuple[Found, str | None]:
        """Ranks for which it is time trace their graph again; (the graph if it is right, why none may be built)."""
        control = self._context.control
        if request.program is not None:
            return found, None
        due = found.index is not None and self.rechecks.is_due(found.index)
        if control is None or not any(control.gather(due)):
            return found, None
        index = found.index if due else None
        executable = None if index is None else self.table.graph(index)
        stale = self.rechecks.look(index, executable, request, ())
        if stale is None:
            return found, None
        if not stale.harmless:
            raise StaleGraphError(stale.text)
        warn(f"strategy='spmd' builds a graph anew before it was ever used with an old value: {stale.text}")
        if not stale.here:
            return found, None
        refusal = None if self.table.drop(found) else stale.text
        return dataclasses.replace(found, index=None, reason=None), refusal


class OwnDone(Done):
    """The same once the Python of a step is done, on a batch of each rank's own: ranks run what exchanges the same."""


class OwnBallot:
    """The exchange before a step on batches of the ranks' own.

    Args:
        control: messages among the ranks.
        table: the graphs.
        request: the step.
        moment: where in the run it is.
        found: what this rank would run.
        exchanged: a hash of what it exchanges in it; None where the ranks have to meet first.
    """

    def __init__(
        self,
        control: ControlPlane,
        table: GraphTable,
        request: StepRequest,
        moment: Moment,
        found: Found,
        exchanged: int | None,
    ) -> None:
        self.found = found
        self._control, self._table, self._request, self._moment = control, table, request, moment
        known = hash_of_step(table.step_key(request), None)
        shape = stable_hash((known, *request.numbers.items())) if request.numbers else known
        self._count = control.cast(moment.place, exchanged, 0, shape, ends=moment.ends, told=moment.told)
        self._answer: Found | None = None

    def result(self) -> Found:
        """What this rank would run; without an index where the ranks meet first.

        Raises:
            RankDisagreementError: on every rank; they are not at the same batch, or about to do different things.
            SIGTERMException: on every rank; one of them was told to stop.
        """
        if self._answer is None:
            vote = self._count()
            self._moment.check(self._control, vote)
            if vote.shape[0] != vote.shape[1]:
                check_same_part(self._control, self._table, self._request)
            together = not vote.missing and vote.graph[0] == vote.graph[1]
            self._answer = self.found if together else dataclasses.replace(self.found, index=None)
        return self._answer
