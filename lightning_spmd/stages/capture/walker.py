"""Walks from what a frame names: attributes of objects and classes, all of containers, what functions close over.

    loss * self.crit.table["a"][0]            self → .crit → .table → ['a'] → [0]

Attributes that the code does not name are left alone, so a counter that only hooks use costs nothing. Kinds of values
are told by their type alone: asking an object (``isinstance``, ``hasattr``) would run its code.
"""

from __future__ import annotations

import abc
import collections
import contextlib
import os
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from lightning_spmd import _private_api as private
from lightning_spmd.errors import CaptureError
from lightning_spmd.stages.capture import contents, kinds
from lightning_spmd.stages.capture.code_facts import CodeFacts
from lightning_spmd.stages.capture.containers import Content, Entries, Items, Members
from lightning_spmd.stages.capture.followed_classes import kinds_of_loggers
from lightning_spmd.stages.capture.holders import (
    CANNOT_BE_PUT,
    Attributes,
    ClassAttributes,
    Entry,
    Fields,
    Globals,
    Holder,
    Variables,
)
from lightning_spmd.stages.capture.same_state import MISSING, SIMPLE, is_simple
from lightning_spmd.stages.capture.sightings import Sightings
from lightning_spmd.stages.capture.user_code import is_user_class

MOST_VISITS = 50_000
"""A walk that met more stops there, and says so."""
_DEEPEST = 24
_SEVERAL = 8  # items of a long container that are compared, at either end

Visit = Callable[[Any, str, "Entry | None", CodeFacts, int], None]


