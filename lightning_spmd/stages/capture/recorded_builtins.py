"""``float(x)`` and ``int(x)`` of recorded numbers in the user's code: they stay recorded; and ``type(x)``.

Python's own ``float`` must return a plain float, for which a graph would have to hold. So the modules whose code runs
while a step is captured see another one then, if they only call it or ask ``isinstance``.
"""

from __future__ import annotations

import builtins
import dis
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from lightning_spmd.stages.capture.host_scalar import SYMBOLS, scalar_of
from lightning_spmd.stages.capture.later_value import LaterValue
from lightning_spmd.stages.capture.number_types import RecordedType

_ARGUMENTS = frozenset({"LOAD_FAST", "LOAD_ATTR", "LOAD_GLOBAL", "LOAD_CONST", "LOAD_DEREF", "BINARY_SUBSCR", "CACHE"})


class _Kind(type):
    """A stand-in for a type of numbers: called, it follows what is recorded; otherwise it is the type."""

    plain: type
    symbol: Any

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs:
            value = args[0]
            if isinstance(value, Tensor) and value.numel() == 1 and not value.dtype.is_complex:
                value = value.item()
            if type(value) in SYMBOLS and scalar_of(value) is not None:
                return cls.of_symbol(value)
            if isinstance(value, LaterValue):
                return value.as_number(cls.plain)
            return cls.plain(value)
        return cls.plain(*args, **kwargs)

    def of_symbol(cls, value: Any) -> Any:
        """The recorded number of this kind."""
        scalar = scalar_of(value)
        if scalar is None:
            return value
        if type(value) is cls.symbol:
            return value if scalar.of_numpy is None else scalar.as_plain().as_symbol()
        return scalar.recorder.scalar_call(cls.plain, (scalar,)).as_plain().as_symbol()

    def __instancecheck__(cls, instance: Any) -> bool:
        scalar = scalar_of(instance)
        return issubclass(type(instance) if scalar is None else scalar.of_numpy or type(scalar.sample), cls.plain)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.plain, name)


class RecordedFloat(metaclass=_Kind):
    """Stands for ``float``."""

    plain, symbol = float, torch.SymFloat


class RecordedInt(metaclass=_Kind):
    """Stands for ``int``."""

    plain, symbol = int, torch.SymInt


_STAND_INS: dict[str, Any] = {"float": RecordedFloat, "int": RecordedInt, "type": RecordedType}


class Builtins:
    """Puts the stand-ins into modules, and takes them out again.

    Attributes:
        functions: further functions and their stand-ins, by the id of the function, where a module has imported one.
    """

    def __init__(self) -> None:
        self.functions: dict[int, tuple[Any, Any]] = {}
        self._imported: list[tuple[dict[str, Any], str, Any]] = []
        self._scopes: dict[int, tuple[dict[str, Any], set[str]]] = {}
        self._refused: set[tuple[int, str]] = set()

    def meet(self, code: CodeType, scope: dict[str, Any]) -> None:
        """A code object of the user's is about to run for the first time."""
        names = _names(code)
        for name in names if self.functions else ():
            found = self.functions.get(id(scope.get(name, self)))
            if found is not None and scope[name] is found[0]:
                self._imported.append((scope, name, found[0]))
                scope[name] = found[1]
        for name in _STAND_INS.keys() & names:
            _, inside = self._scopes.setdefault(id(scope), (scope, set()))
            if (id(scope), name) in self._refused:
                continue
            if not (_is_no_base(code) if name == "type" else _is_called_alone(code, name)):
                self._refused.add((id(scope), name))
                if name in inside:
                    inside.discard(name)
                    del scope[name]
            elif name not in scope and getattr(builtins, name) is _STAND_INS[name].plain:
                inside.add(name)
                scope[name] = _STAND_INS[name]

    def put_back(self) -> None:
        """Modules are as they were."""
        for scope, name, function in self._imported:
            scope[name] = function
        self._imported.clear()
        for scope, inside in self._scopes.values():
            for name in inside:
                scope.pop(name, None)
        self._scopes.clear()


def _family(code: CodeType) -> list[CodeType]:
    return [code, *(c for k in code.co_consts if isinstance(k, CodeType) for c in _family(k))]


def _names(code: CodeType) -> set[str]:
    return {name for part in _family(code) for name in part.co_names}


def _is_no_base(code: CodeType) -> bool:
    """Whether ``type`` may be anything that can be called: nobody makes a class of it."""
    return not any(s.opname == "LOAD_BUILD_CLASS" for part in _family(code) for s in dis.get_instructions(part))


def _is_called_alone(code: CodeType, name: str) -> bool:
    """Whether code calls a global by this name, or asks ``isinstance``, and does nothing else with it."""
    for part in _family(code):
        asks = False  # inside the arguments of isinstance
        for step in dis.get_instructions(part):
            loads = step.opname in ("LOAD_GLOBAL", "LOAD_NAME")
            is_call = bool((step.arg or 0) & 1) and step.opname == "LOAD_GLOBAL"
            if loads and step.argval == name and not is_call and not asks:
                return False
            if step.opname.startswith(("STORE_", "DELETE_", "IMPORT_")) and step.argval == name:
                return False
            if loads and is_call:
                asks = step.argval == "isinstance"
            elif step.opname not in _ARGUMENTS and step.opname != "BUILD_TUPLE":
                asks = False
    return True
