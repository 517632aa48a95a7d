"""One step, followed on its own: its Python runs once, nothing is computed, and its graphs are captured from the notes.

A plan wants a graph without training; its parameters have no memory. Values that Python reads are unknown here.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from torch import Tensor

from lightning_spmd import _private_api as private
from lightning_spmd.errors import CaptureError
from lightning_spmd.ir.several_optimizers import parts_of
from lightning_spmd.ir.signature import OutputRole
from lightning_spmd.ir.sizes import Dimension
from lightning_spmd.ir.steps import CapturedStep, OutputRef
from lightning_spmd.ir.tree import map_leaves
from lightning_spmd.messages import speaking_of
from lightning_spmd.stages.capture.follow.by_hand import ByHand
from lightning_spmd.stages.capture.follow.follower import Follower
from lightning_spmd.stages.capture.follow.module_paths import module_paths
from lightning_spmd.stages.capture.follow.notes import sources_in
from lightning_spmd.stages.capture.follow.program import Live, Program, Want
from lightning_spmd.stages.capture.follow.queue import Queue, Shadows, known
from lightning_spmd.stages.capture.follow.same_calls import is_repeatable
from lightning_spmd.stages.capture.follow.step import Step
from lightning_spmd.stages.capture.follow.values import Values
from lightning_spmd.stages.capture.followed_trace import capture_followed
from lightning_spmd.stages.capture.optimizer.newborn_state import OnBirths
from lightning_spmd.stages.capture.record.around_trace import grad_mode, random_state_kept
from lightning_spmd.stages.capture.record.inputs import global_spec
from lightning_spmd.stages.capture.record.packing import parameter_names
from lightning_spmd.stages.capture.request import CaptureRequest
from lightning_spmd.stages.capture.rewrites.reads import UnknownValueError
from lightning_spmd.stages.capture.user_code import location_of, user_location


class _Ended(BaseException):
    """Control flow: the step cannot be a graph. It is no ``Exception``, so that the user's code does not catch it."""

    def __init__(self, error: CaptureError) -> None:
        super().__init__(str(error))
        self.error = error


