# ruff: noqa: D102 - the undocumented methods do for each kind of holder what `Holder` says
"""Holders that are containers: entries of dictionaries, items of sequences, members of sets, contents of the rest."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

from lightning_spmd.ir.first import first
from lightning_spmd.stages.capture.holders import Entry, Holder
from lightning_spmd.stages.capture.same_state import MISSING, is_simple


def _key_in_words(key: Any, keys: list[Any]) -> str:
    """The same on all ranks: an object's ``repr`` has its address in it."""
    if is_simple(key):
        return repr(key)
    return f"{type(key).__name__} {next((i for i, other in enumerate(keys) if other is key), 'that is gone')}"


class Entries(Holder):
    """All of a dictionary."""

    complete = True

    @staticmethod
    def peek(subject: Any, key: Any) -> Any:
        try:
            return dict.get(subject, key, MISSING)
        except TypeError:
            return MISSING

    def put(self, key: Any, value: Any) -> None:
        kind = self.plain_kind(self.subject)
        if value is MISSING:
            kind.pop(self.subject, key, None)
        else:
            kind.__setitem__(self.subject, key, value)

    def label(self, key: Any) -> str:
        return f"{self.path}[{_key_in_words(key, Entries.keys(self.subject))}]"

    @staticmethod
    def keys(subject: Any) -> list[Any]:
        return list(Entries.plain_kind(subject).keys(subject))

    @staticmethod
    def plain_kind(subject: Any) -> Any:
        return collections.OrderedDict if isinstance(subject, collections.OrderedDict) else dict

    def refill(self, items: list[tuple[Any, Any]]) -> None:
        kind = self.plain_kind(self.subject)
        kind.clear(self.subject)
        for key, value in items:
            kind.__setitem__(self.subject, key, value)


class Items(Holder):
    """All of a list, a tuple or a deque."""

    complete = True

    @staticmethod
    def peek(subject: Any, key: int) -> Any:
        try:
            return _plain_sequence(subject).__getitem__(subject, key)
        except (IndexError, TypeError):
            return MISSING

    def put(self, key: int, value: Any) -> None:
        if not isinstance(self.subject, tuple):
            _plain_sequence(self.subject).__setitem__(self.subject, key, value)
            return
        if self.place is None:
            raise TypeError(f"{self.path} is a tuple")
        items = [value if i == key else item for i, item in enumerate(self.subject)]
        make = getattr(type(self.subject), "_make", type(self.subject))
        self.subject = make(items)
        self.place.put(self.subject)

    def label(self, key: Any) -> str:
        names = getattr(type(self.subject), "_fields", ())
        return f"{self.path}.{names[key]}" if key < len(names) else f"{self.path}[{key}]"

    @staticmethod
    def keys(subject: Any) -> list[Any]:
        return list(range(_plain_sequence(subject).__len__(subject)))

    @staticmethod
    def plain_kind(subject: Any) -> Any:
        return _plain_sequence(subject)

    def refill(self, items: list[tuple[Any, Any]]) -> None:
        if not isinstance(self.subject, tuple):
            kind = _plain_sequence(self.subject)
            kind.clear(self.subject)
            kind.extend(self.subject, [value for _, value in items])


def _plain_sequence(subject: Any) -> Any:
    return first((kind for kind in (list, tuple, collections.deque) if isinstance(subject, kind)), "sequence")


class Members(Holder):
    """All of a set; the members are their own keys."""

    complete = True

    @staticmethod
    def peek(subject: Any, key: Any) -> Any:
        return key if set.__contains__(subject, key) else MISSING

    def label(self, key: Any) -> str:
        return f"{self.path} ({_key_in_words(key, Members.keys(self.subject))})"

    @staticmethod
    def keys(subject: Any) -> list[Any]:
        return list(set.__iter__(subject))

    @staticmethod
    def plain_kind(subject: Any) -> Any:
        return set

    def refill(self, items: list[tuple[Any, Any]]) -> None:
        set.clear(self.subject)
        set.update(self.subject, [value for _, value in items])


class Content(Holder):
    """Something that is compared as a whole: an array, a random number generator. The only entry is ``""``.

    Args:
        subject, path, place: as in :class:`Holder`.
        read: what is compared.
        saved: what ``restore`` needs.
        restore: brings the content back: ``(subject, saved)``; None if nothing can.
    """

    def __init__(
        self,
        subject: Any,
        path: str,
        place: Entry | None,
        read: Callable[[Any], Any],
        saved: Any = None,
        restore: Callable[[Any, Any], None] | None = None,
    ) -> None:
        super().__init__(subject, path, place)
        self._read, self._saved, self._restore = read, saved, restore
        self.peek = lambda subject, key: read(subject)

    def put(self, key: Any, value: Any) -> None:
        if self._restore is not None:
            self._restore(self.subject, self._saved)

    def label(self, key: Any) -> str:
        return f"the content of {self.path}"
