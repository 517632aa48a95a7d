"""One run's training iteration: the user's Python runs (``following.py``), then the graph of its calls.

All ranks decide together. Where they meet they exchange which graph they would run (``meeting.py``); if one has none,
all build (``building.py``). ``graph_table.py`` stores the graphs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence, Set
from typing import Any, NoReturn

from torch import Tensor

from lightning_spmd import _private_api as private
from lightning_spmd.errors import (
    BatchError,
    CannotShowError,
    ConfigurationError,
    SPMDError,
    UpdateMustWaitError,
    VerificationError,
)
from lightning_spmd.ir.first import first
from lightning_spmd.ir.reads import ReadMiss
from lightning_spmd.ir.sizes import Dimension
from lightning_spmd.ir.steps import CapturedStep, Variant
from lightning_spmd.messages import speaking_of, tell
from lightning_spmd.stages.capture.batch.batch import Batch
from lightning_spmd.stages.capture.follow.eager_run import Abandoned
from lightning_spmd.stages.capture.follow.program import Program
from lightning_spmd.stages.capture.follow.queue import LoggedAtOnce
from lightning_spmd.stages.capture.follow.step_state import CannotBeFollowed
from lightning_spmd.stages.runtime.agreement.control import Place
from lightning_spmd.stages.runtime.ahead import Outvoted
from lightning_spmd.stages.runtime.executor import Executable, Pending
from lightning_spmd.stages.runtime.pausing import PausingExecutable
from lightning_spmd.stages.runtime.trial_runs.trial_runs import FirstRunError
from lightning_spmd.strategy.graphs.building import CannotBeBuilt, GraphBuilder, OnlyForTheseCounts
from lightning_spmd.strategy.graphs.graph_table import Found, GraphTable
from lightning_spmd.strategy.graphs.own_graphs import OwnGraphs
from lightning_spmd.strategy.graphs.run_context import Ran, RunContext, StepRequest
from lightning_spmd.strategy.graphs.vote import agreed, voted
from lightning_spmd.strategy.ranks.boundary import ends_no_loop, lost_ranks_named
from lightning_spmd.strategy.ranks.places import Moment, training_moment
from lightning_spmd.strategy.steps.as_before import AsBefore
from lightning_spmd.strategy.steps.beginnings import Beginning
from lightning_spmd.strategy.steps.by_hand import held_gradients
from lightning_spmd.strategy.steps.following import FollowedStep, Following
from lightning_spmd.strategy.steps.last_resort import NoEagerWay, must_be_graphs, train_eagerly
from lightning_spmd.strategy.steps.meeting import Done, LookedAtRows, Meeting
from lightning_spmd.strategy.steps.own_batches import NoGlobalBatch, OwnBatches
from lightning_spmd.strategy.steps.own_meeting import OwnMeeting
from lightning_spmd.strategy.steps.pieces import PiecesOfStep
from lightning_spmd.strategy.steps.replay import replay, resolve
from lightning_spmd.strategy.steps.shared_leaves import check_shared

MOST_BEGINNINGS = 256
"""Graphs of beginnings of steps that are kept: one for each value that a step reads, until its graph tells them."""


class EagerOnce(Exception):
    """Control flow, on all ranks: the step's Python must run once more, on each rank's own rows."""


class RunsAgain(Exception):
    """Control flow, on all ranks: more is known of the batch, and the step's Python must run again on it."""


