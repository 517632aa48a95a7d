"""Values of a step that Python has been told before there is a graph: what follows from them takes no other graph.

A loop over the rows of a result (``for label in scores.argmax(1)``) reads each of them. The graph of the step's
beginning that gives the first one gives the small tensors around it as well, and the others are looked up.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_spmd.stages.capture.follow.engine import EngineCall
from lightning_spmd.stages.capture.follow.notes import Made, Note, Outside, Source, sources_in
from lightning_spmd.stages.capture.follow.step import Step
from lightning_spmd.stages.capture.follow.values import Values
from lightning_spmd.stages.capture.follow.worlds import CallByHand

_SMALL = 4096
"""Elements of a tensor that is asked for with what Python reads of it."""
_MOST_CALLS = 16
"""Calls from a known value to one that is read."""


class ToldValues:
    """The values that all ranks know of a step.

    Args:
        step: the step.
    """

    def __init__(self, step: Step) -> None:
        self._step = step
        self._known: dict[Source, Tensor] = {}

    def wanted(self) -> list[Source]:
        """What to ask for at a read: what Python reads, then small tensors from which it may read next."""
        *notes, read = self._step.notes
        own = sources_in((read.args, read.kwargs))
        around: list[Source] = []
        for source in own if self._can_tell() else ():
            if type(source) is Made:
                note = notes[source.depth]
                around += [*note.made, *sources_in((note.args, note.kwargs))]
        more = [s for s in dict.fromkeys(around) if s not in own and self._is_unwritten(s) and self._is_small(s)]
        return [*own, *more]

    def keep(self, sources: Sequence[Source], values: Sequence[Tensor]) -> Sequence[Tensor]:
        """Remember values; gives those that Python reads now."""
        read = self._step.notes[-1]
        self._known.update(zip(sources, values, strict=True))
        return values[: len(sources_in((read.args, read.kwargs)))]

    def now(self) -> Sequence[Tensor] | None:
        """What Python reads now, if it follows exactly from known values: parts of them, and whole numbers."""
        *notes, read = self._step.notes
        if not self._known or not self._can_tell():
            return None
        own = sources_in((read.args, read.kwargs))
        calls: dict[int, Note] = {}
        left: list[Source] = list(own)
        while left:
            source = left.pop()
            if not self._is_unwritten(source):
                return None
            if source in self._known or (type(source) is Made and source.depth in calls):
                continue
            if type(source) is not Made or len(calls) == _MOST_CALLS or not self._is_exact(notes[source.depth]):
                return None
            calls[source.depth] = note = notes[source.depth]
            left += sources_in((note.args, note.kwargs))
        values = Values(lambda source: self._known[source])
        values.made.update({source: value for source, value in self._known.items() if type(source) is Made})
        with self._step.beside(), torch.no_grad():
            for depth in sorted(calls):
                numbers = self._step.numbers_between(depth, depth + 1)
                values.run(calls[depth], {place: number for (_, place), number in numbers.items()})
        return [values.of(source) for source in own]  # type: ignore[arg-type]

    def _can_tell(self) -> bool:
        """Whether the step has only plain calls so far; others may change tensors that no note names."""
        notes = self._step.notes
        return not self._step.has_data_counts and not any(isinstance(n.func, (EngineCall, CallByHand)) for n in notes)

    def _is_unwritten(self, source: Source) -> bool:
        root = self._step.notes[source.depth].roots[source.index][0] if type(source) is Made else source
        return not any(root in note.writes for note in self._step.notes)

    def _is_small(self, source: Source) -> bool:
        if type(source) is Outside:
            return False
        with self._step.beside():
            return self._step.tensor_now(source).numel() <= _SMALL

    def _is_exact(self, note: Note) -> bool:
        """Whether a call takes parts of its operands, or makes whole numbers or truths of them."""
        if note.reads or note.draws or note.writes:
            return False
        parts = [root != made for made, (root, _) in zip(note.made, note.roots, strict=True)]
        return all(
            is_part or not (s.dtype.is_floating_point or s.dtype.is_complex)
            for is_part, s in zip(parts, note.specs, strict=True)
        )