class FollowedOnce:
    """A step whose Python has run.

    Args:
        request: what it is captured for; one without a forward part has no Python.
        read: gives what Python reads, as :attr:`Step.on_read` does; None: known is what follows from numbers alone.
        vary: sizes of the tensors of the batch that the path leaves open.
        earlier: the step of a batch in which these sizes are others; how integers follow from sizes, two steps show.

    Raises:
        CaptureError: it can be no graph.
        UnknownValueError: Python reads a value.
    """

    def __init__(
        self,
        request: CaptureRequest,
        read: Callable[[Step], Sequence[Any]] | None = None,
        vary: Sequence[Dimension] = (),
        earlier: FollowedOnce | None = None,
    ) -> None:
        self._read, self._vary = read, vary
        self.follower: Follower | None = None if earlier is None else earlier.follower
        self._wants: dict[Want, int] = {}
        self.program = Program((), 0, (), None, frozenset(), Live())
        if request.variant.forward:
            try:
                with speaking_of(request.variant.method):
                    self._follow(request)
            except _Ended as ended:
                raise ended.error from None

    def captured(self, request: CaptureRequest, on_births: OnBirths | None = None) -> CapturedStep:
        """A graph with this forward part, if it has one.

        Args:
            request: what is captured; module, optimizer and batch are those of the step.
            on_births: as in :func:`~lightning_spmd.stages.capture.followed_trace.capture_followed`.

        Raises:
            CaptureError: it can be no graph.
        """
        program = self.program if request.variant.forward else Program((), 0, (), None, frozenset(), Live())
        return capture_followed(dataclasses.replace(request, program=program), on_births)

    def _follow(self, request: CaptureRequest) -> None:
        module, optimizer, variant = request.module, request.update.optimizer, request.variant
        names = {id(t): name for name, t in module.named_buffers()} | parameter_names(module, optimizer)
        tree, given = _stand_ins(request)
        if self.follower is None:
            self.follower = Follower(lambda: names, lambda name, tensor: names.get(id(tensor)) == name)
        step = Step(self.follower, given, self._vary)
        step.stand_ins, wants = frozenset(range(len(given))), self._wants
        read = self._read
        step.on_read = lambda: _of_numbers(step) if read is None else read(step)
        step.before_eager = lambda: _refused(step)

        def want(tensor: Tensor, role: OutputRole) -> int | Tensor:
            source = step.source_if_known(tensor)
            if source is None:
                return tensor
            return wants.setdefault(Want(source, role, len(step.notes)), len(wants))

        queue = Queue(Shadows(module), want, step.eagerly, step.beside)
        queue.logs_at_once = False
        hand = ByHand(() if optimizer is None else parts_of(optimizer)).of(step)
        with contextlib.ExitStack() as around:
            around.enter_context(grad_mode(variant))
            around.enter_context(random_state_kept())
            around.enter_context(request.surroundings())
            step.module_path = around.enter_context(module_paths(module))
            around.enter_context(queue.active())
            around.enter_context(hand.active())
            around.enter_context(step.active())
            try:
                with request.step_context():
                    returned = getattr(module, variant.method)(tree, *request.arguments.values())
                loss = known(returned.get("loss") if isinstance(returned, dict) else returned)
                has_loss = variant.backward and not variant.by_hand and isinstance(loss, Tensor)
                source = step.source_if_known(loss) if has_loss else None
                if source is not None and step.functions.are_there and step.asks(loss):
                    step.of_loss(loss, request.update.loss_divisor)
            except private.DataDependentOutputException as error:
                raise _Ended(_of_value(location_of(error))) from None
        if step.is_eager:  # the user's code caught it
            _refused(step)
        del tree, given
        step.end()
        role = OutputRole.LOGGED if variant.backward else OutputRole.STEP_OUTPUT

        def leaf(_: str, value: Any) -> Any:
            made = step.source_if_known(value) if isinstance(value, Tensor) else None
            return value if made is None else OutputRef(wants.setdefault(Want(made, role), len(wants)))

        map_leaves(leaf, returned)  # what it returns leaves the graph
        del returned, loss
        for made in step.kept():
            wants.setdefault(Want(made, role), len(wants))
        self.program = Program(
            step.notes,
            step.path,
            tuple(wants),
            source,
            frozenset(step.numbers),
            Live(step.outside, step.numbers),
            for_all_sizes=step.tree is not None and step.tree.is_for_all(step.path),
            why_not=None if step.tree is None else step.tree.why_not,
            added=tuple(step.added),
        )


def _stand_ins(request: CaptureRequest) -> tuple[Any, list[Tensor]]:
    """The batch with stand-ins for its tensors, with the rows of all ranks; and the stand-ins."""
    batch = request.batch
    if batch is None:
        raise ValueError("a step without a batch has no Python that runs")
    found: dict[int, Tensor] = {}
    for index in batch.tensors:
        live = batch.values[index]
        spec = global_spec(live, None if batch.is_shared(index) else request.rows)
        found[index] = private.without_memory(spec).requires_grad_(live.requires_grad)
    count = -1

    def leaf(_: str, value: Any) -> Any:
        nonlocal count
        count += 1
        return found.get(count, value)

    return map_leaves(leaf, batch.tree), [found[index] for index in batch.tensors]


def _of_numbers(step: Step) -> list[Tensor]:
    """What Python reads, computed from calls that take no tensor of the batch or the module, as of ``arange``."""
    *before, read = step.notes
    values = Values(_of_outside)
    with private.disable_dispatch_modes():
        for note in before:
            if is_repeatable(note) and values.made.keys() >= set(sources_in((note.args, note.kwargs))):
                values.run(note, {})
            elif not note.writes.isdisjoint(values.made):
                _of_outside()
    if not values.made.keys() >= set(sources_in((read.args, read.kwargs))):
        _of_outside()
    return [values.of(source) for source in sources_in((read.args, read.kwargs))]


def _of_outside(*_: Any) -> NoReturn:
    raise _Ended(_of_value(user_location()))


def _of_value(place: str | None) -> CaptureError:
    return UnknownValueError("the value of a tensor decides something", place)


def _refused(step: Step) -> NoReturn:
    why, place = step.reason or ("it cannot be followed", None)
    raise _Ended(CaptureError(why, place))