class TrainingIteration:
    """The compiled iteration of one ``fit``.

    Args:
        context: the live objects and options of the run.
    """

    def __init__(self, context: RunContext) -> None:
        self.context = context
        self.gradients = held_gradients(context.module, context.optimizer)
        self.table = GraphTable(context.trainer, self.gradients, rows_vary=context.mesh is None)
        self._builder = GraphBuilder(context, self.gradients)
        self._pending: Pending | None = None
        self.paused: PausingExecutable | None = None
        self.in_two: str | None = None
        """Why the graph of the last step ends where Python looks at gradients, and cannot pause there."""
        self.update_waits = False
        """Whether the update is still to come, on gradients that are held."""
        self._waiting: set[Any] = set()
        """The keys of paths whose steps put something into the optimizer that is there only when they are over."""
        self.leaves: tuple[list[Tensor], list[Tensor]] = [], []
        """What else eager training gives a gradient: tensors that are there in other steps, and results of this one."""
        self.has_left_gradients = False
        """Whether gradients stayed in graphs where eager training has them in ``p.grad``."""
        self.met, self._met_at = set[int](), -1
        """``id`` of tensors from outside that any step has met: others have no gradients in eager training either."""
        self._found = Found((), (), None, None)  # what runs
        self._shared: set[str] = set()  # paths of what is the same for every sample of a batch
        self.ran = Ran()  # the micro-batch before
        self.own_batches = OwnBatches(context.settings.batch)
        self._following = Following(context, self.flush, self._left_for, self.gradients)
        self._met = self._told_of_sizes = False
        self._told_open: list[Set[Dimension]] = []
        """Sizes that graphs leave open, as far as the user knows."""
        self._kinds: set[Any] = set()
        """Of batches that the ranks have met with."""
        self._beginnings: dict[Any, list[Beginning]] = {}
        self.share_layers: Callable[[CapturedStep], None] | None = None
        """Lets ranks share layers as they find fit for a graph; None where they do, or never will."""
        self._own = OwnGraphs(self._builder, GraphTable(context.trainer, self.gradients), self.flush)

    @property
    def captures(self) -> int:
        """Number of graphs built."""
        return self._builder.captures

    @ends_no_loop
    def run(
        self, batch_tree: Any, arguments: dict[str, Any], variant: Variant, clip: Callable[[Any], None] | None
    ) -> Any:
        """Run one micro-batch.

        Args:
            batch_tree: the batch that Lightning passes to training_step.
            arguments: the other arguments of training_step by name.
            variant: part of the iteration; ``accumulated`` follows from the gradients that are held.
            clip: gradient clipping to capture.

        Returns:
            what training_step returns, with real tensors.

        Raises:
            FellBack: the iteration must run eagerly; nothing has been changed.
        """
        if self.gradients:
            variant = dataclasses.replace(variant, accumulated=True)
        following = self._following
        while True:
            if following.ended is not None:
                self._fall_back(following.ended)
            try:
                return self._run_followed(following, batch_tree, arguments, variant, clip)
            except NoGlobalBatch as reason:
                self.own_batches.begin(str(reason))
            except RunsAgain:
                pass
            following.at_once.begin_again()

    @property
    def at_once(self) -> LoggedAtOnce:
        """What the step has logged where it logs it."""
        return self._following.at_once

    def _run_followed(
        self,
        following: Following,
        batch_tree: Any,
        arguments: dict[str, Any],
        variant: Variant,
        clip: Callable[[Any], None] | None,
    ) -> Any:
        """Run the user's Python, and what it computes as a graph.

        Raises:
            RanEagerly: it ran as eager training's.
            EagerOnce: on all ranks; it must run once more, eagerly.
        """
        own = self.own_batches.are_used and self.context.mesh is not None
        if own and variant.pauses:
            raise CannotShowError("batches are the ranks' own")
        if own and variant.by_hand:
            self._fall_back(self.own_batches.refused("optimization by hand on a batch of each rank's own"))
        shared, is_alone = () if own else self._shared, self.context.mesh is None
        batch = Batch(batch_tree, shared, part=self._has_part and not own, looks_inside=is_alone)
        with speaking_of(variant.method):
            variant = dataclasses.replace(variant, own_batch=True) if own else variant
            request = StepRequest(batch, variant, arguments, clip)
            part = self.table.step_key(request)
            meeting = self._meeting(request)
            if not own:
                self.table.open.note(batch)  # as it lies once the ranks have met
            keeps = following.may_run_again or meeting is not None and meeting.is_new
            before = AsBefore(self.context.module, tensors=True) if keeps else None
            pieces = self._pieces_of(request, meeting)
            beginning = functools.partial(self._run_beginning, request, pieces)
            with contextlib.nullcontext() if meeting is None else meeting.streams:
                try:
                    vary = () if own else tuple(self.table.open.wanted(batch))
                    followed = following.step(batch, arguments, variant.method, part, meeting, beginning, vary)
                    pieces.end()
                    if followed.program is None:
                        raise followed.ran_eagerly(meeting)
                    if variant.accumulated and not self.gradients:  # the step has zeroed them
                        variant = dataclasses.replace(variant, accumulated=False)
                    request = dataclasses.replace(request, variant=variant, program=followed.program)
                    try:
                        executable, outputs = self._shown(following, followed, request, meeting)
                    except (CannotBeBuilt, CannotBeFollowed, FirstRunError, ReadMiss) as error:
                        self.flush()
                        if meeting is not None and meeting.looked:
                            raise LookedAtRows(meeting.looked) from None
                        if must_be_graphs(self.context):
                            train_eagerly(self.context, str(error))
                        following.count_eager(str(error))
                        followed.for_good(str(error))
                        raise followed.ran_eagerly(meeting) from None
                except LookedAtRows as looked:
                    self.flush()
                    if before is not None:
                        before.put_back()
                    if not variant.by_hand:
                        self._may_go_local(request, str(looked))
                    self._fall_back(str(looked))
                except BatchError as error:
                    self._may_go_local(request, str(error))
                    raise
                except NoEagerWay as error:
                    train_eagerly(self.context, str(error))
                except Abandoned as abandoned:
                    tell(f"strategy='spmd' runs training_step a second time for one batch: {abandoned}")
                    if before is not None:
                        before.put_back()
                    if meeting is not None and meeting.shared:
                        self._shared |= meeting.shared
                        raise RunsAgain from None
                    following.ran_eagerly(str(abandoned))
                    raise EagerOnce from None
        self.has_left_gradients |= self.in_two is None and not variant.expose_gradients
        batch.write_back()
        self.paused = executable if isinstance(executable, PausingExecutable) else None
        self._after(executable.captured)
        following.ran(followed.program, executable, part, self._found.index)
        wanted, count = executable.captured.returned, len(followed.program.wants)
        values = followed.fill([outputs[reference.position] for reference in wanted[:count]])
        self.leaves = followed.held, followed.step.leaves
        if self._met_at != self.captures:  # a step on a new way
            self._met_at = self.captures
            self.met.update(map(id, followed.step.outside))
        rows = 0 if meeting is None else meeting.rows
        if executable.captured.own_batch is not None:
            rows = outputs[executable.captured.own_batch.rows]
            rows = int(rows) if rows.device.type == "cpu" else rows  # a GPU need not be waited for
            loss, *logged = resolve(wanted[count:], outputs, ())
            followed.of_all_ranks(loss, logged)
        split = self._found.split  # on one device the first sizes of all tensors, which may or may not be rows
        shown = rows if meeting is not None else split[0] if len(set(split)) == 1 else None
        # a number on a GPU is not waited for
        self.ran = Ran(executable, shown if isinstance(shown, int) else None, (self.table, self._own.table))
        calls, results, is_global = followed.queue.calls, list[Any](), meeting is not None
        if calls:
            with self.context.step_context(variant.method):
                results = replay(self.context.module, calls, values, batch.values, rows, is_global=is_global)
        followed.logged(results)
        return followed.returned

    def _meeting(self, request: StepRequest) -> Meeting | None:
        """All ranks are at this step, with batches that are one; None on one device.

        Raises:
            BatchError: on all ranks; they are not one.
            NoGlobalBatch: on all ranks; each goes on with its own.
        """
        control, mesh, batch = self.context.control, self.context.mesh, request.batch
        if control is None or mesh is None or batch is None:
            return None
        moment = self._moment(request)
        if request.variant.own_batch:
            self._own.meet(control, request, moment)
            return OwnMeeting(self.context, control, request, (), moment.place, is_first=False)
        kind = request.variant.method, batch.kinds()
        is_new = kind not in self._kinds and self._has_part
        try:
            found = voted(control, mesh, self.table, request, moment, follows=True)
            if is_new:
                check_shared(control, batch)
        except BatchError as error:  # on all ranks
            if error.is_ragged:
                self._may_go_local(request, str(error))
            raise
        is_first, self._met = not self._met, True
        self._kinds.add(kind)
        return Meeting(self.context, control, request, found.split, moment.place, is_first=is_first, is_new=is_new)

    def _pieces_of(self, request: StepRequest, meeting: Meeting | None) -> PiecesOfStep:
        """The pieces of a step that is about to run."""
        split = () if meeting is None else meeting.split

        def key() -> tuple[Any, ...]:
            return self.table.step_key(request), None if request.batch is None else request.batch.cache_key(), split

        return PiecesOfStep(self._builder.pieces, key, split)

    def _run_beginning(
        self, request: StepRequest, pieces: PiecesOfStep, program: Program, place: str | None
    ) -> Sequence[Tensor]:
        """What Python reads in a step before there is a graph that gives it; all ranks together.

        Args:
            request: the step.
            pieces: the step's.
            program: the step up to what is read.
            place: ``file:line`` that reads; None: a rank alone does.

        Raises:
            CannotBeFollowed: on all ranks; it cannot be read so.
        """
        self.flush()
        request = dataclasses.replace(request, program=program)
        wanted = tuple(want.source for want in program.wants)
        key = (program.key, wanted, pieces.split, self.table.find(request, ()).key)
        try:
            if place is not None and (values := pieces.values(request)) is not None:
                return values
            known = self._beginnings.get(key, [])
            fitting = next((index for index, one in enumerate(known) if one.fits(request)), None)
            index = agreed(self.context.control, fitting)
            if index is not None:
                return known[index].values(request, place or "a rank alone")
            built = self._builder.beginning(request, pieces.split)
            self._beginnings.setdefault(key, []).append(built)
            while sum(map(len, self._beginnings.values())) > MOST_BEGINNINGS:
                oldest = first(self._beginnings, "beginning of a step")
                self._beginnings[oldest] = self._beginnings[oldest][1:]
                if not self._beginnings[oldest]:
                    del self._beginnings[oldest]
            return built.values(request, place or "a rank alone")
        except SPMDError as error:
            raise CannotBeFollowed(str(error)) from error

    def _shown(
        self, following: Following, followed: FollowedStep, request: StepRequest, meeting: Meeting | None
    ) -> tuple[Executable, Sequence[Any]]:
        """As :meth:`_graph_of_followed`; where a graph cannot pause for hooks on gradients or update, it ends there."""
        self.in_two, self.update_waits, variant = None, False, request.variant
        path = None if followed.program is None else followed.program.key
        reads = followed.step.reads_gradients
        if reads is not None and not (variant.expose_gradients or variant.by_hand):
            if self.has_left_gradients:
                raise ConfigurationError(
                    f"{variant.method} reads p.grad of the batch before ({reads}), which was not "
                    "kept: strategy='spmd' keeps gradients from the first batch on if its step reads them. Read them "
                    "there, too, or look at gradients in on_after_backward or on_before_optimizer_step"
                )
            self.in_two = f"{variant.method} reads p.grad of the batch before ({reads})"
        elif variant.apply and path in self._waiting:
            self.update_waits = True
        else:
            try:
                return self._graph_of_followed(following, followed, request, meeting)
            except CannotShowError as error:  # on all ranks
                self.in_two = str(error)
            except UpdateMustWaitError as error:  # likewise
                self.update_waits = not variant.pauses
                if self.update_waits:
                    self._waiting.add(path)
                else:
                    self.in_two = str(error)
        shows = variant.expose_gradients or not self.update_waits
        variant = dataclasses.replace(variant, apply=False, expose_gradients=shows)
        request = dataclasses.replace(request, variant=variant)
        return self._graph_of_followed(following, followed, request, meeting)

    def _graph_of_followed(
        self, following: Following, followed: FollowedStep, request: StepRequest, meeting: Meeting | None
    ) -> tuple[Executable, Sequence[Any]]:
        """The graph of a step whose Python is done, and its outputs.

        Raises:
            CannotBeBuilt, FirstRunError: there is none.
            CannotBeFollowed: the ranks go on eagerly.
        """
        tensors = [] if request.batch is None else request.batch.tensor_values
        if meeting is None:
            sizes = () if request.batch is None else request.batch.first_sizes()
            executable = self._executable(request, self.table.find(request, sizes))
        else:
            table = self._own.table if meeting.is_own else self.table
            done = self._own.done(request, meeting) if meeting.is_own else self._done(followed, request, meeting)
            ahead = None if followed.has_begun else self._run_ahead(table, done, tensors)
            if ahead is not None:
                return ahead
            if meeting.is_own:
                if done.result().index is None:
                    self._share_layers(following, followed, request, ())
                self._found = done.found
                executable = self._own_executable(request, done)
            else:
                while done.result().index is None and meeting.is_apart:
                    following.help_out(followed)
                    request = dataclasses.replace(request, program=followed.program)
                    done = self._done(followed, request, meeting)
                found = done.result()
                if found.index is None:
                    meeting.find_shared()
                    self._share_layers(following, followed, request, meeting.split)
                    request = dataclasses.replace(request, program=following.united(followed))
                    found = table.find(request, meeting.split)
                    found = dataclasses.replace(found, index=agreed(self.context.control, found.index))
                executable = self._executable(request, found)
        with self.context.whole.changing(self.context.trainer):
            begun = followed.outputs(executable)
        if begun is None:
            return executable, self._run(executable, tensors)
        outputs, self._pending = begun
        return executable, outputs

    def _done(self, followed: FollowedStep, request: StepRequest, meeting: Meeting) -> Done:
        """Begin to ask whether all ranks are done with a step on the global batch, and would run the same graph."""
        return meeting.done(followed.mark, self.table.find(request, meeting.split))

    def _share_layers(
        self, following: Following, followed: FollowedStep, request: StepRequest, split: tuple[int, ...]
    ) -> None:
        """Ranks begin to share layers once they know a graph of a step; all of them are here together.

        Raises:
            CannotBeBuilt: on all ranks; there is none.
        """
        if self.share_layers is not None:
            share, self.share_layers = self.share_layers, None
            share(self._builder.followed(request, split))
            following.exchange(followed)
            self._beginnings.clear()
            self._builder.pieces.forget()

    @ends_no_loop
    def apply(self, gradients: dict[str, Tensor], clip: Callable[[Any], None] | None, *, reduced: bool) -> None:
        """Run the optimizer alone on gradients that are there already.

        Args:
            gradients: by parameter name.
            clip: gradient clipping to capture.
            reduced: whether they are sums over the ranks already (``p.grad`` of split mode) or this rank's share.
        """
        self.gradients.clear()
        self.gradients.update(gradients)
        control, mesh = self.context.control, self.context.mesh
        variant = Variant(forward=False, accumulated=True, expose_gradients=reduced)
        request = StepRequest(None, variant, clip=clip)
        try:
            if control is None or mesh is None:
                found = self.table.find(request, ())
            else:
                found = voted(control, mesh, self.table, request, self._moment(request))
            executable = self._executable(request, found)
            self._run(executable, ())
        except (CannotBeBuilt, FirstRunError) as error:
            self._fall_back(str(error))
        self._after(executable.captured)

    def resume(self) -> None:
        """Do the update of the iteration that has paused.

        Raises:
            VerificationError: none has.
        """
        paused, self.paused = self.paused, None
        if paused is None:
            raise VerificationError("no iteration has paused")
        with self.context.whole.changing(self.context.trainer):
            self._pending = paused.resume()
        self._after(paused.captured)

    def flush(self) -> None:
        """Complete the work that the last iteration deferred, if any. Then parameters and state are up to date."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            unfinished = self.context.whole.changing(self.context.trainer, updates=False)
            with lost_ranks_named(lambda: self.context.control), unfinished:
                pending.owner.clean_up(pending)

    def no_more_graphs(self, reason: str) -> None:
        """From the next step on training goes on eagerly.

        Args:
            reason: for the user.
        """
        self._following.ended = reason

    def end(self) -> None:
        """The run is over: the last step's tensors go."""
        self._following.let_go()

    @property
    def pending(self) -> Pending | None:
        """The work that the last iteration deferred."""
        return self._pending

    # ------------------------------------------------------------------ pieces
    @property
    def _has_part(self) -> bool:
        """Whether other ranks have rows of the same batch."""
        return self.context.mesh is not None and self.context.mesh.batch_size > 1

    def _moment(self, request: StepRequest) -> Moment:
        """Where in the run a step is."""
        trainer = self.context.trainer
        moment = training_moment(trainer, applies=request.variant.apply)
        if request.variant.forward:
            return moment
        return Moment(Place("the update after training", moment.place.epoch, moment.place.batch))

    def _run_ahead(
        self, table: GraphTable, done: Done, tensors: Sequence[Tensor]
    ) -> tuple[Executable, Sequence[Any]] | None:
        """Begin to run what this rank would run while the others say what they would; None if that cannot be.

        The executable, and the outputs.
        """
        found, index = done.found, done.found.index
        if index is None:
            return None
        executable = table.graph(index)
        pending = self._left_for(executable)
        if not executable.can_ask(pending):
            self._pending = pending
            return None
        changing = functools.partial(self.context.whole.changing, self.context.trainer)

        def agree(ends: bool) -> None:
            ends_before.close()
            self._pending = None if ends else pending
            if done.result() is not found:
                raise Outvoted
            self._found, self._pending = found, None
            table.count_use(index)
            changes.enter_context(changing(updates=not isinstance(executable, PausingExecutable)))

        try:
            with contextlib.ExitStack() as changes:
                ends_before = changes.enter_context(contextlib.ExitStack())
                if pending is not None:
                    ends_before.enter_context(changing(updates=False))
                outputs, self._pending = executable.run(tensors, pending, agree)
        except Outvoted:
            return None
        return executable, outputs

    def _executable(self, request: StepRequest, found: Found) -> Executable:
        """The graph of a step, found or built."""
        self._found = found
        if found.index is None:
            return self._build(request, found)
        self.table.count_use(found.index)
        return self.table.graph(found.index)

    def _build(self, request: StepRequest, found: Found) -> Executable:
        """A new graph of a step.

        Raises:
            CannotBeBuilt: on all ranks.
        """
        table = self.table
        if (surplus := table.surplus(found)) is not None:
            raise CannotBeBuilt(surplus)
        if found.reason is not None and not table.follows_a_first_step(found.key):
            tell(f"strategy='spmd' builds another graph: {found.reason}")
        self.flush()
        found = table.with_open_sizes(found, request)
        if request.program is not None and request.program.why_not is not None:
            self._tell_of_sizes(request, request.program.why_not)
        try:
            executable = self._builder.build(dataclasses.replace(request, vary=found.vary), found.split)
        except OnlyForTheseCounts as reason:
            if (program := request.program) is None or program.counts is None:
                raise
            if found.vary:
                self._tell_of_sizes(request, str(reason))
            program.counts.are_apart = True
            program = dataclasses.replace(program, samples=(), at=tuple(program.live.counts), for_all_sizes=False)
            request = dataclasses.replace(request, program=program)
            return self._build(request, table.find(request, found.split))
        if found.vary and request.batch is not None and found.vary.keys() not in self._told_open:
            self._told_open.append(found.vary.keys())
            names = self.table.open.describe(request.batch, found.vary)
            tell(f"strategy='spmd' builds one graph for all sizes of {names}")
        self._found = dataclasses.replace(found, index=table.add(found.key, executable))
        table.forget_unused()
        return executable

    def _may_go_local(self, request: StepRequest, reason: str) -> None:
        """What cannot be done on a batch of all ranks may be done on each rank's own.

        Raises:
            NoGlobalBatch: on all ranks; it is going to be.
        """
        variant = request.variant
        if self.context.mesh is not None and variant.forward and variant.backward and self.own_batches.may_be_used:
            raise NoGlobalBatch(reason)

    def _own_executable(self, request: StepRequest, done: Done) -> Executable:
        try:
            executable = self._own.executable(request, done)
        except CannotBeBuilt as error:
            raise CannotBeBuilt(self.own_batches.refused(str(error))) from None
        self.flush()  # what another iteration left is not compared here
        self.own_batches.announce(executable)
        return executable

    def _tell_of_sizes(self, request: StepRequest, why: str) -> None:
        """Say once why a step has a graph for each size."""
        if request.batch is None or self._told_of_sizes:
            return
        self._told_of_sizes = True
        if wanted := self.table.open.wanted(request.batch):
            names = self.table.open.describe(request.batch, wanted)
            tell(f"strategy='spmd' builds a graph for each size of {names}: {why}")

    def _run(self, executable: Executable, tensors: Sequence[Tensor]) -> Sequence[Any]:
        pending = self._left_for(executable)
        updates = not isinstance(executable, PausingExecutable)
        with self.context.whole.changing(self.context.trainer, updates=updates):
            outputs, self._pending = executable.run(tensors, pending)
        return outputs

    def _left_for(self, executable: Executable) -> Pending | None:
        """The work that the last iteration deferred, if a graph can do it; otherwise it is done here."""
        if self._pending is not None and not executable.can_follow(self._pending):
            self.flush()
        if self._pending is not None and not self._pending.is_current():
            self.flush()  # the step has put something else in the place of a tensor; the work is the former one's
        pending, self._pending = self._pending, None
        return pending

    def _after(self, captured: CapturedStep) -> None:
        if captured.variant.apply and not captured.variant.by_hand and self.context.optimizer is not None:
            self.gradients.clear()
            private.mark_stepped(self.context.optimizer)

    def _fall_back(self, reason: str) -> NoReturn:
        train_eagerly(self.context, reason)
