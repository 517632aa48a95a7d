"""Results as large as the data say: how many, in this step and in others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_spmd import _private_api as private
from lightning_spmd.ir.counted import CountFits, samples_of
from lightning_spmd.ir.first import first
from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.ir.sizes import Counts
from lightning_spmd.ir.unify import Apart
from lightning_spmd.stages.capture.follow.copies import Copies
from lightning_spmd.stages.capture.follow.counts import Told, compiled_specs, counted, counts_in, specs_for
from lightning_spmd.stages.capture.follow.engine import EngineCall
from lightning_spmd.stages.capture.follow.notes import Made, Note, sources_in
from lightning_spmd.stages.capture.follow.recorder import Recorder, Recording, first_line, told_of
from lightning_spmd.stages.capture.follow.step_state import CannotBeFollowed, StepState
from lightning_spmd.stages.capture.follow.values import surroundings

_SPARE = 64
"""Sizes of the results of a call whose placeholders are kept."""


class DataCounts:
    """The data-dependent sizes of one step, and formulas of them.

    Args:
        step: the step.
        recorder: of its calls.
        copies: on which calls are run for the sizes of their results.
    """

    def __init__(self, step: StepState, recorder: Recorder, copies: Copies) -> None:
        self._step, self._recorder, self._copies = step, recorder, copies
        self._fewest: int | None = None

    def is_pinned(self, note: Note) -> bool:
        """Whether this step has the counts that a call requires, as far as they are known before it."""
        counts = self._step.counts
        return not note.pins or all(i >= len(counts) or counts[i] == count for i, count in note.pins.items())

    def counts_first(self, note: Note, args: Any, kwargs: Any) -> Told:
        """The counts of a call that is not noted yet."""
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
        if told is None:
            with step.beside():
                given = step.on_read()
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
        self._fewest = None

    def take_back(self, known: int) -> None:
        """Keep this many counts: the call that gave more is not taken."""
        del self._step.counts[known:]
        self._fewest = None

    @property
    def fewest(self) -> int:
        """The smallest of the counts that may differ in other steps."""
        if self._fewest is None:
            pins = self.pins
            self._fewest = min((count for i, count in enumerate(self._step.counts) if i not in pins), default=1 << 62)
        return self._fewest

    def fit(self, note: Note) -> None:
        """Fit a known call to the counts of this step, and size its results.

        Raises:
            CannotBeFollowed: it is not.
        """
        if note.pins:
            self._fewest = None
            if not self.is_pinned(note):
                raise CannotBeFollowed(f"{note.name} is given another number of rows or elements than before")
        if note.apart is not None:
            raise CannotBeFollowed(note.apart)
        if note.least and self.fewest < note.least:
            raise CannotBeFollowed(f"{note.name} treats {self.fewest} rows or elements in another way")
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

    def find_sizes(self) -> None:
        """Formulas for the sizes of all results, from the counts that they depend on.

        A call that has no form for other counts (it makes a tensor for each of so many rows) is one for these alone.
        """
        step = self._step
        begin = first((depth for depth, note in enumerate(step.notes) if note.least is None), "new call")
        while begin < len(step.notes):
            number, samples = len(step.counts), self.samples
            rows = [self._specs_with(sample) for sample in samples]
            few = [self._specs_with(self._with_pins([count] * number)) for count in (0, 1)]
            fits = CountFits(Counts(number), samples)
            for depth, note in enumerate(step.notes[begin:], begin):
                reason = self._find_sizes_of(note, rows, few, fits)
                if reason is not None:
                    operands = [step.notes[s.depth] for s in sources_in((note.args, note.kwargs)) if type(s) is Made]
                    counts = set(note.counts).union(*(operand.needs for operand in operands)) - self.pins.keys()
                    if not counts:
                        for later in step.notes[depth:]:
                            later.apart, later.least = reason, 0
                        return
                    note.pins, note.take = {i: step.counts[i] for i in sorted(counts)}, None
                    self._fewest = None
                    begin = depth
                    break
            else:
                return

    def _find_sizes_of(self, note: Note, rows: Sequence[Any], few: Sequence[Any], fits: CountFits) -> str | None:
        """Find formulas for the results of one call. Returns why there are none, or None.

        Args:
            note: the call.
            rows: what the calls of the path make for each sample, and why not all do.
            few: the same for no and for one element.
            fits: finds formulas of samples.
        """
        depth = note.depth
        if failed := next((reason for found, reason in rows if depth >= len(found)), None):
            return failed
        try:
            found = specs_for(note, [specs[depth] for specs, _ in rows], fits)
        except Apart as error:
            return f"what {note.name} gives is as large as the data say in a way of its own ({error})"
        if found is not None:
            note.sizes, note.needs = compiled_specs(found), tuple(sorted(counts_in(found)))
            note.sized_for, note.spare = tuple([self._step.counts[i] for i in note.needs]), {}
        note.least = 0
        for count, (specs, _) in reversed(list(enumerate(few))):
            wanted = [spec.shape for spec in rows[0][0][depth]]
            if note.sizes is not None:
                wanted = [shape for shape, _ in note.sizes(self._with_pins([count] * len(self._step.counts)))]
            if depth >= len(specs) or [spec.shape for spec in specs[depth]] != wanted:
                note.least = count + 1
                break
        return None

    @property
    def pins(self) -> dict[int, int]:
        """The counts that must be equal in other steps on the path."""
        return {i: count for note in self._step.notes for i, count in note.pins.items()}

    def _with_pins(self, counts: Sequence[int]) -> list[int]:
        pins = self.pins
        return [pins.get(i, count) for i, count in enumerate(counts)]

    @property
    def samples(self) -> list[tuple[int, ...]]:
        """The sample counts for graphs of the path."""
        number = len(self._step.counts)
        return [tuple(self._with_pins(sample)) for sample in samples_of(number, range(number))]

    def _specs_with(self, counts: Sequence[int]) -> tuple[list[list[TensorSpec]], str | None]:
        """The specs of results on the path with other counts, up to a call that fails, and why it fails."""
        step = self._step
        recording, found = Recording(step), list[list[TensorSpec]]()
        try:
            with step.beside():
                for note in step.notes:
                    recording.below.sized.begin(told_of(note, counts))
                    with recording.active():
                        recording.values.run(note, step.numbers_of(note))
                    found.append([TensorSpec.of(recording.values.made[source]) for source in note.made])
        except Exception as error:
            note = step.notes[len(found)]
            return found, f"{note.name} is not made for any number of rows or elements ({first_line(error)})"
        finally:
            recording.values.engine.close()
        return found, None

    @property
    def apart(self) -> str | None:
        """Why the path is for the counts of this step alone, or not even for them; None if it is for all."""
        step = self._step
        reason = next((note.apart for note in step.notes if note.apart is not None), None)
        least = max((note.least or 0 for note in step.notes), default=0)
        if reason is None and step.counts and self.fewest < least:
            return f"a call treats {self.fewest} rows or elements in another way"
        return reason
