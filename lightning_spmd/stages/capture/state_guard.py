"""Whether the Python values that a captured step saw are what they were: thousands of them in microseconds.

Most values are the very objects that were there at capture, so the first question is identity alone, asked for all
places in a few calls of C functions. Only what is another object now is looked at: an equal number, a tensor of the
same kind, a dictionary with the same contents are taken over, anything else is a change with a name.
"""

from __future__ import annotations

import functools
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

from torch import Tensor

from lightning_spmd.stages.capture.containers import Content, Entries
from lightning_spmd.stages.capture.holders import Attributes, ClassAttributes, Entry, Globals, Holder, plain_dict_of
from lightning_spmd.stages.capture.same_state import MISSING, is_simple, kind_of_tensor, same_simple

Read = Callable[[], Any]


@dataclass(frozen=True)
class Change:
    """A place whose value is not what the graph was captured with.

    Args:
        path: readable name of the place.
        old: what was there.
        new: what is there now.
        entry: the place; None where a container got other items.
    """

    path: str
    old: Any
    new: Any
    entry: Entry | None = None

    @property
    def is_number(self) -> bool:
        """Whether one number took the place of another of its type."""
        return self.entry is not None and type(self.old) is type(self.new) and type(self.old) in (int, float)

    def __str__(self) -> str:
        old, new = _short(self.old), _short(self.new)
        if isinstance(self.old, Tensor) and isinstance(self.new, Tensor) and old == new:
            return f"{self.path} changed: {_unlike(self.old, self.new)}"
        return f"{self.path} changed from {old} to {new}"