class Walker(abc.ABC):
    """Fills in what can be seen.

    Args:
        sightings: what was met.
        twin_of: the fake twin of a live parameter or buffer; None for other tensors.
        on_hidden_module: told each module that is not registered below the LightningModule.
    """

    def __init__(
        self,
        sightings: Sightings,
        twin_of: Callable[[Tensor], Tensor | None],
        on_hidden_module: Callable[[nn.Module], None],
    ) -> None:
        self.sightings = sightings
        self.is_capturing = True
        self._twin_of = twin_of
        self._on_hidden_module = on_hidden_module
        self._visited: set[tuple[int, int]] = set()
        self._classes: set[tuple[type, int]] = set()
        self._visits: dict[type, Visit] = {}
        self._loggers = kinds_of_loggers()

    def look_at(self, value: Any, path: str, facts: CodeFacts) -> None:
        """A frame with these facts has ``value``. Containers that were met nowhere else are the step's own."""
        place = self.sightings.places.get(id(value))
        if issubclass(type(value), kinds.CONTAINERS) and not self.sightings.was_met(value):
            return
        self._visit(value, path if place is None else place.path, place, facts, 0)

    def look_at_gift(self, value: Any, path: str, facts: CodeFacts) -> None:
        """A library gave ``value`` to a frame: an object that lasts, as far as anybody knows."""
        known = self.sightings.was_met(value)
        self.look_at(value, path, facts)
        if not known:
            self.sightings.lasts(value)
            self.sightings.gifts.add(value)

    def look_at_globals(self, scope: dict[str, Any], facts: CodeFacts) -> None:
        """Follow the globals that a frame names."""
        holder = self.sightings.root(Globals, scope, str(scope.get("__name__", "globals")))
        for name in facts.names & scope.keys():
            self._see(holder, name, facts, 0)
        if "globals" in facts.names:
            for name in [n for n, v in scope.items() if is_simple(v) and not n.startswith("__")]:
                holder.see(name)

    def look_at_environment(self, facts: CodeFacts) -> None:
        """Follow ``os.environ``."""
        variables = vars(os.environ)["_data"]
        holder = self.sightings.root(Entries, variables, "os.environ")
        for name in variables:
            self._see(holder, name, facts, 0)

    def look_at_method(self, owner: Any, name: str, facts: CodeFacts) -> None:
        """``owner`` runs a method with this code: which function that is belongs to what was seen."""
        for kind in type(owner).__mro__[:-1]:
            own = vars(kind)
            names = [name] if name in own else [n for n, f in own.items() if getattr(f, "__code__", None) is facts.code]
            for found in names:
                self._see(self.sightings.root(ClassAttributes, kind, kind.__qualname__), found, facts, 0)
            if names:
                return

    def follow(self, entry: Entry, facts: CodeFacts, depth: int = 0) -> None:
        """Follow what is in an entry."""
        if entry.value is not MISSING and type(entry.value) not in SIMPLE:
            self._visit(entry.value, entry.path, entry, facts, depth + 1)

    def _see(self, holder: Holder, key: Any, facts: CodeFacts, depth: int) -> None:
        self.follow(holder.see(key), facts, depth)

    def _visit(self, value: Any, path: str, place: Entry | None, facts: CodeFacts, depth: int) -> None:
        kind = type(value)
        if issubclass(kind, Tensor):
            self._tensor(value, place)
            if place is not None and not isinstance(value, private.FakeTensor):
                self._on_tensor(value, place, facts, depth)
            return
        if id(value) in self.sightings.left_alone or issubclass(kind, self._loggers):
            if place is not None:
                self.sightings.places.setdefault(id(value), place)
                self.sightings.keep(value)
            return
        key = (id(value), id(facts))
        if key in self._visited:
            self.sightings.met_again(value, place)
            return
        if depth > _DEEPEST or len(self._visited) > MOST_VISITS:
            self.sightings.untold.setdefault(path, "is nested too deeply, or among too much that is looked at")
            return
        self._visited.add(key)
        self.sightings.keep(value, facts)
        visit = self._visits.get(kind)
        if visit is None:
            visit = self._visits[kind] = self._visit_for(kind)
        visit(value, path, place, facts, depth)

    @abc.abstractmethod
    def _visit_for(self, kind: type) -> Visit:
        """How an object of a kind is looked into."""

    def _tensor(self, value: Tensor, place: Entry | None) -> None:
        if place is None or isinstance(value, private.FakeTensor):
            return
        places = self.sightings.tensors.setdefault(id(value), [])
        if place not in places:
            places.append(place)
        twin = self._twin_of(value)
        if twin is None or place in self.sightings.substitutes or not self.is_capturing:
            return
        try:
            place.put(twin)
        except CANNOT_BE_PUT as error:
            raise CaptureError(
                f"{place.path} is a parameter or buffer of the module, held where it cannot be followed ({error})"
            ) from error
        self.sightings.substitutes[place] = twin

    def _on_tensor(self, value: Tensor, place: Entry, facts: CodeFacts, depth: int) -> None:
        """What users hang on tensors."""
        for name in (facts.names & vars(value).keys()) | facts.constants if vars(value) else ():
            self._see(self.sightings.holder(Attributes, value, place.path, place), name, facts, depth)

    def _dictionary(self, value: Any, path: str, place: Entry | None, facts: CodeFacts, depth: int) -> None:
        if type(value) is not dict:
            self._instance(value, path, place, facts, depth)
        if dict.__len__(value) > contents.MOST_ITEMS:
            named = self.sightings.holder(Variables, value, path, place)
            for name in facts.names & dict.keys(value):
                self._see(named, name, facts, depth)
            self._long(value, path, place, lambda d: [*dict.keys(d), *dict.values(d)])
            return
        holder = self.sightings.holder(Entries, value, path, place)
        for key in dict.keys(value):
            self._see(holder, key, facts, depth)

    def _sequence(self, value: Any, path: str, place: Entry | None, facts: CodeFacts, depth: int) -> None:
        if type(value) not in (list, tuple, collections.deque):
            self._instance(value, path, place, facts, depth)
        if len(value) > contents.MOST_ITEMS:
            self._long(value, path, place, list)
            return
        holder = self.sightings.holder(Items, value, path, place)
        for index in range(len(value)):
            self._see(holder, index, facts, depth)

    def _set(self, value: Any, path: str, place: Entry | None, facts: CodeFacts, depth: int) -> None:
        if len(value) > contents.MOST_ITEMS:
            self._long(value, path, place, list)
            return
        holder = self.sightings.holder(Members, value, path, place)
        for member in value:
            self._see(holder, member, facts, depth)

    def _long(self, value: Any, path: str, place: Entry | None, items: Callable[[Any], list[Any]]) -> None:
        def sample(now: Any) -> Any:
            some = items(now)
            return (len(now), [id(v) for v in (*some[:_SEVERAL], *some[-_SEVERAL:])])

        self.sightings.untold.setdefault(path, f"has {len(value)} items, of which a few are compared")
        self._content(value, path, place, sample)

    def _instance(self, value: Any, path: str, place: Entry | None, facts: CodeFacts, depth: int) -> None:
        kind = type(value)
        top = kind.__module__.partition(".")[0]
        own = is_user_class(kind)
        plain = own or kind in kinds.PLAIN_DATA
        everything = (facts.everything and plain) or top in kinds.WRAPPERS
        attributes, slots = kinds.attributes_of(value), kinds.slots_of(kind)
        names = facts.names - kinds.SWAPPED if top in kinds.LIGHTNING else facts.names
        if attributes is not None:
            holder = self.sightings.holder(Attributes, value, path, place)
            for name in list(attributes) if everything else names & attributes.keys():
                self._see(holder, name, facts, depth)
            for name in names - attributes.keys():
                if name in facts.constants or (own and facts.catches) or kinds.is_on(kind, name):
                    holder.see(name)  # may come, over the class's or where `hasattr` looks
        if slots:
            fields = self.sightings.holder(Fields, value, path, place)
            for name in slots if everything else names & slots:
                self._see(fields, name, facts, depth)
        if not own and top not in kinds.OPERATORS:  # properties whose frames are not looked at
            fields = self.sightings.holder(Fields, value, path, place)
            for name in names:
                if isinstance(getattr(kind, name, None), kinds.DATA_DESCRIPTORS):
                    self._see(fields, name, facts, depth)
        self._class_attributes(kind, facts, depth)
        if attributes is None and not slots and not issubclass(kind, (*kinds.CONTAINERS, *kinds.STATELESS)):
            self._opaque(value, path, place)

    def _opaque(self, value: Any, path: str, place: Entry | None) -> None:
        """An object of C: what it keeps in a buffer can be read, the rest cannot."""
        with contextlib.suppress(TypeError, ValueError, BufferError):
            if memoryview(value).nbytes <= contents.MOST_BYTES:
                self._content(value, path, place, contents.bytes_of_buffer)
                return
        kind = type(value)
        has_room = kind.__basicsize__ > object.__basicsize__ or kind.__itemsize__ > 0  # not typing's marks
        if has_room and kind.__module__ not in kinds.WITHOUT_STATE:
            self.sightings.untold.setdefault(path, f"is a {kind.__qualname__}, whose state Python cannot read")

    def _class_attributes(self, kind: type, facts: CodeFacts, depth: int) -> None:
        if (kind, id(facts)) in self._classes:
            return
        self._classes.add((kind, id(facts)))
        found: set[str] = set()
        for base in reversed(kind.__mro__):
            own = vars(base)
            if is_user_class(base):
                holder = self.sightings.root(ClassAttributes, base, base.__qualname__)
                names = facts.names & own.keys()
                if facts.everything:
                    names |= {n for n in own if not n.startswith("__")}
                for name in names:
                    self._see(holder, name, facts, depth)
                for name in found - own.keys():
                    holder.see(name)  # may come, over that of a base
            found |= facts.names & own.keys()

    def _content(self, value: Any, path: str, place: Entry | None, read: Callable[[Any], Any], **how: Any) -> Content:
        holder = self.sightings.holder(Content, value, path, place, read=read, **how)
        holder.see("")
        return holder
