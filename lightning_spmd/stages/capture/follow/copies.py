"""Values for Python, computed on copies of what the step works on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_spmd import _private_api as private
from lightning_spmd.ir.first import first
from lightning_spmd.ir.random_states import TorchRandomState
from lightning_spmd.ir.shared_memory import shared
from lightning_spmd.stages.capture.follow import placeholders
from lightning_spmd.stages.capture.follow.notes import Given, Made, Outside, Source, mapped
from lightning_spmd.stages.capture.follow.own_generator import OwnGenerator
from lightning_spmd.stages.capture.follow.recorder import Recorder, first_line
from lightning_spmd.stages.capture.follow.step_state import CannotBeFollowed, StepState
from lightning_spmd.stages.capture.follow.values import Values


class Copies:
    """The calls of one step on copies, which they may write, for values that Python reads before a graph gives them.

    Args:
        step: the step.
        recorder: of its calls.
        generator: torch's, whose state a read notes.
    """

    def __init__(self, step: StepState, recorder: Recorder, generator: OwnGenerator) -> None:
        self._step, self._recorder, self._generator = step, recorder, generator
        self._values: Values | None = None
        self._copies: dict[Source, Tensor] = {}
        self._generators: TorchRandomState | None = None

    def with_values(self, value: Any, given: Sequence[Any] | None, *, writable: bool = False) -> Any:
        """A structure with the values of tensors in place of placeholders, those that ``on_read`` gave or of copies."""
        told = None if given is None else iter(given)
        values = self._values_so_far() if told is None else None
        self._generator.look()

        def leaf(item: Any) -> Any:
            source = self._step.sources.get(id(item)) if isinstance(item, Tensor) else None
            if source is None:
                return item
            found = (first(told, "value") if values is None else values.of(source)).detach()  # type: ignore[arg-type]
            if writable or (values is None and found.numel() > 1):  # the graph goes on with its own
                found = found.clone()
            trained = self._recorder.is_trained(source) if type(source) is Made else item.requires_grad
            found = found.requires_grad_() if trained else found
            return found.clone() if trained and writable else found

        with self._step.beside():
            return mapped(leaf, value)

    def forget(self) -> None:
        """Release the copies, and put torch's generators back to where they were before the calls ran on them."""
        if self._values is not None:
            self._values.engine.close()
        if self._generators is not None:
            self._generators.restore()
        self._values = self._generators = None
        self._copies.clear()

    def _values_so_far(self) -> Values:
        step = self._step
        if step.draws_elsewhere and any(note.draws for note in step.notes):
            raise CannotBeFollowed("a value is read behind random numbers, of which each rank draws its part")
        step.on_values()
        if self._values is None:
            with step.beside(), private.disable_dispatch_modes():
                self._values, self._generators = Values(self._copied), TorchRandomState()
            self._values.engine.scaled = step.scaled
            if step.by_hand is not None:
                self._values.world = step.by_hand.on_copies(self._values)
        values = self._values
        try:
            with step.beside(), private.disable_dispatch_modes(), values.kept_casts(step.block):
                for note in step.notes[values.done :]:
                    values.run(note, step.numbers_of(note))
        except Exception as error:
            name = step.notes[values.done].name
            raise CannotBeFollowed(f"{name} cannot be run for its value ({first_line(error)})") from error
        numbers = {
            n for note in step.notes for met, k in note.met.items() if k.shares is not None for n in (met, k.shares)
        }
        one_memory = {int(name) for pair in shared((str(n), step.outside[n]) for n in numbers) for name, _ in pair}
        copies = [self._copies[source] for source in map(Outside, one_memory) if source in self._copies]
        if any(private.version_of(copy) > 0 for copy in copies):
            raise CannotBeFollowed("a value is read behind a write into memory that two tensors share")
        return values

    def _copied(self, source: Given | Outside) -> Tensor:
        step = self._step
        if source not in self._copies:
            live = step.tensor_of(source)
            with torch.no_grad():
                copy = live.detach().clone()
            trained = live.requires_grad if step.by_hand is None else step.by_hand.trained_at_first(live)
            place = placeholders.place_of_gone(live)
            copy = copy.requires_grad_(trained) if place is None else placeholders.without_history(copy, place)
            self._copies[source] = copy
        return self._copies[source]
