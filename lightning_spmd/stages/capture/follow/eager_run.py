"""A step that runs eagerly: its calls so far for real, with autograd, then the rest, as without the strategy."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_spmd import _private_api as private
from lightning_spmd.stages.capture.follow.becoming import data_given, data_written
from lightning_spmd.stages.capture.follow.copies import Copies
from lightning_spmd.stages.capture.follow.engine import EngineCall
from lightning_spmd.stages.capture.follow.left_out import LeftOut
from lightning_spmd.stages.capture.follow.notes import Made, Note, Source
from lightning_spmd.stages.capture.follow.recorder import Recorder
from lightning_spmd.stages.capture.follow.step_state import StepState
from lightning_spmd.stages.capture.follow.values import Values
from lightning_spmd.stages.capture.follow.worlds import CallByHand
from lightning_spmd.stages.capture.user_code import user_location


class Abandoned(BaseException):
    """Control flow: a step cannot go on eagerly from where it is, so its Python must run again from the start."""


class EagerRun:
    """One step that runs eagerly, from the moment in which it cannot be followed.

    Args:
        step: the step.
        recorder: of its calls.
        copies: on which some of them may have run.
        left_out: calls that were left out.

    Attributes:
        ended: what has ended the step instead; code in C++ and the user's may have made something else of it.
        stale: (placeholder, its tensor), by ``id`` of what the placeholder holds now.
    """

    def __init__(self, step: StepState, recorder: Recorder, copies: Copies, left_out: LeftOut) -> None:
        self._step, self._recorder, self._copies, self._left_out = step, recorder, copies, left_out
        self._live: Values | None = None
        self.stale: dict[int, tuple[Tensor, Tensor]] = {}
        self.ended: BaseException | None = None

    def begin(self, why: str, place: str | None = None, *, again: bool = False) -> None:
        """Run the calls so far eagerly, and continue the step eagerly.

        Args:
            why: for the user.
            place: ``file:line`` of it, if not of what is called now.
            again: the step's Python must run once more.

        Raises:
            Abandoned: it must.
        """
        try:
            self._begin(why, place, again=again)
        except BaseException as ended:
            if isinstance(ended, Abandoned) and self._step.random_before is not None:
                private.set_generator_states(self._step.random_before)
            if not isinstance(ended, Exception):  # these are the user's to catch
                self.ended = ended
            raise

    def _begin(self, why: str, place: str | None, *, again: bool) -> None:
        step = self._step
        step.reason, step.runs_again = (why, place or user_location()), again
        self._left_out.put_back()
        step.before_eager()
        if again:
            raise Abandoned(f"{why} ({step.reason[1]})")
        # a transform, and what ``vjp`` returns, hold placeholders and what autograd has saved of them, out of reach
        if step.has_transforms and (step.is_below or private.in_transforms() or step.wrapped.are_held):
            raise Abandoned(f"{why} within a transform of torch.func ({step.reason[1]})")
        self._recorder.forget()
        self._copies.forget()
        step.on_values()
        self._given_becomes_real()
        values = self._live = Values(step.tensor_of)
        values.instead[data_written] = data_given
        values.engine.inline, values.engine.scaled = step.functions.inline, step.scaled
        values.engine.parameters = step.parameters
        if step.by_hand is not None:
            values.world = step.by_hand.live()
        wanted, then = set(step.wanted()), dict[tuple[Source, int], Tensor]()
        with step.above_autograd(), private.disable_dispatch_modes():
            with values.kept_casts(step.block), step.memory.as_it_was():
                for note in step.notes:
                    for source, after in wanted - then.keys():
                        is_there = type(source) is not Made or source.depth < note.depth
                        if is_there and after <= note.depth and self._may_write(note, source):
                            then[source, after] = values.of(source).clone()
                    values.run(note, step.numbers_of(note))
            for note in step.notes:
                for index, placeholder in enumerate(note.handed):
                    private.exchange(placeholder, values.made[Made(note.depth, index)])
        step.memory.for_good()
        handed = [list(note.handed) for note in step.notes]
        for note in step.notes:
            for index, real in enumerate(note.handed):
                was = values.made[Made(note.depth, index)]
                self.stale[id(was)] = was, real
                values.engine.becomes(was, real)
        for note in step.notes:
            note.handed.clear()
        step.held.clear()
        values.made.clear()
        step.saved.for_good()
        step.settle()

        def told(source: Source, after: int) -> Tensor:
            if (found := then.get((source, after))) is not None:
                return found
            return handed[source.depth][source.index] if type(source) is Made else step.tensor_of(source)  # type: ignore[arg-type]

        step.on_eager(told)

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A call of a step that runs eagerly."""
        step = self._step
        step.memory.sync()
        step.autocast = private.autocast_state() or ()
        try:
            if self._live is None or not (isinstance(func, EngineCall) or func is data_written):
                return func(*args, **kwargs)
            with step.beside():
                return self._live.call(func, args, kwargs)
        finally:
            step.memory.sync()

    def _may_write(self, note: Note, source: Source) -> bool:
        """Whether a call may write into the memory of a tensor."""
        root = self._step.root_of(source)
        is_engines = isinstance(note.func, (EngineCall, CallByHand))  # they write into what comes from outside
        return root in note.writes or (is_engines and type(root) is not Made)

    def end(self) -> None:
        """Python is done; graphs that the step has are autograd's to let go."""
        if self._live is not None:
            self._live.engine.nodes.clear()

    @property
    def gradients(self) -> list[tuple[Tensor, Tensor]] | None:
        """The gradients of an eager step's loss, if they have been computed. They are given once."""
        if self._live is None or self._live.engine.gradients is None:
            return None
        found = [(self.current(leaf), self.current(gradient)) for leaf, gradient in self._live.engine.gradients]
        for parameter, before in self._live.engine.before:
            if parameter.grad is not None:
                found.append((parameter, parameter.grad))
            parameter.grad = before  # of the batches before: Lightning zeroes it, or these are added
        return found

    def node(self, token: Tensor) -> Any:
        """The node of autograd's graph behind a token, in a step that runs eagerly."""
        if self._live is None:
            raise RuntimeError("the step does not run for good")
        return self._live.engine.nodes[id(token)][1]

    def current(self, value: Any) -> Any:
        """The tensor behind a placeholder, in a step that runs eagerly."""
        found = self.stale.get(id(value))
        return value if found is None else found[1]

    def _given_becomes_real(self) -> None:
        step = self._step
        if step.whole is None:
            return
        whole, step.whole = step.whole(), None
        for given, real in zip(step.follower.given, whole, strict=True):
            if given is not real:
                private.exchange(given, real)
                self.stale[id(real)] = real, given
