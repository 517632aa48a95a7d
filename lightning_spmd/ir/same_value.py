"""Compares two values of a program as far as possible: tensors, plain values, and objects of users."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from types import CellType, FunctionType, MethodType
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_spmd.ir.steps import OutputRef

_DEPTH = 6


def same_tensor(one: Tensor, other: Tensor) -> bool:
    """Whether they are one tensor, or two that hold the same."""
    if one is other:
        return True
    if isinstance(one, DTensor) or isinstance(other, DTensor):
        return False
    if (one.shape, one.dtype, one.device, one.layout) != (other.shape, other.dtype, other.device, other.layout):
        return False
    if one.layout is not torch.strided:
        return False
    try:
        with torch.no_grad():
            return bool(((one == other) | ((one != one) & (other != other))).all())
    except RuntimeError:  # a tensor without values
        return False


def same_plain(one: Any, other: Any, depth: int = _DEPTH) -> bool:
    """Equality that distinguishes 1 from 1.0 and True, knows NaN, and compares containers, functions and plain objects.

    Objects without ``__eq__`` and without attributes cannot be distinguished and count as equal.
    """
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if depth == 0:
        return True

    def same(a: Any, b: Any) -> bool:
        return same_plain(a, b, depth - 1)

    ours, theirs = _parts(one), _parts(other)
    if ours is not None and theirs is not None:
        return ours.keys() == theirs.keys() and all(same(ours[key], theirs[key]) for key in ours)
    if isinstance(one, Tensor):
        return same_tensor(one, other)
    return _same_leaf(one, other, same)


def _parts(value: Any) -> dict[Any, Any] | None:
    """What a value consists of, by name; None for a leaf."""
    if isinstance(value, OutputRef):
        return {"position": value.position}
    if isinstance(value, (list, tuple)):
        return dict(enumerate(cast(Sequence[Any], value)))
    if isinstance(value, Mapping):
        return dict(cast(Mapping[Any, Any], value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name, None) for f in dataclasses.fields(value)}
    if isinstance(value, FunctionType):
        cells: Sequence[CellType] = value.__closure__ or ()
        inside = [cell.cell_contents for cell in cells if cell != CellType()]
        return {"code": value.__code__, "defaults": value.__defaults__, "closure": inside}
    if isinstance(value, functools.partial):
        return {"function": value.func, "args": value.args, "keywords": value.keywords}
    if isinstance(value, MethodType):
        return {"function": value.__func__, "owner": value.__self__}
    return None


def _same_leaf(one: Any, other: Any, same: Callable[[Any, Any], bool]) -> bool:
    if type(one).__eq__ is object.__eq__:
        return same(getattr(one, "__dict__", {}), getattr(other, "__dict__", {}))
    if getattr(one, "shape", None) != getattr(other, "shape", None):  # arrays of different shapes are broadcast
        return False
    try:
        answer = one == other
        if isinstance(answer, bool):
            return answer or bool(one != one and other != other)  # NaN
        return bool((answer | ((one != one) & (other != other))).all())
    except Exception:  # an equality that raises says no
        return False


def shown(value: Any, most: int = 160) -> str:
    """``repr`` in one line of at most ``most`` characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= most else f"{text[: most - 3]}..."
