"""Steps that are followed: the user's Python runs, once, and a graph computes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_spmd import _private_api as private
from lightning_spmd.ir.counted import GRAPHS, with_parts
from lightning_spmd.ir.several_optimizers import parts_of
from lightning_spmd.ir.signature import OutputRole
from lightning_spmd.ir.sizes import Counts, Dimension
from lightning_spmd.ir.stable_hash import stable_hash
from lightning_spmd.ir.successors import successor_of
from lightning_spmd.ir.tree import map_leaves
from lightning_spmd.ir.unify import Apart
from lightning_spmd.messages import tell
from lightning_spmd.parallel.state import StateMesh
from lightning_spmd.stages.capture.batch.batch import Batch
from lightning_spmd.stages.capture.follow.by_hand import ByHand
from lightning_spmd.stages.capture.follow.count_formulas import samples_of_path
from lightning_spmd.stages.capture.follow.counts import told_in, with_open_number
from lightning_spmd.stages.capture.follow.eager_run import Abandoned
from lightning_spmd.stages.capture.follow.follower import MANY_CALLS, Follower
from lightning_spmd.stages.capture.follow.module_paths import module_paths
from lightning_spmd.stages.capture.follow.notes import (
    Given,
    Made,
    Source,
    gradient_in_parts,
    named_gradient,
    sources_in,
)
from lightning_spmd.stages.capture.follow.program import Live, Log, Program, Want
from lightning_spmd.stages.capture.follow.queue import (
    METHODS,
    LoggedAtOnce,
    MetricResult,
    Queue,
    Shadows,
    known,
    metrics_unseen,
    wanted_by,
)
from lightning_spmd.stages.capture.follow.rows_read import read_of_rows
from lightning_spmd.stages.capture.follow.step import NEW_PATH, Step
from lightning_spmd.stages.capture.follow.step_state import CannotBeFollowed
from lightning_spmd.stages.capture.follow.told import tells, told_from_now_on
from lightning_spmd.stages.capture.follow.tripwires import is_tripwire, value_of
from lightning_spmd.stages.capture.record.packing import parameter_names
from lightning_spmd.stages.runtime.executor import Executable, Pending
from lightning_spmd.stages.runtime.value_reads import Conversation
from lightning_spmd.strategy.graphs.run_context import RunContext
from lightning_spmd.strategy.steps.alone import Alone, KeptAlone, program_for, read_alone
from lightning_spmd.strategy.steps.last_resort import NoEagerWay, must_be_graphs
from lightning_spmd.strategy.steps.meeting import Call, Fingerprints, LookedAtRows, Meeting
from lightning_spmd.strategy.steps.own_meeting import logs_of, of_all_ranks
from lightning_spmd.strategy.steps.references import References
from lightning_spmd.strategy.steps.replay import replay
from lightning_spmd.strategy.steps.told import ToldValues

MOST_EAGER = 8
"""After so many steps in a row that ran eagerly training goes on as eager training does."""
MOST_EAGER_AT_FIRST = 3
"""The same where no step has been a graph yet."""
_SKIPPED = "training_step returned None, and the loss is scaled"
NEW_PATHS = 8
"""So many paths get a graph when a step takes them first; from then on when one takes them again."""
NEW_LONG_PATHS = 4
"""The same where the known paths have many calls."""
_REMEMBERED = 4096
"""So many paths, and counts without a common graph, that steps took last."""
NEW_PATHS_IN_PARTS = 64
"""The same where a step that runs eagerly needs whole parameters; each shape of a batch has paths of its own."""


class RanEagerly(Exception):
    """A step ran as eager training's; its backward pass and the rest are Lightning's to do.

    Args:
        returned: by ``training_step``.
        reason: why, with ``file:line``.
        gradients: of the loss, with the tensors whose they are, where Python has run that runs in its backward pass.
    """

    are_shares = False
    """The gradients are of a rank's own batch; the mean over the ranks is to be taken."""

    def __init__(self, returned: Any, reason: str, gradients: list[tuple[Tensor, Tensor]] | None) -> None:
        super().__init__(reason)
        self.returned, self.gradients = returned, gradients


class EndedByUser(Exception):
    """The user's step raised a StopIteration, with which it ends its epoch, as in eager training.

    Args:
        error: it.
    """

    def __init__(self, error: StopIteration) -> None:
        super().__init__("the step ends the epoch")
        self.error = error


