"""Captures a step, in as many looks as it takes: what a first look shows decides what the next one looks for.

* A step may fill something in once (a lazy attribute, a cache of plain values): then a second look, at the state it
  leaves, shows the same graph and no change. What it puts somewhere each time is put there by each run (``assigned``).
  A step that changes Python's state otherwise cannot be one graph.
* Numbers of Python that change often become inputs. Code may treat a recorded number otherwise than a plain one, so
  the step is captured with the plain numbers too, and the two must do the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_spmd.errors import CaptureError
from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.ir.same_step import Difference, difference_at_capture, first_difference
from lightning_spmd.ir.signature import InputRole
from lightning_spmd.ir.steps import CapturedStep
from lightning_spmd.stages.capture.assigned import captured_with_assignments
from lightning_spmd.stages.capture.holders import CANNOT_BE_PUT, Entry
from lightning_spmd.stages.capture.request import CaptureRequest, Trace
from lightning_spmd.stages.capture.state_guard import Change
from lightning_spmd.stages.capture.trace import trace

CHANGES_TO_FOLLOW = 2
"""A number becomes an input when a graph would have to be built for its so-and-so-manieth change."""


def capture(request: CaptureRequest) -> CapturedStep:
    """Capture one variant of the training iteration.

    Raises:
        CaptureError: training_step or the optimizer does something that one graph cannot express.
    """
    first = trace(request)
    if first.error is None:
        return first.step
    settled = _settled(request, first) if all(effect.is_plain for effect in first.effects) else None
    found = settled or captured_with_assignments(request, first, trace)
    if found is None:
        raise first.error
    return found


def _settled(request: CaptureRequest, first: Trace) -> CapturedStep | None:
    """The step after what it fills in once is there, if that is all that it changes, and it does the same then."""
    for effect in first.effects:
        effect.redo()
    settled: CapturedStep | None = None
    try:
        with contextlib.suppress(CaptureError):
            second = trace(request)
            if second.error is None and first_difference(first.step, second.step) is None:
                settled = second.step
    finally:
        if settled is None:
            for effect in reversed(first.effects):
                effect.undo()
    return settled


@dataclass
class MovingNumbers:
    """Numbers of Python's state that changed, by path, and which of them are inputs of graphs from now on.

    Args:
        places: those that are inputs.
        refused: those that cannot be, with the reason.
        earlier: a value that each had before.
    """

    places: dict[str, Entry] = field(default_factory=dict[str, Entry])
    refused: dict[str, str] = field(default_factory=dict[str, str])
    earlier: dict[str, int | float] = field(default_factory=dict[str, "int | float"])
    _changes: dict[str, int] = field(default_factory=dict[str, int])

    def note(self, changes: Iterable[Change]) -> None:
        """A graph did not fit for these changes."""
        for change in changes:
            if change.is_number and change.entry is not None:
                self._changes[change.path] = self._changes.get(change.path, 0) + 1
                self.earlier[change.path] = change.old

    def wanted(self) -> set[str]:
        """Paths of numbers that changed often enough to become inputs."""
        often = {path for path, count in self._changes.items() if count >= CHANGES_TO_FOLLOW}
        return often - self.places.keys() - self.refused.keys()

    def follow(self, paths: Iterable[str], guards: Iterable[Any]) -> None:
        """From now on these are inputs; one of the guards knows where they are."""
        known = list(guards)
        for path in paths:
            place = _find(path, known)
            if place is None:
                self.refused[path] = "no graph on this rank reads it"
            else:
                self.places[path] = place.detached()

    def of(self, step: CapturedStep) -> dict[str, Entry]:
        """The places of those that are inputs of a step; what a step assigns itself is found anew by each capture."""
        return {path: place for path, place in self.places.items() if path in step.host_values}

    def refuse(self, path: str, reason: str) -> None:
        """Never make an input of it."""
        self.places.pop(path, None)
        self.refused[path] = reason


def _find(path: str, guards: Iterable[Any]) -> Entry | None:
    for guard in guards:
        for entry in guard.entries:
            if entry.path == path:
                return entry
    return None


def capture_following(request: CaptureRequest, numbers: MovingNumbers) -> CapturedStep:
    """Capture a step with moving numbers as inputs; numbers with which that cannot be done are refused.

    Raises:
        CaptureError: as :func:`capture`.
    """
    plain = capture(request)
    if not numbers.places:
        return plain
    following, reason = _following(request, numbers.places, numbers, plain)
    if following is not None:
        return following
    for path, place in list(numbers.places.items()):  # which of them?
        alone, why = _following(request, {path: place}, numbers, plain)
        if alone is None:
            numbers.refuse(path, why)
    following, reason = _following(request, numbers.places, numbers, plain) if numbers.places else (plain, "")
    if following is None:
        for path in list(numbers.places):
            numbers.refuse(path, reason)
    return following or plain


def _following(
    request: CaptureRequest, moving: Mapping[str, Entry], numbers: MovingNumbers, plain: CapturedStep
) -> tuple[CapturedStep | None, str]:
    """The step with these numbers as inputs, or why not."""
    try:
        found = capture(dataclasses.replace(request, moving=moving))
    except CaptureError as error:
        return None, str(error)
    predicate = found.guards.predicate
    names = [entry.name for entry in found.signature.inputs]
    if predicate is not None and not moving.keys().isdisjoint(predicate.exact_inputs(names)):
        return None, "the code takes its very value"
    difference = difference_at_capture(found, plain)
    if difference is None:
        difference = _difference_elsewhere(request, found, moving, numbers.earlier)
    return (found, "") if difference is None else (None, f"the code does more with it than arithmetic:\n{difference}")


def _difference_elsewhere(
    request: CaptureRequest, found: CapturedStep, moving: Mapping[str, Entry], earlier: Mapping[str, int | float]
) -> Difference | None:
    """How the step differs from one that is captured with earlier values, where these lead to the same decisions.

    An operator may have made other numbers of a recorded one, which are constants then: ``1 - p`` in a dropout.
    """
    values = [
        earlier.get(entry.name, entry.value) if entry.role is InputRole.HOST_VALUE else entry.value
        for entry in found.signature.inputs
    ]
    predicate = found.guards.predicate
    if predicate is not None:
        if any(isinstance(values[position], TensorSpec) for position in predicate.inputs):
            return None  # the first look again, before the graph's second use, tells
        if predicate.failure(values) is not None:
            return None
    with contextlib.ExitStack() as stack:
        for path, place in moving.items():
            stack.enter_context(_holding(place, earlier[path]))
        try:
            plain = capture(request)
        except CaptureError:
            return None
    return difference_at_capture(found, plain, values)


@contextlib.contextmanager
def _holding(place: Entry, value: int | float) -> Iterator[None]:
    """A place has another value for a while."""
    outermost = place.found_again().outermost()
    before = outermost.read()
    with contextlib.suppress(*CANNOT_BE_PUT):  # a property of another place that moves
        place.put(value)
    try:
        yield
    finally:
        with contextlib.suppress(*CANNOT_BE_PUT):
            outermost.put(before)
        place.found_again()
