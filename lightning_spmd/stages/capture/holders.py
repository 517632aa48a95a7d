# ruff: noqa: D102 - the undocumented methods do for each kind of holder what `Holder` says
"""Things with entries that Python code reads: objects, classes, modules, functions, containers.

A :class:`Holder` is one such thing, an :class:`Entry` one place in it: ``self.crit`` holds ``.gamma``, ``self.table``
holds ``['a']``. Each holder knows the entry that leads to it, so an entry can be read again from its root after objects
on the way were replaced.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import CellType, FunctionType
from typing import Any, ClassVar

from lightning_spmd.ir.first import first
from lightning_spmd.stages.capture.same_state import MISSING

Reader = Callable[[], Any]


class Entry:
    """One place in a holder.

    Args:
        holder: in what.
        key: where in it.
        value: what is there (``MISSING``: nothing), as capture saw it first.
    """

    __slots__ = ("holder", "inside", "key", "value")

    def __init__(self, holder: Holder, key: Any, value: Any) -> None:
        self.holder, self.key, self.value = holder, key, value
        self.inside: list[Holder] = []

    @property
    def path(self) -> str:
        """Readable name: ``self.crit.gamma``."""
        return self.holder.label(self.key)

    def read(self) -> Any:
        """What is there now, from the root."""
        return self.holder.peek(self.holder.locate(), self.key)

    def put(self, value: Any) -> None:
        """Put something there."""
        self.holder.put(self.key, value)

    def way(self) -> Iterator[Entry]:
        """This entry, the one that leads to its holder, and so on to the root."""
        entry: Entry | None = self
        while entry is not None:
            yield entry
            entry = entry.holder.place

    def detached(self) -> Entry:
        """The same place with holders of its own, which nobody else leads elsewhere."""
        holder = self.holder
        place = None if holder.place is None else holder.place.detached()
        own = type(holder)(holder.subject, holder.path, None)
        own.place, own.root = place, holder.root
        return own.see(self.key)

    def found_again(self) -> Entry:
        """This entry, with its holders holding what is on the way now."""
        if self.holder.place is not None:
            self.holder.subject = self.holder.place.found_again().read()
        return self

    def outermost(self) -> Entry:
        """The nearest entry on the way that can be put back as it was: what a tuple is in."""
        return first((e for e in self.way() if not isinstance(e.holder.subject, tuple)), "object")

    def reader(self) -> Reader:
        """A prepared :meth:`read`."""
        peek, key, place = self.holder.peek, self.key, self.holder.place
        if place is None:
            subject = self.holder.subject
            return lambda: peek(subject, key)
        above = place.reader()
        return lambda: peek(above(), key)


CANNOT_BE_PUT = (TypeError, AttributeError, NotImplementedError)
"""What :meth:`Entry.put` raises where nothing can be put."""


class Holder:
    """Something with entries.

    Args:
        subject: the thing itself.
        path: readable name.
        place: the entry that leads to it; None for a root, which is always the same.
    """

    complete: ClassVar[bool] = False
    """Whether all of it counts: its size and order too."""
    guarded: bool = True
    """Whether a graph depends on it."""
    root: bool = False
    """Whether it lasts without a place."""

    def __init__(self, subject: Any, path: str, place: Entry | None = None) -> None:
        self.subject, self.path, self.place = subject, path, place
        self.entries: dict[Any, Entry] = {}
        self.shared = False
        if place is not None:
            place.inside.append(self)

    def lead_from(self, place: Entry) -> None:
        """From now on ``place`` leads here."""
        self.place, self.path = place, place.path
        place.inside.append(self)

    def see(self, key: Any) -> Entry:
        """The entry at ``key``, with its value as it was when first asked for."""
        entry = self.entries.get(key)
        if entry is None:
            entry = self.entries[key] = Entry(self, key, self.peek(self.subject, key))
        return entry

    @property
    def lasts(self) -> bool:
        """Whether it is reached from something that lasts; else it may be an object that the step made for itself."""
        return self.root or (self.place is not None and any(entry.holder.root for entry in self.place.way()))

    def locate(self) -> Any:
        """The thing that is now where this one was found."""
        return self.subject if self.place is None else self.place.read()

    def label(self, key: Any) -> str:
        """Readable name of an entry."""
        return f"{self.path}.{key}"

    @staticmethod
    def peek(subject: Any, key: Any) -> Any:
        """What ``subject`` has at ``key``, or MISSING."""
        raise NotImplementedError

    def put(self, key: Any, value: Any) -> None:
        """Put ``value`` at ``key`` (MISSING: nothing)."""
        raise NotImplementedError

    # ------------------------------------------------------------------ of complete ones
    @staticmethod
    def keys(subject: Any) -> list[Any]:
        """Keys, positions or members of ``subject``, in order."""
        raise NotImplementedError

    @staticmethod
    def plain_kind(subject: Any) -> Any:
        """The built-in type whose methods read ``subject``, whatever a subclass made of them."""
        raise NotImplementedError

    def refill(self, items: list[tuple[Any, Any]]) -> None:
        """Make these keys and values all there is, in this order."""
        raise NotImplementedError


def _put_in(mapping: dict[Any, Any], key: Any, value: Any) -> None:
    if value is MISSING:
        mapping.pop(key, None)
    else:
        mapping[key] = value


class Attributes(Holder):
    """What an object has in its ``__dict__``: instances, modules, functions' attributes."""

    def label(self, key: Any) -> str:
        return f"{self.path}.{'hparams' if key == '_hparams' else key}"

    @staticmethod
    def peek(subject: Any, key: Any) -> Any:
        return _dict_of(subject).get(key, MISSING)

    def put(self, key: Any, value: Any) -> None:
        _put_in(_dict_of(self.subject), key, value)


