"""How each kind of object is looked into on a walk: modules, optimizers, functions, classes, arrays, iterators."""

from __future__ import annotations

import array
import collections
import contextvars
import enum
import functools
import gc
import logging
import sys
import threading
import types
import weakref
from collections.abc import Callable
from inspect import getattr_static
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_spmd.errors import CaptureError
from lightning_spmd.ir.several_optimizers import parts_of
from lightning_spmd.messages import batch_hook, the_step
from lightning_spmd.stages.capture import contents, kinds
from lightning_spmd.stages.capture.code_facts import CodeFacts, facts_of, line_that_changes
from lightning_spmd.stages.capture.holders import (
    Attributes,
    Behind,
    Cell,
    Closure,
    Entry,
    Fields,
    Globals,
)
from lightning_spmd.stages.capture.same_state import MISSING, is_simple
from lightning_spmd.stages.capture.user_code import is_user_class, is_user_code, is_user_file
from lightning_spmd.stages.capture.walker import Visit, Walker


class Walk(Walker):
    """A walk that knows how each kind of object is looked into; the arguments are those of :class:`Walker`."""

    # ------------------------------------------------------------------ what walks begin with

    # ------------------------------------------------------------------ walking

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

    # ------------------------------------------------------------------ objects and classes

    def _enum(self, value: enum.Enum, path: str, place: Entry | None, facts: CodeFacts, depth: int) -> None:
        """A member is always the same; what it keeps may change."""
        self.sightings.root(Attributes, value, f"{type(value).__qualname__}.{value.__dict__.get('_name_', '')}")
        self._instance(value, path, place, facts, depth)
        if not is_simple(value.__dict__.get("_value_")):
            self._see(self.sightings.holder(Attributes, value, path, None), "_value_", facts, depth)

    def _class(self, value: type, path: str, place: Entry | None, facts: CodeFacts, depth: int) -> None:
        if is_user_class(value):
            self._class_attributes(value, facts, depth)
            self._class_attributes(type(value), facts, depth)

    # ------------------------------------------------------------------ modules and optimizers
    def _module(self, value: nn.Module, path: str, place: Entry | None, facts: CodeFacts, depth: int) -> None:
        known = id(value) in self.sightings.modules
        if "_modules" not in value.__dict__:  # the step is making it, and this is the frame of its __init__
            return
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
        if optimizer is not None and any(value is part for part in (optimizer, *parts_of(optimizer))):
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
                f"{the_step()} looks at {path}, a {type(value).__name__}: what it gives next would be the same for "
                f"ever; take the next value in {batch_hook('start')} and keep it on the module",
                _where(facts, place),
            )


def _nothing(value: Any, path: str, place: Entry | None, facts: CodeFacts, depth: int) -> None:
    pass


def _where(facts: CodeFacts, place: Entry) -> str | None:
    """Where a frame's code names a place, or what leads to it."""
    keys = (entry.key for entry in place.way())
    lines = (line_that_changes([facts.code], key) for key in keys if isinstance(key, str))
    return next((line for line in lines if line is not None), None)