class FollowedStep:
    """One step whose Python has run.

    Args:
        step: the step.
        returned: by the step method.
        queue: calls of ``self.log`` and metrics.
        wants: the results that they, or anybody else, have.
        program: the step's path; None of a step that ran for good.
        talk: the graph that has begun already.
        mark: of the path, with its numbers and what else must be the same on all ranks.

    Attributes:
        held: tensors of the batch and from outside, no parameters, to which eager training gives a gradient.
    """

    def __init__(
        self,
        step: Step,
        returned: Any,
        queue: Queue,
        wants: Sequence[Want],
        program: Program | None,
        talk: _Talk | None = None,
        mark: int = 0,
    ) -> None:
        self.returned, self.queue, self.program, self.mark = returned, queue, program, mark
        self.step, self._wants, self._talk = step, wants, talk
        self._kept: KeptAlone | None = None
        self.held: list[Tensor] = []
        self._own: list[Made] = []

    @property
    def has_begun(self) -> bool:
        """Whether a graph runs already."""
        return self._talk is not None and self._talk.conversation is not None

    def outputs(self, executable: Executable) -> tuple[Sequence[Any], Pending | None] | None:
        """The outputs of a graph that has begun already, and what it leaves undone; None if it is to be run."""
        if self._talk is None or self.program is None:
            return None
        return self._talk.end(self.program, executable)

    def help_out(self) -> KeptAlone | None:
        """Do what a rank needs that reads alone, once Python is done here; what ranks keep alone, if none reads."""
        helped = None if self._talk is None else self._talk.help_out()
        return helped if isinstance(helped, KeptAlone) else None

    def keeps_alone(self, kept: KeptAlone, made_anew: Callable[[Step, Sequence[Want]], tuple[Program, int]]) -> None:
        """Calls that not all ranks have made are none of the step's; what they give is computed behind it.

        Args:
            kept: the ranks' agreement.
            made_anew: gives program and mark of the step with these wants, once its path is shorter.
        """
        self._kept, wants = kept, list[Want]()
        for want in self._wants:
            if isinstance(want.source, Made) and want.source.depth >= kept.calls:
                self._own.append(want.source)
            elif want.after is None or want.after <= kept.calls:
                wants.append(want)
            else:  # what is told behind calls of this rank alone is told behind those of all
                wants.append(dataclasses.replace(want, after=kept.calls))
        self._wants = wants
        self.step.left_out.leave(kept.calls)
        self.program, self.mark = made_anew(self.step, [*self._wants, *kept.wants])

    def fill(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Give what somebody has its value; gives the values for the queue.

        Args:
            values: of the program's wants.
        """
        if self.program is None:
            raise ValueError("a step that ran for good has nothing to fill")
        by_want = dict(zip(self.program.wants, values, strict=True))
        if self._kept is not None:
            own = self.step.left_out.perform({want.source: by_want[want] for want in self._kept.wants})
            for made in self._own:
                self.step.fill(made, own[made])
        for want in self._wants:
            source = want.source
            stands = isinstance(source, Given) and source.position in self.step.stand_ins
            if want.after is None and want.role is not OutputRole.GRADIENT and (stands or isinstance(source, Made)):
                self.step.fill(source, by_want[want])  # type: ignore[arg-type]
        self.step.settle()
        return [by_want[want] for want in self._wants]

    def ran_eagerly(self, meeting: Meeting | None) -> RanEagerly:
        """What is raised once the step has run for good."""
        returned, weight, gradients = self.returned, 1.0, self.step.eager.gradients
        if meeting is not None:
            returned, weight = meeting.weighed(returned, self.queue.rows)
        if gradients is not None and weight != 1:
            gradients = [(leaf, gradient * weight) for leaf, gradient in gradients]
        ran = RanEagerly(returned, _in_words(self.step) or "", gradients)
        ran.are_shares = meeting is not None and meeting.is_own
        return ran

    def of_all_ranks(self, loss: Tensor, logged: Sequence[Any]) -> None:
        """On a rank's own batch: what is shown is of all ranks' batches.

        Args:
            loss: of all ranks.
            logged: value and rows of each ``self.log``.
        """
        mine = self.returned.get("loss") if isinstance(self.returned, dict) else self.returned
        self.returned = map_leaves(lambda _, leaf: loss if leaf is mine else leaf, self.returned)
        self.queue.calls = of_all_ranks(self.queue.calls, logged)

    def logged(self, results: Sequence[Any]) -> None:
        """The queued calls were made, with these results."""
        self.queue.done(results)
        self.returned = _resolved(self.returned)

    def for_good(self, reason: str) -> None:
        """Compute what was noted as eager training would have: there is no graph of it."""
        self.step.eagerly(reason)
        self.returned = _resolved(self.returned)


@dataclass(frozen=True)
class Likely:
    """A graph that ran.

    Args:
        program: the path whose graph it is.
        executable: the graph.
        index: of it, among those of the run.
        shapes: of the batch that it ran on.
        split: of its rows over the ranks.
    """

    program: Program
    executable: Executable
    index: int | None
    shapes: tuple[tuple[int, ...], ...]
    split: tuple[int, ...]

    def takes(self, tensors: Sequence[Tensor], split: tuple[int, ...]) -> bool:
        """Whether the graph does for a batch."""
        if split != self.split or len(tensors) != len(self.shapes):
            return False
        sizes = self.executable.sizes
        vary = () if sizes is None else sizes.places
        return all(
            len(tensor.shape) == len(shape)
            and all(
                mine == its or (i, d) in vary for d, (mine, its) in enumerate(zip(tensor.shape, shape, strict=True))
            )
            for i, (tensor, shape) in enumerate(zip(tensors, self.shapes, strict=True))
        )


class _Talk:
    """A graph that runs while the Python of a step does, as long as that takes the graph's path.

    Args:
        step: the step.
        known: the graphs that ran last, by the first call that read.
        live: what graphs take of this step.
        begin: starts one, and gives what Python reads first.
        tensors: of the batch.
        meeting: of the ranks; None on one device.
        run_beginning: gives what a program that ends where Python reads wants; it is read at ``file:line``.
        infers: graphs run in torch's inference mode.
        logs: gives what was logged so far, on a rank's own batch, and puts its numbers where graphs take them.
        known_alone: what ranks have read or kept alone.
        live_alone: what graphs take of this step that give what ranks read alone.
    """

    def __init__(
        self,
        step: Step,
        known: Mapping[int, Likely],
        live: Live,
        begin: Callable[[Executable], tuple[Conversation, Sequence[Tensor]]],
        tensors: Sequence[Tensor],
        meeting: Meeting | None,
        run_beginning: Callable[[Program, str | None], Sequence[Tensor]],
        infers: bool,
        logs: Callable[[], tuple[Log, ...]],
        known_alone: dict[Any, Alone | KeptAlone | None],
        live_alone: Live,
    ) -> None:
        self._run_beginning, self._infers, self._logs = run_beginning, infers, logs
        self._step, self._known, self._live, self._begin = step, known, live, begin
        self._tensors, self._meeting, self._reads = tensors, meeting, 0
        self._known_alone, self._live_alone = known_alone, live_alone
        self._values_told = ToldValues(step)
        self._likely: Likely | None = None
        self._is_over, self._same = False, 0  # so many calls are those of the likely graph
        self._numbers: dict[tuple[int, Any], Any] = {}  # in these calls
        self.conversation: Conversation | None = None

    def help_out(self) -> KeptAlone | Sequence[Tensor] | None:
        """The ranks have come apart: do what those need that read alone, all ranks together.

        What Python reads here, if this is one of them; what ranks keep alone, if none reads.

        Raises:
            CannotBeFollowed: on all ranks; they go on eagerly.
        """
        meeting = self._meeting
        if meeting is None:
            raise ValueError("one device reads nothing alone")
        alone = meeting.alone(self._known_alone)
        if isinstance(alone, KeptAlone):
            return alone
        self.drop()
        program = program_for(alone, self._step, self._live_alone)
        values = self._run_beginning(program, None) if alone.wants else ()
        return read_alone(alone, self._step, values) if meeting.rank in alone.ranks else None

    def values(self) -> Sequence[Tensor] | None:
        """What Python reads now, if a graph gives it.

        Raises:
            CannotBeFollowed: another rank goes on eagerly.
        """
        if self._meeting is not None and self._meeting.is_own and self._step.must_be_graph:
            raise CannotBeFollowed(
                "a value, or a size that values decide, is read on each rank's own batch, and the ranks have parts of "
                "parameters"
            )
        if torch.is_inference_mode_enabled() is self._infers:
            with torch.no_grad():
                return self._values()
        with torch.inference_mode(mode=self._infers), torch.no_grad():  # the user's switches are others
            return self._values()

    def _values(self) -> Sequence[Tensor] | None:
        first = self.conversation is None
        gives = not self._is_over and (self._can_begin() if first else self._takes_its_path()) and self._decides_alike()
        if self._meeting is not None:
            gives = self._meeting.reads(self._step.mark, self._likely.index if gives and self._likely else None)
            while self._meeting.is_apart:
                alone = self.help_out()
                if alone is not None and not isinstance(alone, KeptAlone):
                    return alone
                gives = self._meeting.reads(self._step.mark, None)
        if not gives or self._likely is None:
            self.drop()
            return None if self._meeting is None or self._meeting.is_own else self._of_the_beginning()
        if self.conversation is None:
            self.conversation, values = self._begin(self._likely.executable)
            return values
        return self.conversation.values(self._told(len(self._step.notes) - 1))

    def end(self, program: Program, executable: Executable) -> tuple[Sequence[Any], Pending | None] | None:
        """Python is done: the outputs of the graph, if it is the step's; else it has not run."""
        conversation = self.conversation
        if conversation is None or conversation.executable is not executable or not self._takes_its_path():
            self.drop()
            return None
        self.conversation = None
        return conversation.end(self._told(len(program.notes)))

    def drop(self) -> None:
        """The graph is not the step's."""
        self._is_over = True
        conversation, self.conversation = self.conversation, None
        if conversation is not None:
            conversation.drop()

    def _of_the_beginning(self) -> Sequence[Tensor] | None:
        """What Python reads now, by a graph of the step so far; None: by calls on the whole batch."""
        *notes, read = self._step.notes
        sized = self._step.has_data_counts or not read.reads
        if sized and not self._step.must_be_graph and not any(note.draws for note in notes):
            return None  # that graph would be one for each count
        if (told := self._values_told.now()) is not None:
            return told
        wanted = self._values_told.wanted()
        return self._values_told.keep(
            wanted, self._run_beginning(program_of_beginning(self._step, self._live, wanted), read.source)
        )

    def _can_begin(self) -> bool:
        notes = self._step.notes
        likely = self._likely = self._known.get(notes[-1].number)
        if likely is None or not likely.executable.can_talk:
            return False
        if not self._takes_its_path():
            return False
        program = likely.program
        # tensors from outside that a graph finds by their number alone
        unnamed = [number for note in program.notes for number, kind in note.met.items() if not kind.is_parameter]
        if any(number >= len(self._step.outside) for number in unnamed):
            return False
        last = max((i + 1 for i, log in enumerate(program.logs) if log.has_number), default=0)
        # a number that is logged later is not known yet
        return not last or program.logs[:last] == self._logs()[:last]

    def _decides_alike(self) -> bool:
        """Whether the likely graph does the same as far as is known: a value that it gives is that of this step."""
        if self._likely is None:
            return False
        executable, read = self._likely.executable, self._reads
        self._reads += 1
        if not read:
            self._live.outside, self._live.numbers = self._step.outside, self._numbers
            self._live.counts = self._step.counts
        inputs = functools.partial(executable.looked_at, self._tensors)
        return executable.captured.guards.failure_at(read, inputs) is None

    def _takes_its_path(self) -> bool:
        step, program = self._step, None if self._likely is None else self._likely.program
        begin, end = self._same, len(step.notes)
        if program is None or end > len(program.notes):
            return False
        if any(mine is not its for mine, its in zip(step.notes[begin:], program.notes[begin:end], strict=True)):
            return False
        if step.counts and not program.may_have(step.counts):
            return False  # the next call will be another one, and what comes behind the read fits these counts alone
        if program.at is not None and step.counts != list(program.at[: len(step.counts)]):
            return False  # that graph has other numbers in it
        # a number that is another one for the first time is a constant of that graph
        numbers = step.numbers_between(begin, end)
        self._same = end
        self._numbers |= numbers
        return numbers.keys() == {key for key in program.free if begin <= key[0] < end}

    def _told(self, depth: int) -> list[Any]:
        """What Python has computed since it read last, when it reads again at a depth, or is done."""
        if self._likely is None:
            return []
        return [self._numbers[key] for key in self._likely.program.numbers_before(depth)]


def program_of_beginning(step: Step, live: Live, wanted: Sequence[Source] | None = None) -> Program:
    """What comes before the read at which a step is.

    Args:
        step: the step.
        live: what graphs take of it.
        wanted: what it gives; by default what Python reads.
    """
    *notes, read = step.notes
    live.outside, live.numbers = step.outside, step.numbers_between(0, len(notes))
    wanted = sources_in((read.args, read.kwargs)) if wanted is None else wanted
    wants = [Want(source, OutputRole.LOGGED) for source in wanted]
    program = Program(notes, read.number, tuple(wants), None, frozenset(live.numbers), live, is_beginning=True)
    if not step.has_counts:
        return program
    live.counts = step.counts
    return dataclasses.replace(program, counts=Counts(len(step.counts)), at=tuple(step.counts))


class Following:
    """The steps of one method of a module.

    Args:
        context: of the run.
        flush: does what the last iteration left for the next one.
        left_for: gives that to a graph that can do it, or does it.

    Attributes:
        ended: why steps are no longer followed; None while they are.
        graphs_infer: graphs run in torch's inference mode, whatever mode the user's code is in.
    """

    def __init__(
        self,
        context: RunContext,
        flush: Callable[[], None],
        left_for: Callable[[Executable], Pending | None],
        gradients: MutableMapping[str, Tensor],
    ) -> None:
        self.ended: str | None = None
        self._gradients = gradients
        self.graphs_infer = False
        self.at_once = LoggedAtOnce()
        self._context, self._flush, self._left_for = context, flush, left_for
        self._follower = Follower(self._names, self._is_named)
        optimizer = context.optimizer
        self._evaluates = optimizer is None
        self._is_by_hand = optimizer is not None and not context.module.automatic_optimization
        is_in_parts = self._is_by_hand and must_be_graphs(context)
        optimizers = parts_of(optimizer) if optimizer is not None and self._is_by_hand else ()
        self._state = None if context.mesh is None else StateMesh(context.mesh)
        self._references = None if self._state is None else References(self._state)
        part_of: Any = {} if self._state is None else {"part_of": self._state.part_like}
        self._by_hand = ByHand(optimizers, in_parts=is_in_parts, **part_of)
        self._tables: tuple[Shadows, list[dict[str, Any]]] | None = None
        self._live = Live()
        self._wants: dict[tuple[int, frozenset[Any]], dict[Want, None]] = {}
        self._shadows: tuple[list[Any], Shadows] | None = None
        self._eager = 0
        self._has_graphs = self._has_own_batch = False
        self._likely: dict[Any, dict[int, Likely]] = {}
        """The graph that ran last behind each first read, by the part of the iteration."""
        self._runs_on: tuple[tuple[tuple[int, ...], ...], tuple[int, ...]] = (), ()
        """Shapes and split of the batch of the current step."""
        self._told: set[str] = set()
        self._known_names: dict[int, str] = {}
        self._fingerprints = Fingerprints()
        self._counts: dict[Any, tuple[Counts, list[tuple[int, ...]]]] = {}
        """Where graphs of each path put the counts that they find, and the counts that they are made with."""
        self._alone: tuple[dict[Any, Alone | KeptAlone | None], Live] = {}, Live()
        """What ranks have read or kept alone, and what graphs take that give it."""
        self._leaves: dict[Any, list[int]] = {}
        """Numbers of tensors from outside that are no parameters and ask for gradients, by path."""
        self._taken: dict[Any, int] = {}
        self._most_new_paths = NEW_PATHS_IN_PARTS if self._evaluates else NEW_PATHS
        """How often steps took each path."""

    # ------------------------------------------------------------------ names of the module's tensors
    def _names(self) -> dict[int, str]:
        module = self._context.module
        names = {id(t): name for name, t in module.named_buffers()}
        names |= parameter_names(module, self._context.optimizer)
        names |= {key: named_gradient(names[id(p)]) for key, p in self._gradients_in_parts().items()}
        return names

    def _gradients_in_parts(self) -> dict[int, Tensor]:
        """The parameters in parts by the ``id`` of what lies in their ``.grad``, where steps look at that."""
        optimizer, module = self._context.optimizer, self._context.module
        if not self._is_by_hand or optimizer is None:
            return {}
        with private.no_torch_functions():
            theirs = [p for group in optimizer.param_groups for p in group["params"]]
            in_parts = [p for p in (*module.parameters(), *theirs) if isinstance(p, DTensor)]
            return {id(p.grad): p for p in in_parts if p.grad is not None}

    def _name_of(self, parameter: Tensor) -> str:
        name = self._known_names.get(id(parameter))
        if name is None or not self._is_named(name, parameter):
            self._known_names = self._names()
        return self._known_names[id(parameter)]

    def _is_named(self, name: str, tensor: Tensor) -> bool:
        if (owner := gradient_in_parts(name)) is not None:
            parameter = self._gradients_in_parts().get(id(tensor))
            return parameter is not None and self._is_named(owner, parameter)
        part: Any = self._context.module
        *path, last = name.split(".")
        for key in path:
            part = part._modules.get(key) if isinstance(part, nn.Module) else None  # noqa: SLF001 - its public form walks
            if part is None:
                return self._names().get(id(tensor)) == name
        own = part._parameters.get(last)  # noqa: SLF001 - as above
        return (part._buffers.get(last) if own is None else own) is tensor  # noqa: SLF001 - as above

    # ------------------------------------------------------------------ a step
    @property
    def may_run_again(self) -> bool:
        """Whether the next step may have to run again from its start, so that what it changes is to be put back."""
        return self._follower.may_transform or not self._follower.recorded

    def step(
        self,
        batch: Batch,
        arguments: Mapping[str, Any],
        method: str,
        part: Any,
        meeting: Meeting | None,
        run_beginning: Callable[[Program, str | None], Sequence[Tensor]],
        vary: Sequence[Dimension] = (),
    ) -> FollowedStep:
        """Run the user's Python.

        Args:
            batch: of the step.
            arguments: the method's other arguments.
            method: its name.
            part: what else decides which graph is the step's: the part of the iteration.
            meeting: of the ranks; None on one device.
            run_beginning: on several ranks, gives what Python reads before there is a graph of the step.
            vary: sizes of the tensors of the batch that differ from step to step.
        """
        context = self._context
        tree, given = (batch.tree, batch.tensor_values) if meeting is None else meeting.taken(self._follower.moulds)
        step = Step(self._follower, given, vary, batch.tensor_values)
        del given
        self._has_own_batch = meeting is not None and meeting.is_own
        step.draws_as_eager, step.may_run_again = context.mesh is None, self.may_run_again
        if meeting is not None:
            meeting.follow(step, lambda: self._calls_of(step), helps=not (meeting.is_own or self._evaluates))
        step.on_values, step.scaled = functools.partial(self._flush_beside, step), self._scaled
        step.parameters = context.parameters
        if self._references is not None:
            self._references.begin()
            owned = self._owned()
            step.gathered, step.owns = self._references.whole_of, lambda part: id(part) in owned
        step.must_be_graph = must_be_graphs(context) and not self._evaluates
        may_wait = not (step.must_be_graph or self._has_own_batch)
        are_many = (
            self._ways_taken() >= self._most_new_paths
            if self._follower.recorded <= MANY_CALLS
            else len(self._taken) >= NEW_LONG_PATHS
        )
        step.knows_many_paths = may_wait and not self._evaluates and are_many
        wants: dict[Want, int] = {}

        def want(tensor: Tensor, role: OutputRole) -> int | Tensor:
            source = step.source_if_known(tensor)
            if source is None and isinstance(tensor, DTensor):  # no rank has all of it: a graph tells it
                with private.no_torch_functions():
                    source = step.source_of(step.called(Tensor.detach, (tensor,), {}))
            if source is None:  # it is told as it is now, whoever writes into it later
                return step.reads.value_now(tensor)
            return wants.setdefault(Want(source, role, len(step.notes)), len(wants))

        tensors, split = batch.tensor_values, () if meeting is None else meeting.split
        self._runs_on = tuple(tuple(t.shape) for t in tensors), split
        known = {key: likely for key, likely in self._likely.get(part, {}).items() if likely.takes(tensors, split)}
        begin = functools.partial(self._begin, batch=batch)

        def logs() -> tuple[Log, ...]:
            return logs_of(queue.calls, list(wants), self._live)

        infers = self.graphs_infer
        talk = _Talk(step, known, self._live, begin, tensors, meeting, run_beginning, infers, logs, *self._alone)

        def before_eager() -> None:
            talk.drop()
            if meeting is not None:
                meeting.goes_eagerly(_in_words(step) or "")
                if meeting.looked:
                    raise LookedAtRows(meeting.looked)
                if meeting.shared:
                    raise Abandoned(meeting.reason)
            if step.must_be_graph or self._evaluates:  # such a step begins anew, on whole parameters
                raise NoEagerWay((meeting and meeting.reason) or _in_words(step))
            if meeting is not None and meeting.runs_again:
                raise Abandoned(_in_words(step))

        step.on_read, step.before_eager = talk.values, before_eager
        queue = Queue(self._shadows_now(), want, step.eagerly, step.beside)
        queue.logged, queue.at_once = private.watched_metrics(context.trainer), self.at_once
        if self._evaluates:
            queue.logs_at_once = False  # the step may have to run again
            if meeting is not None and len(meeting.split) > 1:  # other ranks have rows, too
                step.refuses_read = functools.partial(read_of_rows, step, rows=meeting.rows)
        if meeting is not None:
            queue.log_now, queue.part, queue.is_own = meeting.log_now, meeting.part, meeting.is_own
            queue.has_ranks = True
            meeting.metrics = queue.waiting
        step.wanted = lambda: [(w.source, w.after or 0) for w in wants]
        step.on_zeroed = self._zeroed
        step.on_eager = lambda told: self._work_off(queue, list(itertools.starmap(told, step.wanted())), batch, meeting)
        hand = self._by_hand.of(step)
        with contextlib.ExitStack() as around:
            if meeting is not None:
                around.enter_context(meeting.active())
            if step.is_first:
                # notes know the module whose forward called; for steps that begin without a known way
                step.module_path = around.enter_context(module_paths(context.module))
            around.enter_context(queue.active())
            around.enter_context(hand.active())
            around.enter_context(step.active())
            if meeting is not None:
                around.enter_context(meeting.wires.watched())
            try:
                with step.in_unseen_code():
                    with context.step_context(method):
                        returned = with_loss(getattr(context.module, method)(tree, *arguments.values()))
                    if not self._is_by_hand and not self._evaluates:
                        self._backward(step, returned)
            except BaseException as error:
                talk.drop()
                if meeting is not None and isinstance(error, Exception) and not step.is_eager:
                    meeting.raised(error)
                is_users = not type(error).__module__.startswith("lightning_spmd.")
                if is_users and (self._is_by_hand or meeting is None) and not (step.is_eager or self._evaluates):
                    # what it did before has been, as without the strategy
                    step.eagerly("the step raised an exception")
                step.end()
                if isinstance(error, StopIteration):
                    raise EndedByUser(error) from None
                raise
        del tree
        if meeting is not None:
            meeting.wires.is_over = True
            if meeting.looked:  # the user's code swallowed that
                raise LookedAtRows(meeting.looked)
            meeting.give_back()
        step.end()
        if step.is_eager and (step.must_be_graph or self._evaluates):  # the user's code swallowed that
            raise NoEagerWay(_in_words(step))
        if step.is_eager:
            self._count_eager_of(step)
            return FollowedStep(step, _resolved(returned), queue, (), None)
        loss = returned.get("loss") if isinstance(returned, dict) else returned
        has_loss = not self._is_by_hand and not self._evaluates
        if has_loss and loss is None and context.scaler() is not None:  # Lightning neither steps nor moves the scale
            step.eagerly(_SKIPPED)
            self.count_eager(_SKIPPED)
            return FollowedStep(step, _resolved(returned), queue, (), None)
        source = step.source_if_known(loss) if isinstance(loss, Tensor) and has_loss else None
        del loss
        parts = [Want(source, OutputRole.GRADIENT, None, (self._name_of(p),)) for p, source in hand.take_parts()]
        wants.update((want, len(wants) + index) for index, want in enumerate(parts))
        # what training keeps is of the global batch, as its loss is; evaluation keeps the rank's own rows
        role = OutputRole.STEP_OUTPUT if self._evaluates else OutputRole.LOGGED
        queue.let_go()
        needed = [source, *[want.source for want in wants], *[made for pair in step.added for made in pair]]
        step.needed = max([made.depth + 1 for made in needed if isinstance(made, Made)], default=0)
        for made in step.kept():
            wants.setdefault(Want(made, role), len(wants))
        is_own = meeting is not None and meeting.is_own
        program = self._program(
            step, wants, source, logs() if is_own else (), in_parts=meeting is not None and not is_own
        )
        way = step.path, program.at if step.has_data_counts else None
        self._taken[way] = self._taken.pop(way, 0) + 1
        if len(self._taken) > _REMEMBERED:
            del self._taken[next(iter(self._taken), way)]
        if self._taken[way] == 1 and may_wait and self._ways_taken() > self._most_new_paths:
            step.eagerly(NEW_PATH, step.left_at)
            self._count_eager_of(step)
            return FollowedStep(step, _resolved(returned), queue, (), None)
        apart = step.data_counts.apart
        if apart is None and step.has_counts and not program.may_have(step.counts):  # a call was not asked for it
            apart = "the calls of a step were taken for those of other numbers of rows or elements"
        if apart is not None:
            step.eagerly(apart)
            return FollowedStep(step, _resolved(returned), queue, (), None)
        mark = step.mark if meeting is None or is_own else self._mark(step)
        followed = FollowedStep(step, returned, queue, list(wants), program, talk, mark)
        if has_loss:
            followed.held = [*self._held_leaves(step), *filter(_is_leaf, self._follower.given)]
        return followed

    def _owned(self) -> set[int]:
        """The ``id`` of all tensors of the module and its optimizer, and of gradients in parts that steps look at."""
        shadows = self._shadows_now()
        if self._tables is None or self._tables[0] is not shadows:  # other modules
            self._tables = shadows, private.tensor_tables(self._context.module)
        # now: in the middle of a step functional_call may have put others there
        owned = {id(tensor) for table in self._tables[1] for tensor in table.values()}
        if self._context.optimizer is not None:
            owned.update(id(p) for group in self._context.optimizer.param_groups for p in group["params"])
        owned.update(self._gradients_in_parts())
        return owned

    def _ways_taken(self) -> int:
        """How many ways steps took. Where numbers were told in vain, each of them has a way beside those."""
        in_vain = sum(paths for paths in self._follower.told_at.values() if paths > 0)
        return len(self._taken) - min(in_vain, self._most_new_paths)

    def _held_leaves(self, step: Step) -> list[Tensor]:
        """Tensors from outside, no parameters, to which eager training gives a gradient."""
        numbers = self._leaves.get(step.path)
        if numbers is None:
            met = {number: kind for note in step.notes for number, kind in note.met.items()}
            numbers = [number for number, kind in met.items() if kind.trained and not kind.is_parameter]
            self._leaves[step.path] = numbers
        return [tensor for number in numbers if _is_leaf(tensor := step.outside[number])]

    def _zeroed(self, parameters: Iterable[Tensor]) -> None:
        """The step zeroes or replaces gradients, of which graphs hold those of batches before."""
        if self._gradients and not self._is_by_hand:
            zeroed = set(map(id, parameters))
            for name in [name for name, p in self._context.module.named_parameters() if id(p) in zeroed]:
                self._gradients.pop(name, None)

    def _mark(self, step: Step) -> int:
        """What must be the same on all ranks of a step whose Python is done."""
        reads = step.reads_gradients is not None
        # tensors from outside that are none of the module's: each rank has made its own
        met = [(number, kind) for note in step.notes for number, kind in note.met.items()]
        unnamed = [step.outside[number] for number, kind in met if kind.name is None]
        return stable_hash((step.mark, reads, self._fingerprints.of(unnamed)))

    def _program(
        self, step: Step, wants: Iterable[Want], loss: Source | None, logs: tuple[Log, ...], *, in_parts: bool
    ) -> Program:
        """The program of a step whose Python is done.

        Args:
            step: the step.
            wants: what leaves its graph.
            loss: what the step returned as its loss.
            logs: on a rank's own batch, what of it becomes all ranks'.
            in_parts: each rank has rows of the batch.
        """
        free = frozenset(step.numbers)
        all_wants = self._wants.setdefault((step.path, free), {})
        all_wants.update(dict.fromkeys(wants))
        self._live.outside, self._live.numbers, self._live.counts = step.outside, step.numbers, step.counts
        tree = step.tree
        for_all = tree is not None and tree.is_for_all(step.path)
        why_not = None if tree is None else tree.why_not
        program = Program(
            step.notes,
            step.path,
            tuple(all_wants),
            loss,
            free,
            self._live,
            logs,
            for_all_sizes=for_all,
            why_not=why_not,
            added=tuple(step.added),
        )
        if step.has_counts:
            counts, samples = self._counts_of_path(step, for_all=for_all, in_parts=in_parts)
            if samples and (note := with_open_number(step.notes)) is not None:
                samples = []
                told_from_now_on(step, note)
                if not tells(step, note, step.numbers_of(note)):
                    place = f" at {note.source}" if note.source else ""
                    why_not = f"{note.name} is given other numbers in other steps{place}"
            at, for_all = None if samples else tuple(step.counts), for_all and bool(samples)
            program = dataclasses.replace(
                program, counts=counts, samples=samples, at=at, for_all_sizes=for_all, why_not=why_not
            )
        return program

    def _counts_of_path(self, step: Step, *, for_all: bool, in_parts: bool) -> tuple[Counts, list[tuple[int, ...]]]:
        """Where graphs of a path put the counts that they find, and those they are made with, if any do for all."""
        sizes, number = tuple(step.counts[: step.opened]), len(step.counts)
        # another loss of the same calls may have conditions of its own
        key = step.path, () if for_all else sizes, sum(len(note.pins) + len(note.conditions) for note in step.notes)
        if key not in self._counts:
            places = step.tree.sizes.places if step.tree is not None and for_all else ()
            told = told_in(step.notes)
            counts = Counts(
                number, by_rank=in_parts, places=places, told=told, live=lambda: self._live.counts, sizes=sizes
            )
            samples = list[tuple[int, ...]]()
            if for_all or (number > len(sizes) and all(note.is_fitted for note in step.notes)):
                with contextlib.suppress(Apart):
                    samples = samples_of_path(step.notes, number, {} if for_all else dict(enumerate(sizes)))[:GRAPHS]
            self._counts[key] = counts, with_parts(samples) if in_parts and samples else samples
        counts, samples = self._counts[key]
        return counts, [] if counts.are_apart else samples

    def help_out(self, followed: FollowedStep) -> None:
        """Do what ranks need that read or keep alone, once Python is done here; all ranks together.

        Args:
            followed: the step.

        Raises:
            CannotBeFollowed: on all ranks; they go on eagerly.
        """
        kept = followed.help_out()
        if kept is None:
            return
        if kept.takes_state:
            self._flush()
        loss = None if followed.program is None else followed.program.loss

        def made_anew(step: Step, wants: Sequence[Want]) -> tuple[Program, int]:
            return self._program(step, wants, loss, (), in_parts=True), self._mark(step)

        followed.keeps_alone(kept, made_anew)

    def _scaled(self, loss: Tensor) -> Tensor:
        scaler = self._context.scaler()
        return loss if scaler is None else scaler.scale(loss)

    def _backward(self, step: Step, returned: Any) -> None:
        """Run the user's Python that runs in the backward pass of a loss."""
        loss: Any = returned.get("loss") if isinstance(returned, dict) else returned
        parts = self._context.trainer.accumulate_grad_batches
        is_made = isinstance(loss, Tensor) and not step.is_eager and step.source_if_known(loss) is not None
        if isinstance(loss, Tensor) and not (is_made or step.is_eager):  # torch knows whether it can be trained
            step.eagerly("the loss is no result of what the step computes: a constant, or from another thread")
        may_not = parts > 1 or step.must_be_graph
        if may_not and step.by_hand is not None and step.by_hand.has_gradients and not step.is_eager:
            step.eagerly("a backward pass in the step, where gradients are accumulated or in parts")
        elif is_made and step.functions.are_there and step.asks(loss):
            step.of_loss(loss, parts)
        elif is_made and step.asks(loss):
            step.loss = step.source_of(loss)

    def _calls_of(self, step: Step) -> list[Call]:
        """The calls of a step, for the other ranks."""
        found: list[Call] = []
        for note in step.notes:
            unnamed = [step.outside[number] for number, kind in sorted(note.met.items()) if kind.name is None]
            numbers = sorted(step.numbers_between(note.depth, note.depth + 1).items(), key=repr)
            told = [repr(value) for _, value in numbers]
            told += [str(step.counts[i]) for i in note.told.values()]
            told += [f"a tensor ({digest:08x})" for digest in self._fingerprints.of(unnamed)]
            found.append(Call(note.in_words(), ", ".join(told), note.name, note.source))
        return found

    def united(self, followed: FollowedStep) -> Program:
        """The program of a step with all that any rank has of it; all ranks are here together.

        Args:
            followed: the step.
        """
        program, control = followed.program, self._context.control
        if program is None:
            raise ValueError("a step that ran for good has no program")
        if control is None:
            return program
        wants = self._wants[program.number, program.free]
        for side in control.gather(program.wants):
            wants.update(dict.fromkeys(side))
        in_order = sorted(wants, key=repr)  # of all ranks alike
        self._wants[program.number, program.free] = dict.fromkeys(in_order)
        followed.program = dataclasses.replace(program, wants=tuple(in_order))
        return followed.program

    def exchange(self, followed: FollowedStep) -> None:
        """Parameters and buffers of a step whose Python is done have been replaced."""
        step = followed.step
        step.outside[:] = map(successor_of, step.outside)
        if step.by_hand is not None:
            step.by_hand.exchange()
        self._follower.forget_objects()
        self._tables = None

    def let_go(self) -> None:
        """The run is over."""
        self._follower.let_go()
        if self._references is not None:
            self._references.let_go()

    def _flush_beside(self, step: Step) -> None:
        """Do what the last iteration left, in the middle of the user's Python."""
        with step.beside():
            self._flush()

    def _begin(self, executable: Executable, batch: Batch) -> tuple[Conversation, Sequence[Tensor]]:
        """A run of a graph, and what Python reads first."""
        context, pending = self._context, self._left_for(executable)
        conversation = Conversation(executable, batch.tensor_values, pending)
        changing = context.whole.changing(context.trainer, updates=False)
        try:
            with changing if pending is not None else contextlib.nullcontext():
                return conversation, conversation.values(None)
        except BaseException:
            conversation.drop()
            raise

    def ran(self, program: Program, executable: Executable, part: Any, index: int | None) -> None:
        """A graph was a step's: where the next one reads first, it may begin."""
        self._eager, self._has_graphs = 0, True
        if program.counts is not None and program.counts.are_apart and program.at is None:
            program = dataclasses.replace(program, at=tuple(self._live.counts))  # there was none for all
        reads = program.reads
        if reads:
            self._likely.setdefault(part, {})[reads[0].number] = Likely(program, executable, index, *self._runs_on)

    def _shadows_now(self) -> Shadows:
        module = self._context.module
        tables = private.child_tables(module) if self._shadows is None else None
        if self._shadows is None or any(_children(t) != known for t, known in self._shadows[0]):
            tables = tables or private.child_tables(module)
            found = Shadows(module)
            found.computing += self._shadows[1].computing if self._shadows is not None else ()
            self._shadows = [(t, _children(t)) for t in tables], found
        return self._shadows[1]

    def _work_off(self, queue: Queue, values: Sequence[Tensor], batch: Batch, meeting: Meeting | None) -> None:
        """The step goes on eagerly: what was queued is done, and from here on nothing is."""
        calls = queue.close()
        rows = 0
        if meeting is not None:
            rows = meeting.rows
            taken = {position for call in calls if call.method in METHODS for position in wanted_by(call)}
            values = [meeting.part(v) if i in taken else v for i, v in enumerate(values)]
        is_global, log = meeting is not None, None if meeting is None else meeting.log_now
        with metrics_unseen():
            results = replay(self._context.module, calls, values, batch.values, rows, is_global=is_global, log=log)
        queue.worked_off(results)

    def _count_eager_of(self, step: Step) -> None:
        """A step has run eagerly; one that only waits for others on its path does not end the following."""
        if step.reason is not None and step.reason[0] == NEW_PATH:
            self._tell_once(NEW_PATH, _in_words(step) or "")
        else:
            self.count_eager(_in_words(step) or "")

    def _tell_once(self, key: str, reason: str) -> None:
        if key not in self._told:
            self._told.add(key)
            tell(f"strategy='spmd' ran a step eagerly: {reason}")

    def count_eager(self, reason: str) -> None:
        """A step that was followed has run eagerly."""
        self._eager += 1
        self._tell_once(reason, reason)
        # a rank's own batch costs no more so, and weighs what it weighs in graphs
        if not self._has_own_batch and self._eager == (MOST_EAGER if self._has_graphs else MOST_EAGER_AT_FIRST):
            self.ended = reason

    def ran_eagerly(self, reason: str) -> None:
        """A step could not be followed, and its Python runs once more; on one device that of no step does again."""
        self.count_eager(reason)
        if self._context.mesh is None:
            self.ended = reason


def _in_words(step: Step) -> str | None:
    """Why a step ran for good; None if it did not."""
    if step.reason is None:
        return None
    text, place = step.reason
    return f"{text} ({place})" if place else text


def _children(table: Mapping[str, Any]) -> tuple[int, ...]:
    """Which modules are in a table."""
    return tuple(map(id, table.values()))


def _resolved(returned: Any) -> Any:
    """What a step returned, with metrics' values, and what is a rank's own, as they are."""
    return map_leaves(lambda _, leaf: value_of(leaf) if is_tripwire(leaf) else known(leaf), returned)


def with_loss(returned: Any) -> Any:
    """What training_step returned, with a tensor as its loss where that is a metric's value."""
    if isinstance(returned, dict) and isinstance(returned.get("loss"), MetricResult):
        return {**returned, "loss": known(returned["loss"])}
    return known(returned)


def _is_leaf(tensor: Tensor) -> bool:
    return tensor.requires_grad and tensor.is_leaf
