"""Recorded numbers that are NumPy's in eager training: ``np.sqrt(lam)``, ``rng.integers(4)``, ``np.mean([...])``.

Torch makes double precision of ``np.float64`` where it makes single precision of ``float``, ``isinstance(k, int)`` is
false of ``np.int64``, and a division by zero gives infinity. So such a number knows its type, and what is computed from
it is NumPy's, too, until ``float(x)`` or a function of ``math``.
"""

from __future__ import annotations

import functools
import math
import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lightning_spmd.errors import CaptureError
from lightning_spmd.messages import the_step
from lightning_spmd.stages.capture.host_scalar import HostScalar, scalar_of

_NAMES: dict[type, str] = {float: "float64", int: "int64", bool: "bool_"}
_DTYPES = {"float64": torch.float64, "int64": torch.int64, "bool": torch.bool, "bool_": torch.bool}
_OF_PYTHON = {int: torch.int64, bool: torch.bool}
_DIFFER = {
    operator.truediv: "true_divide",
    operator.floordiv: "floor_divide",
    operator.mod: "remainder",
    operator.pow: "power",
}
_STAY = (math.floor, math.ceil, math.trunc)
"""Of ``math``, what torch makes ``//`` of."""


def flagged(symbol: Any, kind: Any = None) -> Any:
    """A recorded number as one of NumPy's; other things as they are.

    Args:
        symbol: the number.
        kind: its type; None: the one of its size that computing gives.
    """
    scalar = scalar_of(symbol)
    return symbol if scalar is None else marked(scalar.as_plain(), kind).as_symbol()


def marked(scalar: HostScalar, kind: Any = None) -> HostScalar:
    """A recorded number that is NumPy's from here on."""
    scalar.of_numpy = kind or getattr(sys.modules["numpy"], _NAMES[type(scalar.sample)])
    return scalar


def check_type(value: Any, place: str) -> Any:
    """NumPy's type of a number that was drawn, or None.

    Raises:
        CaptureError: arithmetic with it is in a precision of its own.
    """
    if type(value).__module__ != "numpy":
        return None
    if type(value).__name__ not in _DTYPES:
        raise CaptureError(f"{the_step()} draws a {type(value).__name__}, whose arithmetic no graph follows", place)
    return type(value)


def as_numpy_does(function: Callable[..., Any], operands: Sequence[HostScalar]) -> Callable[..., Any]:
    """The function that NumPy has in place of Python's, where an operand is one of its numbers."""
    name = _DIFFER.get(function)
    return function if name is None or all(o.of_numpy is None for o in operands) else numpy_function(name)


def of_numpy_if(function: Callable[..., Any], operands: Sequence[HostScalar], result: HostScalar) -> HostScalar:
    """What a function gives; a number of NumPy's where an operand is one."""
    python = getattr(function, "__module__", "") == "math" and function not in _STAY
    return marked(result) if not python and any(o.of_numpy is not None for o in operands) else result


@functools.cache
def numpy_function(name: str) -> Callable[..., Any]:
    """A function of NumPy's that gives Python's numbers; the same one in each trace, of the same name on each rank."""
    original = getattr(sys.modules["numpy"], name)

    def function(*args: Any) -> Any:
        return original(*args).item()

    function.__name__ = function.__qualname__ = f"numpy.{name}"
    return function


def dtype_of(numbers: Sequence[Any]) -> torch.dtype:
    """Of the tensor that ``torch.tensor`` makes of these numbers."""
    found = [_dtype(number) for number in numbers]
    return functools.reduce(torch.promote_types, found)


def _dtype(number: Any) -> torch.dtype:
    scalar = scalar_of(number)
    if scalar is not None and scalar.of_numpy is not None:
        return _DTYPES[scalar.of_numpy.__name__]
    return _OF_PYTHON.get(type(number if scalar is None else scalar.sample), torch.get_default_dtype())
