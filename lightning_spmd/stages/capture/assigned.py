"""Places of Python state in which a step puts something each time: counters, the last loss, a running mean.

    self.calls += 1; self.last = loss.detach(); self.total = 0.9 * self.total + loss.detach()

A first capture notices what changed. The next one takes numbers in these places as inputs of the graph, and what is
there in the end leaves the graph as results of a recorded call, which every run makes again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from lightning_spmd import _private_api as private
from lightning_spmd.errors import CaptureError
from lightning_spmd.ir.guards import PredicateGuard
from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.ir.same_step import difference_at_capture
from lightning_spmd.ir.signature import OutputRole
from lightning_spmd.ir.steps import CapturedStep
from lightning_spmd.ir.tree import leaves
from lightning_spmd.messages import the_step
from lightning_spmd.stages.capture.attribute_spy import AttributeSpy
from lightning_spmd.stages.capture.holders import CANNOT_BE_PUT, Attributes, Entry
from lightning_spmd.stages.capture.inputs import InputTable
from lightning_spmd.stages.capture.later_array import LaterArray, memory_of
from lightning_spmd.stages.capture.log_recorder import LogRecorder
from lightning_spmd.stages.capture.loss_scaling import LossScaling
from lightning_spmd.stages.capture.request import CaptureRequest, Trace
from lightning_spmd.stages.capture.same_state import MISSING, is_simple, same_simple
from lightning_spmd.stages.capture.side_effects import Effect
from lightning_spmd.stages.capture.state_guard import StateGuard
from lightning_spmd.stages.capture.user_code import user_location

_NUMBERS = 9
"""So many steps' numbers are tried."""
_INSIDE = 64
"""More numbers than that in what a step has put somewhere are no inputs: they would take longer to read."""
_LOOKS = 3
"""A statement may lead to another one that the first look did not reach."""
Places = Mapping[str, Entry]


def _decides_by_each_value(step: CapturedStep, predicate: PredicateGuard, path: str) -> bool:
    """Whether each of the numbers that follow would lead to other decisions: there would be a graph a step."""
    names = [entry.name for entry in step.signature.inputs]
    if path in predicate.exact_inputs(names):
        return True
    values: list[Any] = [entry.value for entry in step.signature.inputs]
    position = names.index(path) if path in names else -1
    if position not in predicate.inputs or any(isinstance(values[i], TensorSpec) for i in predicate.inputs):
        return False
    decisions: list[Any] = []
    for number in range(_NUMBERS):
        seen = [values[i] + number if i == position else values[i] for i in predicate.inputs]
        decisions.append(tuple(predicate.program(*seen)))
    return len(set(decisions)) == _NUMBERS


class _KeptMemory(CaptureError):
    """The step keeps memory of the model."""


def captured_with_assignments(
    request: CaptureRequest, first: Trace, trace: Callable[[CaptureRequest], Trace]
) -> CapturedStep | None:
    """The step as a graph whose runs put what the step puts in Python's state; None if that cannot be.

    Args:
        request: of the step.
        first: the look that found what the step changes.
        trace: takes another look.

    Raises:
        CaptureError: what is kept must not be.
    """
    places: dict[str, Entry] = {}
    found = first
    for _ in range(_LOOKS):
        for effect in found.effects:
            if (some := effect.places()) is None:
                return None
            places.update({place.path: place.detached() for place in some})
        numbers = {path: place for path, place in places.items() if type(place.found_again().read()) in (int, float)}
        try:
            plain = found = trace(dataclasses.replace(request, assigned=places))
            if plain.error is None and (inside := _numbers_inside(plain.step, places)):
                with contextlib.suppress(CaptureError):
                    both = {**request.moving, **numbers, **inside}
                    found = trace(dataclasses.replace(request, assigned=places, moving=both))
                    if found.error is None and _does_the_same(found.step, plain.step, {**numbers, **inside}):
                        return found.step
                found = plain
            if numbers and found.error is None:
                found = trace(dataclasses.replace(request, assigned=places, moving={**request.moving, **numbers}))
        except _KeptMemory:
            raise
        except CaptureError:
            return None
        if found.error is None:
            return found.step if found is plain or _does_the_same(found.step, plain.step, numbers) else None
    return None


