"""When two Python values are the same for a graph that was captured with one of them."""

from __future__ import annotations

import datetime
import decimal
import enum
import fractions
import math
import pathlib
import re
import sys
from types import CodeType
from typing import Any

import torch
from torch import Tensor

NUMBERS = (bool, int, float, complex)
SIMPLE: frozenset[type] = frozenset(
    {
        *NUMBERS, str, bytes, type(None), type(Ellipsis), range, slice, CodeType,
        torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size,
        decimal.Decimal, fractions.Fraction, datetime.datetime, datetime.date, datetime.time, datetime.timedelta,
        pathlib.PosixPath, pathlib.WindowsPath, pathlib.PurePosixPath, pathlib.PureWindowsPath, re.Pattern,
    }
)  # fmt: skip
"""Types of values that never change and whose equality says everything."""


class Missing:
    """What is read where nothing is."""

    def __repr__(self) -> str:
        return "nothing"


MISSING = Missing()


def is_simple(value: Any) -> bool:
    """Whether the value never changes and equality says everything about it."""
    kind = type(value)
    if kind in SIMPLE or issubclass(kind, enum.Enum):
        return True
    if kind is tuple or kind is frozenset:
        return all(map(is_simple, value))
    numpy = sys.modules.get("numpy")
    return numpy is not None and issubclass(kind, (numpy.generic, numpy.dtype))


def same_simple(old: Any, new: Any) -> bool:
    """Equality of simple values that tells 1 from 1.0 and True, 0.0 from -0.0, and knows NaN."""
    kind = type(old)
    if kind is not type(new):
        return False
    if kind is float:
        return (old == new and math.copysign(1.0, old) == math.copysign(1.0, new)) or (old != old and new != new)
    if kind is complex:
        return same_simple(old.real, new.real) and same_simple(old.imag, new.imag)
    if kind is tuple:
        return len(old) == len(new) and all(map(same_simple, old, new))
    if kind is frozenset:
        return old == new and {(type(v), v) for v in old} == {(type(v), v) for v in new}
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(old, numpy.generic):
        return bool(old.tobytes() == new.tobytes())
    return bool(old == new)


def kind_of_tensor(tensor: Tensor) -> tuple[Any, ...]:
    """What a graph assumes of a tensor that it reads anew each step."""
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad, type(tensor)
