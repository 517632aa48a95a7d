"""Follows what a frame names: attributes of objects and classes, all of containers, what functions close over.

    loss * self.crit.table["a"][0]            self → .crit → .table → ['a'] → [0]

Attributes that the code does not name are left alone, so a counter that only hooks use costs nothing. Kinds of values
are told by their type alone: asking an object (``isinstance``, ``hasattr``) would run its code.
"""

from __future__ import annotations

import array
import collections
import contextlib
import contextvars
import enum
import functools
import gc
import logging
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable
from inspect import getattr_static
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_spmd import _private_api as private
from lightning_spmd.errors import CaptureError
from lightning_spmd.stages.capture import contents, kinds
from lightning_spmd.stages.capture.code_facts import CodeFacts, facts_of, line_that_changes
from lightning_spmd.stages.capture.holders import (
    CANNOT_BE_PUT,
    Attributes,
    Behind,
    Cell,
    ClassAttributes,
    Closure,
    Content,
    Entries,
    Entry,
    Fields,
    Globals,
    Holder,
    Items,
    Members,
    Variables,
)
from lightning_spmd.stages.capture.same_state import MISSING, SIMPLE, is_simple
from lightning_spmd.stages.capture.sightings import Sightings
from lightning_spmd.stages.capture.user_code import is_user_class, is_user_code, is_user_file

MOST_VISITS = 50_000
"""A walk that met more stops there, and says so."""
_DEEPEST = 24
_SEVERAL = 8  # items of a long container that are compared, at either end

Visit = Callable[[Any, str, "Entry | None", CodeFacts, int], None]


