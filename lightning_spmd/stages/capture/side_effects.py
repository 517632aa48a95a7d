"""What a captured step did to Python state: undone, and a reason not to be a graph.

A statement such as ``self.tracker.count += 1`` would run once, at capture, and never again.
"""

from __future__ import annotations

import abc
import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from types import CodeType, FunctionType
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from lightning_spmd import _private_api as private
from lightning_spmd.errors import CaptureError
from lightning_spmd.messages import batch_hook, the_step
from lightning_spmd.stages.capture.code_facts import line_that_changes
from lightning_spmd.stages.capture.containers import Content, Entries, Items
from lightning_spmd.stages.capture.holders import (
    CANNOT_BE_PUT,
    Attributes,
    Cell,
    ClassAttributes,
    Entry,
    Globals,
    Holder,
)
from lightning_spmd.stages.capture.kinds import attributes_of, slots_of
from lightning_spmd.stages.capture.same_state import MISSING, is_simple, same_simple
from lightning_spmd.stages.capture.sightings import Sightings

_DEEPEST = 8
_ASSIGNED = (Attributes, Globals, ClassAttributes, Cell, Entries, Items)
"""In what a statement puts something."""


# ---------------------------------------------------------------------- what frames could see
class Effect(abc.ABC):
    """One change that the step made; undone."""

    @property
    @abc.abstractmethod
    def is_plain(self) -> bool:
        """Whether what the step left could stay: it holds no tensor of the trace."""

    @abc.abstractmethod
    def undo(self) -> None:
        """Put back what was there."""

    @abc.abstractmethod
    def redo(self) -> None:
        """Put there what the step had put there."""

    @abc.abstractmethod
    def places(self) -> list[Entry] | None:
        """Where an assignment does what the step did; None: it did something else."""

    @abc.abstractmethod
    def error(self, codes: Sequence[CodeType]) -> CaptureError:
        """What tells the user."""


class SeenEffect(Effect):
    """One change that the step made to what its frames could see.

    Args:
        holder: of what changed.
        entry: what of it; None: its items.
        path: readable name.
    """

    def __init__(self, holder: Holder, entry: Entry | None, path: str) -> None:
        self.holder, self.entry, self.path = holder, entry, path
        self._before, self._after = self._items_before(), self._items_after()

    def _items_before(self) -> list[tuple[Any, Any]]:
        entries = self.holder.entries.values() if self.entry is None else [self.entry]
        return [(entry.key, entry.value) for entry in entries]

    def _items_after(self) -> list[tuple[Any, Any]]:
        holder = self.holder
        keys = holder.keys(holder.subject) if self.entry is None else [self.entry.key]
        return [(key, holder.peek(holder.subject, key)) for key in keys]

    @property
    @override
    def is_plain(self) -> bool:
        return not isinstance(self.holder, Content) and all(is_plain(value) for _, value in self._after)

    @override
    def undo(self) -> None:
        self._put(self._before)

    @override
    def redo(self) -> None:
        self._put(self._after)

    @override
    def places(self) -> list[Entry] | None:
        holder = self.holder
        if not isinstance(holder, _ASSIGNED) or isinstance(holder.subject, tuple):
            return None
        if self.entry is not None:
            return [self.entry]
        known = len(self._before)
        if not isinstance(holder, Entries) or self._after[:known] != self._before:
            return None
        if not all(is_simple(key) for key, _ in self._after[known:]):
            return None  # a key that is another one in the next step: a recorded number, an object
        return [Entry(holder, key, MISSING) for key, _ in self._after[known:]]

    def _put(self, items: list[tuple[Any, Any]]) -> None:
        with contextlib.suppress(*CANNOT_BE_PUT):
            if self.entry is None:
                self.holder.refill(items)
            else:
                self.holder.put(*items[0])

    @override
    def error(self, codes: Sequence[CodeType]) -> CaptureError:
        place = self.holder.place if self.entry is None else self.entry
        return CaptureError(f"{the_step()} changes {self.path}; {advice()}", _line(codes, place))


def advice() -> str:
    """What to do about a change."""
    return (
        "that statement would run once, at capture, and never again. Register tensors with register_buffer, or do it "
        f"in {batch_hook('end')}"
    )


def is_plain(value: Any, depth: int = 0) -> bool:
    """Whether it is a number, a text, or an object or container of such."""
    kind = type(value)
    if value is MISSING or is_simple(value):
        return True
    if depth > _DEEPEST or issubclass(kind, (Tensor, nn.Module)):
        return False
    if issubclass(kind, dict):
        inside = [*dict.keys(value), *dict.values(value)]
    elif issubclass(kind, (list, tuple, set, deque)):
        inside = list(value)
    else:
        inside = None if (attributes := attributes_of(value)) is None or slots_of(kind) else list(attributes.values())
    return inside is not None and all(is_plain(item, depth + 1) for item in inside)


def undo_effects(sightings: Sightings) -> list[Effect]:
    """Put everything that was met back as it was; gives what had been changed, in the order in which it was met."""
    found: list[Effect] = []
    for holder in reversed(sightings.holders):
        effects = list(_effects_on(holder, sightings.substitutes)) if holder.lasts else []
        if effects and sightings.gifts.are_gone(holder):
            continue
        for effect in effects:
            effect.undo()
        found += reversed(effects)
    for entry in reversed(sightings.substitutes):
        entry.put(entry.value)
    for cached in sightings.caches:
        cached.cache_clear()
    return found[::-1]


def _effects_on(holder: Holder, substitutes: dict[Entry, Any]) -> Iterator[Effect]:
    entries = list(holder.entries.values())
    if holder.complete and not isinstance(holder.subject, tuple):
        keys = holder.keys(holder.subject)
        pairs = zip(keys, entries, strict=False)
        if len(keys) != len(entries) or not all(key is e.key or key == e.key for key, e in pairs):
            yield SeenEffect(holder, None, holder.path)
            return
    for entry in entries:
        now, before = holder.peek(holder.subject, entry.key), substitutes.get(entry, entry.value)
        same = now == before if isinstance(holder, Content) else is_simple(before) and same_simple(before, now)
        counts = holder.guarded or isinstance(holder, Content)
        if now is not before and not same and counts and not is_of_capture(before):
            yield SeenEffect(holder, entry, entry.path)


def is_of_capture(value: Any) -> bool:
    """Whether capture itself put it there for a while: a list that takes notes, ``math.cos`` of recorded numbers."""
    owner = value if isinstance(value, FunctionType) else type(value)
    return value is not MISSING and str(owner.__module__).startswith("lightning_spmd.stages.")


def _line(codes: Sequence[CodeType], place: Entry | None) -> str | None:
    """Where a name on the way to the entry is assigned, or mentioned."""
    names: list[str] = []
    for entry in () if place is None else place.way():
        cell = isinstance(entry.holder, Cell)
        names += [entry.holder.path.partition(" ")[0]] if cell else [entry.key] if isinstance(entry.key, str) else []
    return next((line for name in names if (line := line_that_changes(codes, name)) is not None), None)


def complain_about_new_tensors(module: nn.Module, known: set[str]) -> None:
    """Raise if the traced code registered parameters or buffers.

    Raises:
        CaptureError: naming them.
    """
    now = {name for name, (tensors, key) in private.tensor_slots(module).items() if tensors[key] is not None}
    added = sorted(now - known)
    if added:
        raise CaptureError(
            f"{the_step()} registers {', '.join(added)}: that would happen once, at capture; register parameters and "
            "buffers in __init__ or configure_model"
        )
