"""Graphs of local batches: each rank chooses its own, and one rank may build while the others wait.

After the Python of a step the ranks exchange whether one of them has to build a graph, and a hash of the collectives in
their graphs. Usually no rank builds, and each runs its own graph. Otherwise all ranks meet: those that have a graph
wait, and then all compare their collectives.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from lightning_spmd.ir.stable_hash import stable_hash
from lightning_spmd.messages import tell
from lightning_spmd.stages.runtime.agreement.control import ControlPlane
from lightning_spmd.stages.runtime.agreement.same_graphs import exchanges
from lightning_spmd.stages.runtime.executor import Executable
from lightning_spmd.strategy.graphs.building import CannotBeBuilt, GraphBuilder, OtherGradients
from lightning_spmd.strategy.graphs.graph_table import Found, GraphTable
from lightning_spmd.strategy.graphs.run_context import StepRequest
from lightning_spmd.strategy.graphs.vote import check_same_part, hash_of_step
from lightning_spmd.strategy.ranks.places import Moment
from lightning_spmd.strategy.steps.meeting import DONE, Done, Meeting


class OwnGraphs:
    """The graphs of this rank's local batches in one run.

    Args:
        builder: builds them.
        table: stores them.
        flush: completes the deferred work of another iteration.
    """

    def __init__(self, builder: GraphBuilder, table: GraphTable, flush: Callable[[], None]) -> None:
        self.table = table
        self._builder = builder
        self._flush = flush
        self._exchanges: dict[int, int] = {}

    def meet(self, control: ControlPlane, request: StepRequest, moment: Moment) -> None:
        """Check that all ranks are at this step.

        Args:
            control: messages among the ranks.
            request: the step.
            moment: the place in the run.

        Raises:
            RankDisagreementError: on every rank, if they are at different batches or do different things.
            SIGTERMException: on every rank, if one of them received SIGTERM.
        """
        shape = hash_of_step(self.table.step_key(request), None)
        vote = control.cast(moment.place, 0, 0, shape, ends=moment.ends, told=moment.told)()
        moment.check(control, vote)
        if vote.shape[0] != vote.shape[1]:
            check_same_part(control, self.table, request)

    def done(self, request: StepRequest, meeting: Meeting) -> Done:
        """Begin the exchange after the Python of a step: ranks may run if their collectives are equal."""
        found = self.table.find(request, ())
        return Done(found, meeting.cast(DONE, 0, self._exchanged(found)), meeting.met)

    def executable(self, request: StepRequest, done: Done) -> Executable:
        """Find or build this rank's graph of a step.

        Raises:
            CannotBeBuilt: on all ranks, if one of them has no graph or their collectives differ.
        """
        found = done.found
        if done.result().index is not None and found.index is not None:
            self.table.count_use(found.index)
            return self.table.graph(found.index)
        self._flush()
        try:
            return self._built(request, found)
        except OtherGradients as found_elsewhere:
            names = {name.removeprefix("gradient of ") for name in found_elsewhere.names}
            request = dataclasses.replace(request, needed=frozenset(names))
        try:
            return self._built(request, self.table.find(request, ()))
        except OtherGradients as still:
            raise CannotBeBuilt(str(still)) from None

    # ------------------------------------------------------------------ pieces
    def _built(self, request: StepRequest, found: Found) -> Executable:
        """The graph that was found, or a new one; all ranks do this together."""
        known = None if found.index is None else self.table.graph(found.index)
        refusal = None
        if known is None:
            refusal = self.table.surplus(found)
            if found.reason is not None and not self.table.follows_a_first_step(found.key):
                tell(f"strategy='spmd' builds another graph: {found.reason}")
        try:
            executable = self._builder.build(request, (), known, refusal)
        except OtherGradients as other:
            if known is None and other.built is not None:
                self.table.add(found.key, other.built)
            raise
        if found.index is None:
            self.table.add(found.key, executable)
            for index in self.table.forget_unused():
                self._exchanges.pop(index, None)
        else:
            self.table.count_use(found.index)
        return executable

    def _exchanged(self, found: Found) -> int | None:
        """A hash of what a graph exchanges with the other ranks."""
        if found.index is None:
            return None
        if found.index not in self._exchanges:
            executable = self.table.graph(found.index)
            self._exchanges[found.index] = stable_hash(exchanges(executable.graphs.main, executable.captured))
        return self._exchanges[found.index]
