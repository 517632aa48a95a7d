"""Results as large as the data say: how many, in this step and in others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from lightning_spmd import _private_api as private
from lightning_spmd.stages.capture.follow.copies import Copies
from lightning_spmd.stages.capture.follow.counts import Told, counted, may_have
from lightning_spmd.stages.capture.follow.engine import EngineCall
from lightning_spmd.stages.capture.follow.notes import Note
from lightning_spmd.stages.capture.follow.own_generator import OwnGenerator
from lightning_spmd.stages.capture.follow.recorder import Recorder
from lightning_spmd.stages.capture.follow.step_state import CannotBeFollowed, StepState
from lightning_spmd.stages.capture.follow.values import surroundings

_SPARE = 64
"""Sizes of the results of a call whose placeholders are kept."""


class DataCounts:
    """The data-dependent sizes of one step.

    Args:
        step: the step.
        recorder: of its calls.
        copies: on which calls are run for the sizes of their results.
        generator: torch's, whose state a read notes.
    """

    def __init__(self, step: StepState, recorder: Recorder, copies: Copies, generator: OwnGenerator) -> None:
        self._step, self._recorder, self._copies, self._generator = step, recorder, copies, generator
        self._ahead: Told = {}

    def may_be(self, note: Note, told: Sequence[int] = ()) -> bool:
        """Whether this step has the counts that a call requires, as far as they are known.

        Args:
            note: the call.
            told: the counts that it tells, if they are not yet among those of the step.
        """
        if not (note.pins or note.conditions):
            return True
        ahead = (*told, *(self._ahead.get(note.slot, ()) if note.counts else ()))
        return may_have([*self._step.counts, *ahead] if ahead else self._step.counts, note.pins, note.conditions)

    @contextlib.contextmanager
    def counted_already(self, note: Note, told: Sequence[int]) -> Iterator[None]:
        """While another call is looked for than this one, which requires other counts than it has been told."""
        self._ahead = {note.slot: told}
        try:
            yield
        finally:
            self._ahead = {}

    def counts_first(self, note: Note, args: Any, kwargs: Any) -> Told:
        """The counts of a call that is not noted yet."""
        if self._ahead:
            return self._ahead
        step = self._step
        if isinstance(note.func, EngineCall):
            raise CannotBeFollowed("something as large as the data say is made in a backward pass")
        before = step.here
        note.marked(before)
        step.notes.append(note)
        step.held[note.depth] = args, kwargs
        step.here = note
        try:
            with step.beside():
                given = step.on_read()
        finally:
            step.notes.pop()
            del step.held[note.depth]
            step.here = before
        return self._counted(note, args, kwargs, given)

    def _counted(self, note: Note, args: Any, kwargs: Any, given: Sequence[Any] | None) -> Told:
        """The numbers that a call behind the path so far asks for; ``given`` as ``on_read`` gives it."""
        step = self._step
        step.was_told_draws = step.was_told_draws or any(n.draws for n in step.notes)
        args, kwargs = self._copies.with_values((args, kwargs), given, writable=True)
        with step.beside(), surroundings(note.around):
            return counted(note.func, args, kwargs)

    def count(self, note: Note, args: Any, kwargs: Any) -> None:
        """Give Python the data-dependent sizes of the results of a known call, now the last of the path."""
        step = self._step
        told, self._recorder.just_told = self._recorder.just_told, None
        told = self._ahead.get(note.slot, told)
        if told is None:
            with step.beside():
                given = step.on_read()
            self._generator.look()  # a graph that gives them may have drawn
            if given is not None and all(type(v) is int for v in given):
                told = given
            else:
                step.notes.pop()
                try:
                    told = self._counted(note, args, kwargs, given).get(note.slot, ())
                finally:
                    step.notes.append(note)
        if len(told) != len(note.counts):
            raise CannotBeFollowed(f"{note.name} makes other things than before")
        step.counts += told

    def take_back(self, known: int) -> list[int]:
        """Keep this many counts: the call that gave more is not taken. Returns those."""
        told = self._step.counts[known:]
        del self._step.counts[known:]
        return told

    def fit(self, note: Note) -> None:
        """Fit a known call to the counts of this step, and size its results.

        Raises:
            CannotBeFollowed: it is not.
        """
        if not self.may_be(note):
            raise CannotBeFollowed(f"{note.name} is given another number of rows or elements than before")
        if note.apart is not None:
            raise CannotBeFollowed(note.apart)
        if note.sizes is not None and tuple([self._step.counts[i] for i in note.needs]) != note.sized_for:
            self.resize(note)

    def resize(self, note: Note) -> None:
        """Size the results of a known call for this step."""
        step = self._step
        if note.sizes is None:
            raise ValueError("results whose sizes do not depend on counts")
        wanted = tuple([step.counts[i] for i in note.needs])
        if len(note.spare) < _SPARE:
            note.spare[note.sized_for] = note.moulds, list(note.handed)
        note.sized_for = wanted
        if (known := note.spare.pop(wanted, None)) is not None:  # nobody but the note has what is spare
            note.moulds, note.handed[:] = known
            return
        with step.beside(), private.BelowDispatchModes(), private.no_torch_functions():
            sized, sizes = step.follower.moulds.sized, note.sizes(step.counts)
            note.moulds = [sized(mould, *size) for mould, size in zip(note.moulds, sizes, strict=True)]
            note.handed[:] = [mould.detach() for mould in note.moulds]

    @property
    def apart(self) -> str | None:
        """Why the path is not even for the counts of this step; None if it is."""
        return next((note.apart for note in self._step.notes if note.apart is not None), None)