class StateGuard:
    """The places that one graph depends on, and what they held.

    Args:
        entries: in the order in which they were met.
        containers: those that count as a whole, whose entries are among ``entries``.
        aliases: places that must go on holding one tensor.
        free: places that may hold any number of their type; it is an input of the graph.
        unseen: paths of what cannot be compared as a whole, with the reason.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        containers: Sequence[Holder] = (),
        aliases: Iterable[Entry] = (),
        free: Iterable[Entry] = (),
        unseen: Mapping[str, str] | None = None,
    ) -> None:
        self.unseen: Mapping[str, str] = dict(unseen or {})
        self.entries = list(entries)
        self._number = {entry: i for i, entry in enumerate(self.entries)}
        self._aliases = set(aliases)
        self._free = {self._number[entry] for entry in free}
        self._expected = [entry.value for entry in self.entries]
        self._mine: dict[Holder, list[int]] = {holder: [] for holder in containers}
        for entry, number in self._number.items():
            self._mine.setdefault(entry.holder, []).append(number)
        self._sort()
        self._kinds = _kinds(self._tensors)

    def _sort(self) -> None:
        """Prepare the questions: which place is asked how."""
        self._moved = False
        self._in_dicts: list[int] = []
        self._by_calls: list[int] = []
        self._all_of: list[tuple[Callable[[], bool], list[int]]] = []
        self._contents: list[int] = []
        self._empty: list[Any] = []
        for holder, numbers in self._mine.items():
            if isinstance(holder, Content):
                self._contents += numbers
            elif holder.complete and not numbers and type(holder.subject) in (dict, list, set, OrderedDict):
                self._empty.append(holder.subject)
            elif holder.complete:
                self._all_of.append((self._prepared(holder, numbers), numbers))
            elif isinstance(holder, (Attributes, Globals)):
                self._in_dicts += [n for n in numbers if n not in self._free]
            else:
                self._by_calls += [n for n in numbers if n not in self._free]
        self._types = [
            (n, _prepared_call(self.entries[n]), type(self._expected[n]))
            for n in self._free
            if not self.entries[n].holder.complete
        ]
        self._dicts = [plain_dict_of(self.entries[n].holder) for n in self._in_dicts]
        self._keys = [self.entries[n].key for n in self._in_dicts]
        self._calls = [_prepared_call(self.entries[n]) for n in self._by_calls]
        tensors = [(n, v) for n, v in enumerate(self._expected) if isinstance(v, Tensor)]
        self._tensors = [tensor for _, tensor in tensors]
        self._tensor_numbers = [n for n, _ in tensors]
        self._in_dicts_expected = [self._expected[n] for n in self._in_dicts]
        self._by_calls_expected = [self._expected[n] for n in self._by_calls]

    def _prepared(self, holder: Holder, numbers: list[int]) -> Callable[[], bool]:
        """Whether a container holds the very objects that it did."""
        subject, values = holder.subject, [self._expected[n] for n in numbers]
        keys, count = [self.entries[n].key for n in numbers], len(numbers)
        if isinstance(subject, tuple):
            return lambda: True
        if not self._free.isdisjoint(numbers):
            return lambda: False  # looked at one by one
        if isinstance(holder, Entries):
            kind = holder.plain_kind(subject)
            size, get_keys, get_values = kind.__len__, kind.keys, kind.values
            return lambda: (
                size(subject) == count
                and all(map(operator.is_, get_values(subject), values))
                and all(map(operator.is_, get_keys(subject), keys))
            )
        kind = holder.plain_kind(subject)
        size, items = kind.__len__, kind.__iter__
        return lambda: size(subject) == count and all(map(operator.is_, items(subject), values))

    # ------------------------------------------------------------------ asking
    def failure(self) -> str | None:
        """The first change, in words, or None."""
        changes = self.changes()
        return str(changes[0]) if changes else None

    def changes(self) -> list[Change]:
        """What is not as it was, after taking over what is another object and yet the same."""
        suspects = self._suspects()
        if not suspects:
            return self._other_kinds()
        found = [change for number in sorted(n for n in suspects if n >= 0) for change in self._examine(number)]
        found += [change for holder, numbers in self._mine.items() if not numbers for change in self._other(holder)]
        if self._moved:
            self._sort()
        return found or self._other_kinds()

    def _other_kinds(self) -> list[Change]:
        """Tensors that are the very objects that they were and yet have another shape, or require gradients now."""
        kinds = _kinds(self._tensors)
        if kinds == self._kinds:
            return []
        pairs = zip(self._tensor_numbers, zip(*self._kinds, strict=True), zip(*kinds, strict=True), strict=True)
        return [Change(self.entries[n].path, _Kind(old), _Kind(new)) for n, old, new in pairs if old != new]

    def _suspects(self) -> list[int]:
        """Numbers of entries, parents before children; -1 for an empty container."""
        found: list[int] = []
        now = list(map(dict.get, self._dicts, self._keys, repeat(MISSING)))
        if not all(map(operator.is_, now, self._in_dicts_expected)):
            found += [n for n, a, b in zip(self._in_dicts, now, self._in_dicts_expected, strict=True) if a is not b]
        now = [call() for call in self._calls]
        if not all(map(operator.is_, now, self._by_calls_expected)):
            found += [n for n, a, b in zip(self._by_calls, now, self._by_calls_expected, strict=True) if a is not b]
        if any(self._empty):
            found.append(-1)
        for unchanged, numbers in self._all_of:
            if not unchanged():
                found += numbers or [-1]
        found += [n for n, call, kind in self._types if type(call()) is not kind]
        for number in self._contents:
            if self.entries[number].holder.peek(self.entries[number].holder.subject, "") != self._expected[number]:
                found.append(number)
        return found

    def _examine(self, number: int) -> list[Change]:
        """Look at one place: take the new value over if it is the same, or say what changed."""
        entry = self.entries[number]
        holder = entry.holder
        if holder.complete and number == self._mine[holder][0] and (changes := self._other(holder)):
            return changes
        new = holder.peek(holder.subject, entry.key)
        changes = self._differences(entry, new)
        if not changes and new is not self._expected[number]:
            self._take_over(entry, new)
        return changes

    def _other(self, holder: Holder) -> list[Change]:
        """Whether a container has other items than it had."""
        if self._same_keys(holder, holder.subject):
            return []
        before = [self.entries[n].key for n in self._mine[holder]]
        return [Change(holder.path, _Items(before), _Items(holder.keys(holder.subject)))]

    def _differences(self, entry: Entry, new: Any) -> list[Change]:
        """What keeps the graph from being used with ``new`` in that place, as deep inside as can be told."""
        if self._resembles(entry, new):
            return []
        old, inside = self._old(entry), self._inside(entry)
        if type(old) is type(new) and all(not h.shared and self._same_keys(h, new) for h in inside):
            pairs = ((inner, holder.peek(new, inner.key)) for holder in inside for inner in self._watched(holder))
            if deeper := [change for inner, value in pairs for change in self._differences(inner, value)]:
                return deeper
        return [Change(entry.path, old, new, entry)]

    def _old(self, entry: Entry) -> Any:
        number = self._number.get(entry)
        return entry.value if number is None else self._expected[number]

    def _inside(self, entry: Entry) -> list[Holder]:
        return [holder for holder in entry.inside if holder in self._mine or not holder.guarded]

    def _watched(self, holder: Holder) -> list[Entry]:
        numbers = self._mine.get(holder)
        return list(holder.entries.values()) if numbers is None else [self.entries[n] for n in numbers]

    def _resembles(self, entry: Entry, new: Any) -> bool:
        """Whether the graph may be used with ``new`` in that place."""
        old = self._old(entry)
        if new is old:
            return True
        if self._number.get(entry) in self._free:
            return type(new) is type(old)
        if isinstance(entry.holder, Content):
            return bool(new == old)
        if isinstance(old, Tensor):
            same = isinstance(new, Tensor) and kind_of_tensor(old) == kind_of_tensor(new)
            return same and entry not in self._aliases and all(self._fits(h, new) for h in self._inside(entry))
        inside = self._inside(entry)
        if not inside:
            return is_simple(old) and same_simple(old, new)
        return type(old) is type(new) and all(self._fits(holder, new) for holder in inside)

    def _fits(self, holder: Holder, subject: Any) -> bool:
        """Whether ``subject`` holds what this holder's subject held."""
        if holder.shared or not self._same_keys(holder, subject):
            return False
        return all(self._resembles(entry, holder.peek(subject, entry.key)) for entry in self._watched(holder))

    def _same_keys(self, holder: Holder, subject: Any) -> bool:
        if not holder.complete:
            return True
        keys, known = holder.keys(subject), [self.entries[n].key for n in self._mine.get(holder, ())]
        return len(keys) == len(known) and all(map(_equal, known, keys))

    def _take_over(self, entry: Entry, new: Any) -> None:
        number = self._number.get(entry)
        if number is not None:
            self._expected[number] = new
        entry.value = new
        self._moved = self._moved or number not in self._free
        for holder in self._inside(entry):
            holder.subject = new
            for inner in self._watched(holder):
                self._take_over(inner, holder.peek(new, inner.key))


