"""What a captured step did to Python state: undone, and a reason not to be a graph.

A statement such as ``self.tracker.count += 1`` would run once, at capture, and never again.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from types import CodeType, FunctionType
from typing import Any

from torch import Tensor, nn
from torchmetrics import Metric

from lightning_spmd import _private_api as private
from lightning_spmd.errors import CaptureError
from lightning_spmd.messages import batch_hook, the_step
from lightning_spmd.stages.capture.code_facts import line_that_changes
from lightning_spmd.stages.capture.containers import Content
from lightning_spmd.stages.capture.holders import CANNOT_BE_PUT, Cell, Entry, Holder
from lightning_spmd.stages.capture.kinds import BOOKKEEPING, TORCH_INTERNALS, attributes_of, slots_of
from lightning_spmd.stages.capture.same_state import MISSING, is_simple, same_simple
from lightning_spmd.stages.capture.sightings import Sightings

_DEEPEST = 8
_DRAWS = ("random", "randint", "randrange", "rand", "randn", "uniform", "choice", "shuffle", "permutation", "normal")


# ---------------------------------------------------------------------- what frames could see
class Effect:
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
    def is_plain(self) -> bool:
        """Whether what is there now are numbers, texts, and objects and containers of such, which could stay."""
        return not isinstance(self.holder, Content) and all(_is_plain(value, 0) for _, value in self._after)

    def undo(self) -> None:
        """Put back what was there."""
        self._put(self._before)

    def redo(self) -> None:
        """Put there what the step had put there."""
        self._put(self._after)

    def _put(self, items: list[tuple[Any, Any]]) -> None:
        with contextlib.suppress(*CANNOT_BE_PUT):
            if self.entry is None:
                self.holder.refill(items)
            else:
                self.holder.put(*items[0])

    def error(self, codes: Sequence[CodeType]) -> CaptureError:
        """What tells the user."""
        place = self.holder.place if self.entry is None else self.entry
        return CaptureError(f"{the_step()} changes {self.path}; {_advice()}", _line(codes, place))


def _advice() -> str:
    return (
        "that statement would run once, at capture, and never again. Register tensors with register_buffer, or do it "
        f"in {batch_hook('end')}"
    )


def _is_plain(value: Any, depth: int) -> bool:
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
    return inside is not None and all(_is_plain(item, depth + 1) for item in inside)


def undo_effects(sightings: Sightings) -> list[Effect]:
    """Put everything that was met back as it was; gives what had been changed, in the order in which it was met."""
    found: list[Effect] = []
    for holder in reversed(sightings.holders):
        effects = list(_effects_on(holder, sightings.substitutes)) if holder.lasts else []
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
            yield Effect(holder, None, holder.path)
            return
    for entry in entries:
        now, before = holder.peek(holder.subject, entry.key), substitutes.get(entry, entry.value)
        same = now == before if isinstance(holder, Content) else is_simple(before) and same_simple(before, now)
        counts = holder.guarded or isinstance(holder, Content)
        if now is not before and not same and counts and not is_of_capture(before):
            yield Effect(holder, entry, entry.path)


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


# ---------------------------------------------------------------------- what belongs to the module
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


@contextlib.contextmanager
def module_unchanged(module: nn.Module, codes: Sequence[CodeType]) -> Iterator[None]:
    """Restore what the traced code did to the module and to random numbers; complain if it went well otherwise.

    Raises:
        CaptureError: if Python's or NumPy's random numbers were drawn, an attribute was assigned or a container on a
            module was changed.
    """
    before = [(path, part, dict(part.__dict__), _containers(part)) for path, part in module.named_modules()]
    python_random, numpy_random = random.getstate(), _numpy_state()
    try:
        yield
        if random.getstate() != python_random or not _same_numpy_state(numpy_random):
            raise CaptureError(
                f"{the_step()} draws from Python's `random` or NumPy: the graph would repeat one draw for ever; draw "
                "with torch (torch.rand, torch.randint), or in on_before_batch_transfer",
                next((line for name in _DRAWS if (line := line_that_changes(codes, name)) is not None), None),
            )
        _complain_about_changes(before, codes)
    finally:
        random.setstate(python_random)
        if numpy_random is not None:
            sys.modules["numpy"].random.set_state(numpy_random)
        for _, part, attributes, containers in before:
            _restore(part, attributes, containers)


def _containers(part: nn.Module) -> dict[str, Any]:
    own = not type(part).__module__.startswith("torch.")  # users name lists _outputs, torch keeps its own that way
    return {
        k: v.copy()
        for k, v in part.__dict__.items()
        if type(v) in (list, dict, set) and (not k.startswith("_") or (own and type(v) is list))
    }


def _complain_about_changes(
    before: list[tuple[str, nn.Module, dict[str, Any], dict[str, Any]]], codes: Sequence[CodeType]
) -> None:
    for path, part, attributes, containers in before:
        if isinstance(part, Metric) or type(part).__module__.startswith("torch."):  # LSTM caches its list of weights
            continue
        owner = f"{path}." if path else "self."
        for name, value in part.__dict__.items():
            if name in BOOKKEEPING or name in TORCH_INTERNALS:
                continue
            old = attributes.get(name)
            changed = value is not old and not (is_simple(value) and is_simple(old) and same_simple(old, value))
            if changed or (name in containers and len(value) != len(containers[name])):
                line = line_that_changes(codes, name)
                raise CaptureError(f"{the_step()} changes {owner}{name}; {_advice()}", line)


def _restore(part: nn.Module, attributes: dict[str, Any], containers: dict[str, Any]) -> None:
    for name in [n for n in part.__dict__ if n not in attributes]:
        del part.__dict__[name]
    for name, value in attributes.items():
        if part.__dict__.get(name) is not value:
            part.__dict__[name] = value
    for name, content in containers.items():
        container = part.__dict__[name]
        if isinstance(container, list):
            container[:] = content
        else:
            container.clear()
            container.update(content)


def _numpy_state() -> Any:
    numpy = sys.modules.get("numpy")
    return None if numpy is None else numpy.random.get_state()


def _same_numpy_state(before: Any) -> bool:
    if before is None:
        return True
    now = sys.modules["numpy"].random.get_state()
    return bool(now[2] == before[2] and (now[1] == before[1]).all())