class Walk:
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

    # ------------------------------------------------------------------ what walks begin with
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

    # ------------------------------------------------------------------ walking
    def _see(self, holder: Holder, key: Any, facts: CodeFacts, depth: int) -> None:
        self.follow(holder.see(key), facts, depth)

    def _visit(self, value: Any, path: str, place: Entry | None, facts: CodeFacts, depth: int) -> None:
        kind = type(value)
        if issubclass(kind, Tensor):
            self._tensor(value, place)
            if place is not None and not isinstance(value, private.FakeTensor):
                self._on_tensor(value, place, facts, depth)
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

    def _visit_for(self, kind: type) -> Visit:
        if kind.__module__.startswith("lightning_spmd.stages"):  # what capture itself put there
            return _nothing
        table: list[tuple[Any, Visit]] = [
            (logging.Logger, self._whole(contents.level_of)),
            ((Metric, torch.SymInt, torch.SymFloat, torch.SymBool), _nothing),
            (enum.Enum, self._enum),
            (nn.Module, self._module),
            (Optimizer, self._optimizer),
            (dict, self._dictionary),
            ((list, tuple, collections.deque), self._sequence),
            (set, self._set),
            (types.FunctionType, self._function),
            (types.MethodType, self._fields("__self__", "__func__")),
            (functools.partial, self._fields("func", "args", "keywords")),
            (property, self._fields("fget")),
            ((staticmethod, classmethod), self._fields("__func__")),
            (types.ModuleType, self._python_module),
            (type, self._class),
            ((weakref.ref, *weakref.ProxyTypes, contextvars.ContextVar), self._behind),
            (types.MappingProxyType, self._proxy),
            (threading.local, self._thread_local),
            (type(functools.cache(lambda: None)), self._cached),
            (kinds.ITERATORS, self._iterator),
            ((bytearray, memoryview, array.array), self._whole(bytes)),
            *((of.kinds, self._random(of)) for of in contents.random_kinds()),
        ]
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            table += [
                ((numpy.generic, numpy.dtype), _nothing),
                (numpy.ndarray, self._array),
            ]
        return next((visit for types_of, visit in table if issubclass(kind, types_of)), self._instance)

    # ------------------------------------------------------------------ containers
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

    # ------------------------------------------------------------------ objects and classes
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

    def _enum(self, value: enum.Enum, path: str, place: Entry | None, facts: CodeFacts, depth: int) -> None:
        """A member is always the same; what it keeps may change."""
        self.sightings.root(Attributes, value, f"{type(value).__qualname__}.{value.__dict__.get('_name_', '')}")
        self._instance(value, path, place, facts, depth)
        if not is_simple(value.__dict__.get("_value_")):
            self._see(self.sightings.holder(Attributes, value, path, None), "_value_", facts, depth)

    def _opaque(self, value: Any, path: str, place: Entry | None) -> None:
        """An object of C: what it keeps in a buffer can be read, the rest cannot."""
        with contextlib.suppress(TypeError, ValueError, BufferError):
            if memoryview(value).nbytes <= contents.MOST_BYTES:
                self._content(value, path, place, contents.bytes_of_buffer)
                return
        kind = type(value)
        if kind.__module__ not in kinds.WITHOUT_STATE:
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

    def _class(self, value: type, path: str, place: Entry | None, facts: CodeFacts, depth: int) -> None:
        if is_user_class(value):
            self._class_attributes(value, facts, depth)
            self._class_attributes(type(value), facts, depth)

    # ------------------------------------------------------------------ modules and optimizers
    def _module(self, value: nn.Module, path: str, place: Entry | None, facts: CodeFacts, depth: int) -> None:
        known = id(value) in self.sightings.modules
        if known:
            holder = self.sightings.root(Attributes, value, self.sightings.modules[id(value)] or "self")
        else:
            holder = self.sightings.holder(Attributes, value, path, place)
        names = {"_hparams" if n == "hparams" else n for n in facts.names}
        own = value.__dict__.keys() - kinds.TORCH_INTERNALS - kinds.BOOKKEEPING
        for name in own if facts.everything else own & names:
            self._see(holder, name, facts, depth)
        children = {n: m for n, m in value.__dict__["_modules"].items() if m is not None}
        if not known:
            if not any(m is value for m in self.sightings.hidden):
                self.sightings.hidden.append(value)
                self._on_hidden_module(value)
            for table in ("_parameters", "_buffers", "_modules"):
                self._see(holder, table, facts, depth)
        elif facts.everything or isinstance(value, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            for child in children.values():
                self._visit(child, path, None, facts, depth + 1)
        else:
            for name in names & children.keys():
                self._visit(children[name], path, None, facts, depth + 1)
        self._class_attributes(type(value), facts, depth)

    def _optimizer(self, value: Optimizer, path: str, place: Entry | None, facts: CodeFacts, depth: int) -> None:
        optimizer = self.sightings.optimizer
        if value is optimizer:
            holder = self.sightings.root(Attributes, value, "optimizer")
            for name in (facts.names & value.__dict__.keys()) - kinds.SWAPPED:
                self._see(holder, name, facts, depth)
            self._class_attributes(type(value), facts, depth)
        elif optimizer is not None and place is not None and place.holder.subject is optimizer:
            raise CaptureError(
                f"{path} is an optimizer inside the optimizer {type(optimizer).__name__}, whose step cannot be "
                "followed; train with one optimizer that keeps its state in `state` and `param_groups`",
                _where(facts, place),
            )

    # ------------------------------------------------------------------ functions
    def _function(
        self, value: types.FunctionType, path: str, place: Entry | None, facts: CodeFacts, depth: int
    ) -> None:
        if not is_user_code(value.__code__, value.__globals__):
            self._wrapper(value, path, place, facts, depth)
            return
        inner = facts_of(value.__code__)
        fields = self.sightings.holder(Fields, value, path, place)
        for name in ("__code__", "__defaults__", "__kwdefaults__"):
            self._see(fields, name, inner, depth)
        closure = self.sightings.holder(Closure, value, path, place)
        for index, name in enumerate(value.__code__.co_freevars):
            entry = closure.see(index)
            if entry.value is not MISSING:
                cell = self.sightings.holder(Cell, entry.value, f"{name} in {value.__qualname__}", entry)
                self._see(cell, "", inner, depth)
        own = (facts.names | {"__wrapped__"}) & value.__dict__.keys()
        if own:
            attributes = self.sightings.holder(Attributes, value, path, place)
            for name in own:
                self._see(attributes, name, facts, depth)

    def _wrapper(self, value: types.FunctionType, path: str, place: Entry | None, facts: CodeFacts, depth: int) -> None:
        """A library's function around the user's: ``torch.no_grad()``, ``contextmanager``, ``singledispatch``."""
        for name in {"__wrapped__", "registry"} & value.__dict__.keys():
            self._see(self.sightings.holder(Attributes, value, path, place), name, facts, depth)

    def _cached(self, value: Any, path: str, place: Entry | None, facts: CodeFacts, depth: int) -> None:
        """``functools.lru_cache``: the function is asked anew, and nothing of the graph stays in the cache."""
        function = value.__wrapped__
        if isinstance(function, types.FunctionType) and is_user_code(function.__code__, function.__globals__):
            value.cache_clear()
            self.sightings.caches.append(value)
            self._see(self.sightings.holder(Fields, value, path, place), "__wrapped__", facts, depth)

    def _fields(self, *names: str) -> Visit:
        def visit(value: Any, path: str, place: Entry | None, facts: CodeFacts, depth: int) -> None:
            holder = self.sightings.holder(Fields, value, path, place)
            for name in names:
                self._see(holder, name, facts, depth)

        return visit

    def _behind(self, value: Any, path: str, place: Entry | None, facts: CodeFacts, depth: int) -> None:
        self._see(self.sightings.holder(Behind, value, path, place), "", facts, depth)

    def _thread_local(self, value: Any, path: str, place: Entry | None, facts: CodeFacts, depth: int) -> None:
        holder = self.sightings.holder(Fields, value, path, place)
        for name in vars(value) if facts.everything else facts.names & vars(value).keys():
            self._see(holder, name, facts, depth)

    def _proxy(self, value: Any, path: str, place: Entry | None, facts: CodeFacts, depth: int) -> None:
        for inside in gc.get_referents(value):
            self._visit(inside, path, None, facts, depth + 1)
            self.sightings.lasts(inside)

    def _python_module(
        self, value: types.ModuleType, path: str, place: Entry | None, facts: CodeFacts, depth: int
    ) -> None:
        scope = vars(value)
        filename = scope.get("__file__")
        own = value.__name__ not in sys.builtin_module_names if filename is None else is_user_file(filename)
        holder = self.sightings.root(Globals, scope, value.__name__)
        if not facts.names.isdisjoint(("modules", "import_module")) and value.__name__ in ("sys", "importlib"):
            for name in facts.constants & sys.modules.keys():
                self._visit(sys.modules[name], name, None, facts, depth + 1)
        if value.__name__ in contents.SETTINGS_OF_MODULES:
            self._content(value, path, place, contents.SETTINGS_OF_MODULES[value.__name__])
        for name in facts.names & scope.keys():
            if own or isinstance(scope[name], types.ModuleType):
                self._see(holder, name, facts, depth)
            elif isinstance(scope[name], (types.FunctionType, types.BuiltinFunctionType)):
                holder.see(name)  # somebody may put another function there
        if type(value) is not types.ModuleType:  # torch.backends.cudnn: its switches are no globals
            fields = self.sightings.holder(Fields, value, path, place)
            for name in facts.names:
                if hasattr(getattr_static(type(value), name, None), "__get__"):
                    fields.see(name)

    # ------------------------------------------------------------------ what is compared as a whole
    def _content(self, value: Any, path: str, place: Entry | None, read: Callable[[Any], Any], **how: Any) -> Content:
        holder = self.sightings.holder(Content, value, path, place, read=read, **how)
        holder.see("")
        return holder

    def _array(self, value: Any, path: str, place: Entry | None, facts: CodeFacts, depth: int) -> None:
        read, saved = contents.array_content, None
        if read(value)[0] == "all":
            saved = value.copy()
        else:
            self.sightings.untold.setdefault(path, f"has {value.nbytes} bytes, of which a sample is compared")
        self._content(value, path, place, read, saved=saved, restore=contents.refill_array)
        if value.dtype == object and value.size <= contents.MOST_ITEMS:
            for index, item in enumerate(value.ravel().tolist()):
                self._visit(item, f"{path}.flat[{index}]", None, facts, depth + 1)
                self.sightings.lasts(item)

    def _whole(self, read: Callable[[Any], Any]) -> Visit:
        def visit(value: Any, path: str, place: Entry | None, facts: CodeFacts, depth: int) -> None:
            self._content(value, path, place, read)

        return visit

    def _random(self, of: contents.RandomKind) -> Visit:
        def visit(value: Any, path: str, place: Entry | None, facts: CodeFacts, depth: int) -> None:
            if value is not torch.default_generator:  # whose numbers the graph draws
                holder = self._content(value, path, place, of.read, saved=of.save(value), restore=of.restore)
                holder.guarded = False

        return visit

    def _iterator(self, value: Any, path: str, place: Entry | None, facts: CodeFacts, _: int) -> None:
        if place is not None and place.holder.lasts:
            raise CaptureError(
                f"training_step looks at {path}, a {type(value).__name__}: what it gives next would be the same for "
                "ever; take the next value in on_train_batch_start and keep it on the module",
                _where(facts, place),
            )


def _nothing(value: Any, path: str, place: Entry | None, facts: CodeFacts, depth: int) -> None:
    pass


def _where(facts: CodeFacts, place: Entry) -> str | None:
    """Where a frame's code names a place, or what leads to it."""
    keys = (entry.key for entry in place.way())
    lines = (line_that_changes([facts.code], key) for key in keys if isinstance(key, str))
    return next((line for line in lines if line is not None), None)