def _kinds(tensors: Sequence[Tensor]) -> tuple[list[Any], ...]:
    sizes, strides = list(map(Tensor.size, tensors)), list(map(Tensor.stride, tensors))
    return sizes, strides, [t.dtype for t in tensors], [t.requires_grad for t in tensors]


class _Kind:
    """The kind of a tensor, in a message."""

    def __init__(self, kind: tuple[Any, ...]) -> None:
        size, stride, dtype, requires_grad = kind
        self._text = f"{str(dtype)[6:]}{list(size)} with strides {list(stride)}"
        self._text += ", requiring gradients" if requires_grad else ""

    def __repr__(self) -> str:
        return self._text


class _Items:
    """The keys, positions or members of a container, in a message."""

    def __init__(self, keys: list[Any]) -> None:
        self._text = f"{len(keys)} items" if keys == list(range(len(keys))) else f"{_short(keys)}"

    def __repr__(self) -> str:
        return self._text


def _equal(one: Any, other: Any) -> bool:
    return one is other or (is_simple(one) and same_simple(one, other))


def _prepared_call(entry: Entry) -> Read:
    holder = entry.holder
    if isinstance(holder, ClassAttributes):
        return functools.partial(vars(holder.subject).get, entry.key, MISSING)
    return functools.partial(holder.peek, holder.subject, entry.key)


def _unlike(old: Tensor, new: Tensor) -> str:
    """How two tensors of one shape and type differ."""
    kinds = zip(
        ("shape", "strides", "dtype", "device", "requires_grad", "class"),
        kind_of_tensor(old),
        kind_of_tensor(new),
        strict=True,
    )
    found = [f"its {name} from {before} to {now}" for name, before, now in kinds if before != now]
    return " and ".join(found) or (
        f"it is another {_short(new)[2:]}, and the step reaches the one that was there by another name too, or what "
        "hangs on it; change its values in place (copy_)"
    )


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {str(value.dtype)[6:]}{list(value.shape)}"
    try:
        text = " ".join(repr(value).split())
    except Exception:  # a user's __repr__
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 80 else f"{text[:77]}..."
