"""What kind of thing a recorded number says it is: the user's code sees a ``float``, an ``int`` or a ``bool``.

    isinstance(loss.item(), float)      numbers.Number, np.isscalar(x), ``case float():``, functools.singledispatch
    type(loss.item()) is float
    mask.any().item() is True

A step that is told something else takes another way than without a graph, silently. So recorded numbers answer for
``__class__`` as the number of the step would, to everybody but torch and this package, which must know; ``type`` in the
user's modules is a stand-in that does the same. Of ``is True`` nobody hears: where code asks that, every yes or no is
decided at once, and is Python's own.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import os
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch

from lightning_spmd import errors
from lightning_spmd.errors import CaptureError
from lightning_spmd.stages.capture.host_scalar import SYMBOLS, HostScalar, scalar_of

_WHO_KNOW = tuple(os.path.join(os.path.dirname(str(package.__file__)), "") for package in (torch, errors))
_BETWEEN = ("<frozen abc>", "<frozen _collections_abc>")
"""Asks on behalf of who called it."""
_IS = dis.opmap["IS_OP"]


@contextlib.contextmanager
def seen_as_plain() -> Iterator[None]:
    """Inside, recorded numbers say that they are Python's own."""
    with contextlib.ExitStack() as stack:
        for kind in SYMBOLS:
            stack.enter_context(replaced(kind, "__getattribute__", _attribute))
        yield


@contextlib.contextmanager
def replaced(kind: type, name: str, replacement: Callable[..., Any]) -> Iterator[None]:
    """Inside, a class has another method of this name."""
    had, before = name in vars(kind), vars(kind).get(name)
    setattr(kind, name, replacement)
    try:
        yield
    finally:
        if had:
            setattr(kind, name, before)
        else:
            delattr(kind, name)


def _attribute(number: Any, name: str) -> Any:
    if name == "__class__":
        node = object.__getattribute__(number, "node")
        if isinstance(node, HostScalar) and not _knows(sys._getframe(1)):  # noqa: SLF001 - documented in `sys`
            return node.of_numpy or type(node.sample)
    return object.__getattribute__(number, name)


def _knows(frame: Any) -> bool:
    while frame.f_code.co_filename in _BETWEEN and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_filename.startswith(_WHO_KNOW)


class _Type(type):
    """Called with a recorded number it gives the type of that number; otherwise it is ``type``."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and (scalar := scalar_of(args[0])) is not None:
            return scalar.of_numpy or type(scalar.sample)
        return type(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, type)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, type)

    def __eq__(cls, other: object) -> bool:
        return other is type or other is cls

    def __hash__(cls) -> int:
        return hash(type)


class RecordedType(metaclass=_Type):
    """Stands for ``type``."""

    plain = type


def asks_for_identity(code: CodeType, scope: dict[str, Any]) -> bool:
    """Whether code of a module asks ``is True`` or ``is False``: this code, or other code of the module.

    Args:
        code: is about to run.
        scope: the module's names.
    """
    file = code.co_filename
    if file not in _files:
        _files[file] = any(map(_asks, _codes_of(file, scope)))
    return _files[file] or _asks(code)


_files: dict[str, bool] = {}


def refuse_undecided(frame: FrameType) -> None:
    """Code that asks for identity was given a yes or no that has not been decided yet, by another module.

    Raises:
        CaptureError: it was.
    """
    for name, value in frame.f_locals.items():
        if type(value) is torch.SymBool and scalar_of(value) is not None:
            raise CaptureError(
                f"{name!r}, of a value that is read, is compared by `is`, which no graph can follow; use `==`",
                f"{frame.f_code.co_filename}:{frame.f_lineno}",
            )


def _codes_of(file: str, scope: dict[str, Any]) -> Iterator[CodeType]:
    for value in list(scope.values()):
        members = list(vars(value).values()) if isinstance(value, type) else [value]
        for member in members:
            function: Any = getattr(member, "__func__", getattr(member, "fget", member))
            if isinstance(function, FunctionType) and function.__code__.co_filename == file:
                yield function.__code__


@functools.cache
def _asks(code: CodeType) -> bool:
    inside = any(_asks(part) for part in code.co_consts if isinstance(part, CodeType))
    if inside or _IS not in code.co_code[::2]:
        return inside
    steps = [step for step in dis.get_instructions(code) if step.opname not in ("CACHE", "EXTENDED_ARG")]
    return any(
        step.opcode == _IS and any(type(s.argval) is bool and s.opname == "LOAD_CONST" for s in steps[i - 2 : i])
        for i, step in enumerate(steps)
        if i > 1
    )
