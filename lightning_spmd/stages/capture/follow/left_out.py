"""Calls of one rank of several that do not belong to the ranks' step: they run behind it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_spmd import _private_api as private
from lightning_spmd.stages.capture.follow.notes import Made, Note, Outside, Place, Source
from lightning_spmd.stages.capture.follow.step_state import StepState
from lightning_spmd.stages.capture.follow.values import Values


class _Calls(NamedTuple):
    """Calls of one rank that do not belong to its step.

    Args:
        notes: the calls.
        outside: the tensors that the step did not make and these calls alone met.
        numbers: of all calls of the step that are others in other steps.
        now: the parameters and buffers among these tensors, by number, as they were when Python was done.
    """

    notes: list[Note]
    outside: list[Tensor]
    numbers: dict[tuple[int, Place], Any]
    now: dict[int, Tensor]


class LeftOut:
    """The calls of one step that were left out.

    Args:
        step: the step.
    """

    def __init__(self, step: StepState) -> None:
        self._step = step
        self._calls: _Calls | None = None

    def is_open_for(self, note: Note) -> bool:
        """Whether a call holds for all sizes of its path."""
        return self._step.tree is None or note.is_fitted

    def leave(self, calls: int) -> None:
        """Leave out the calls after the first ones of this number; they run after the step."""
        step = self._step
        own, before = step.notes[calls:], step.path
        if not own:
            return
        met = {number: kind for note in own for number, kind in note.met.items()}
        known, numbers = min(met, default=len(step.outside)), (step.known_numbers or {})
        with step.beside(), torch.no_grad():  # the step changes parameters and buffers
            now = {n: step.outside[n].detach().clone() for n, kind in met.items() if kind.name is not None}
        self._calls = _Calls(own, step.outside[known:], numbers, now)
        step.cut(calls)
        step.outside = step.outside[:known]
        step.known_numbers = {key: value for key, value in numbers.items() if key[0] < calls}
        if step.tree is not None:
            step.tree.shortened(step.path, before)

    def perform(self, told: Mapping[Source, Tensor]) -> dict[Made, Tensor]:
        """Perform the calls that were left out, and put them back into the step. Returns their results.

        Args:
            told: values of what the step gave.
        """
        step = self._step
        own = self._calls
        if own is None:
            return {}
        self.put_back()

        def of_outside(source: Source) -> Tensor:
            if source in told:
                return told[source]
            number = source.number if type(source) is Outside else -1
            return own.now[number] if number in own.now else step.tensor_of(source).detach()  # type: ignore[arg-type]

        values = Values(of_outside)
        values.made.update({source: value for source, value in told.items() if type(source) is Made})
        with step.beside(), private.disable_dispatch_modes(), torch.no_grad():
            for note in own.notes:
                values.run(note, step.numbers_of(note))
        return values.made

    def put_back(self) -> None:
        """Put calls that were left out back into the step."""
        step = self._step
        own, self._calls = self._calls, None
        if own is not None:
            step.notes, step.outside = [*step.notes, *own.notes], [*step.outside, *own.outside]
            step.known_numbers, step.here = own.numbers, own.notes[-1]