def _dict_of(subject: Any) -> dict[str, Any]:
    return object.__getattribute__(subject, "__dict__")


def plain_dict_of(holder: Holder) -> dict[Any, Any]:
    """The dictionary in which an :class:`Attributes` or :class:`Globals` looks."""
    return _dict_of(holder.subject) if isinstance(holder, Attributes) else holder.subject


class Globals(Holder):
    """The globals of a module, given as the dictionary."""

    @staticmethod
    def peek(subject: Any, key: Any) -> Any:
        return subject.get(key, MISSING)

    def put(self, key: Any, value: Any) -> None:
        _put_in(self.subject, key, value)


class Variables(Globals):
    """Some entries of a dictionary: of a long one, or of an optimizer's parameter group."""

    def label(self, key: Any) -> str:
        return f"{self.path}[{key!r}]"


class ClassAttributes(Holder):
    """What a class itself defines, without its bases."""

    @staticmethod
    def peek(subject: Any, key: Any) -> Any:
        return type.__dict__["__dict__"].__get__(subject).get(key, MISSING)

    def put(self, key: Any, value: Any) -> None:
        if value is MISSING:
            delattr(self.subject, key)
        else:
            setattr(self.subject, key, value)


class Fields(Holder):
    """Attributes that live outside a ``__dict__``: slots, a function's defaults, a Trainer's properties."""

    @staticmethod
    def peek(subject: Any, key: Any) -> Any:
        try:
            return getattr(subject, key, MISSING)
        except Exception:  # a property that cannot be read now
            return MISSING

    def put(self, key: Any, value: Any) -> None:
        if value is MISSING:
            delattr(self.subject, key)
        elif isinstance(self.subject, threading.local):
            setattr(self.subject, key, value)
        else:
            object.__setattr__(self.subject, key, value)


class Cell(Holder):
    """A variable that a function closes over. The only entry is ``""``."""

    def label(self, key: Any) -> str:
        return self.path

    @staticmethod
    def peek(subject: CellType, key: Any) -> Any:
        try:
            return subject.cell_contents
        except ValueError:
            return MISSING

    def put(self, key: Any, value: Any) -> None:
        if value is MISSING:
            del self.subject.cell_contents
        else:
            self.subject.cell_contents = value


class Closure(Holder):
    """The cells of a function, by position: always the same for one function."""

    guarded = False

    @staticmethod
    def peek(subject: FunctionType, key: int) -> Any:
        cells = subject.__closure__ or ()
        return cells[key] if key < len(cells) else MISSING


class Behind(Holder):
    """What a weak reference or proxy or a context variable stands for. The only entry is ``""``."""

    @staticmethod
    def peek(subject: Any, key: Any) -> Any:
        kind = type(subject)
        if issubclass(kind, ContextVar):
            return subject.get(MISSING)
        try:
            return subject.__dir__.__self__ if issubclass(kind, weakref.ProxyTypes) else subject()
        except ReferenceError:
            return MISSING

    def put(self, key: Any, value: Any) -> None:
        if not isinstance(self.subject, ContextVar) or value is MISSING:
            raise TypeError(f"{self.path} cannot stand for something else")
        self.subject.set(value)

    def label(self, key: Any) -> str:
        how = (
            ".get()" if isinstance(self.subject, ContextVar) else "()" if isinstance(self.subject, weakref.ref) else ""
        )
        return f"{self.path}{how}"