def _numbers_inside(step: CapturedStep, places: Places) -> dict[str, Entry]:
    """Numbers for which a graph holds in what earlier steps put in these places: a dictionary, a list."""
    state = cast("StateGuard | None", step.guards.state)
    known = {(id(place.holder.subject), place.key) for place in places.values()}
    found = {
        entry.path: entry.detached()
        for entry in (() if state is None else state.entries)
        if type(entry.value) in (int, float)
        and any((id(above.holder.subject), above.key) in known for above in itertools.islice(entry.way(), 1, None))
    }
    return found if len(found) <= _INSIDE else {}


def _does_the_same(step: CapturedStep, plain: CapturedStep, numbers: Places) -> bool:
    """Whether code did with recorded numbers what it does with plain ones, and takes none of them as it is."""
    predicate = step.guards.predicate
    if predicate is not None and any(_decides_by_each_value(step, predicate, path) for path in numbers):
        return False
    return difference_at_capture(step, plain) is None


def refuse_memory(path: str, value: Any, inputs: InputTable) -> None:
    """What is kept past the step must not be memory of the model: there it would change, or be somebody's piece.

    Raises:
        CaptureError: naming the place.
    """
    for where, leaf in leaves(value):
        leaf = memory_of(leaf) if isinstance(leaf, LaterArray) else leaf
        if isinstance(leaf, private.FakeTensor) and private.storage_of(leaf) in inputs.storages():
            raise _KeptMemory(
                f"{the_step()} keeps in {path}{where} memory of a parameter or buffer, which changes with it; keep a "
                "copy (x.detach().clone())",
                user_location(),
            )


def _assigned_anew(request: CaptureRequest, spy: AttributeSpy) -> dict[str, Entry]:
    """Places in which the step has put something: those that are known, and attributes that already were what it puts.

    ``self.kind = "long" if x.shape[1] > 64 else "short"``: a graph for short ones puts it back after a long one.
    """
    places = dict(request.assigned)
    for path, part in request.module.named_modules():
        for owner, name in spy.before:
            if owner != path:
                continue
            before, now = spy.before[owner, name], vars(part).get(name, MISSING)
            if is_simple(before) and is_simple(now) and same_simple(before, now):
                holder = Attributes(part, path or "self")
                holder.root = True
                place = holder.see(name)
                places.setdefault(place.path, place)
    return dict(sorted(places.items(), key=_in_order))


def _in_order(item: tuple[str, Entry]) -> tuple[str, int, str]:
    """The same on all ranks, and of a dictionary its own: items that are new come in the order in which they came."""
    path, place = item
    subject = place.found_again().holder.subject
    position = list(subject).index(place.key) if isinstance(subject, dict) and place.key in subject else 0
    return place.holder.path, position, path


def record(request: CaptureRequest, spy: AttributeSpy, logs: LogRecorder, inputs: InputTable) -> Places:
    """Record what the step has put where, as it ends; gives these places."""
    places = _assigned_anew(request, spy)
    for path, place in places.items():
        value = place.found_again().read()
        if value is not MISSING:
            refuse_memory(path, value, inputs)
            logs.record("", "assign", OutputRole.LOGGED, (path, value), {})
    return places


@contextlib.contextmanager
def unchanged_if_skipped(request: CaptureRequest, scaling: LossScaling) -> Iterator[None]:
    """Around an update that loss scaling may skip: what it puts in Python's state cannot be taken back.

    Raises:
        CaptureError: naming the place.
    """
    before = [(place, place.found_again().read()) for place in request.assigned.values()]
    yield
    if scaling.found is None:
        return
    for place, value in before:
        if place.found_again().read() is not value:
            raise CaptureError(f"{type(request.optimizer).__name__}.step changes {place.path}, skipped or not")


def others(effects: Sequence[Effect], places: Places) -> list[Effect]:
    """Effects that are not what :func:`record` recorded."""
    known = {(id(place.holder.subject), place.key) for place in places.values()}
    return [effect for effect in effects if not _is_known(effect, known)]


def _is_known(effect: Effect, known: set[tuple[int, Any]]) -> bool:
    places = effect.places()
    return places is not None and all((id(p.holder.subject), p.key) in known for p in places)


def writers(places: Places) -> dict[str, Callable[[Any], None]]:
    """What puts a value in each of some places, by path."""
    return {path: writer(place) for path, place in places.items()}


def writer(place: Entry) -> Callable[[Any], None]:
    """Puts a value in a place, wherever that is then."""

    def write(value: Any) -> None:
        try:
            place.found_again().put(value)
        except CANNOT_BE_PUT as error:
            raise CaptureError(f"{place.path} can no longer be assigned, as training_step does ({error})") from error

    return write
