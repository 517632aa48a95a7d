"""Arithmetic on recorded numbers that may raise where the user's code catches it.

    try: weight = 1 / int(mask.sum())
    except ZeroDivisionError: weight = 0.0

In a graph nobody catches. So where an ``except`` stands around such an operation, whether it raises is a decision like
any other: a graph holds for steps in which it does, or for those in which it does not.
"""

from __future__ import annotations

import dis
import functools
import inspect
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FrameType
from typing import Any

from lightning_spmd.stages.capture.host_scalar import HostScalar
from lightning_spmd.stages.capture.user_code import frames_of_the_user

_DIVIDE = {operator.truediv, operator.floordiv, operator.mod}
_RAISE = {operator.pow, int, round, math.floor, math.ceil, math.trunc, *_DIVIDE}
_ERRORS = (ArithmeticError, ValueError)


def may_be_caught(function: Callable[..., Any], operands: Sequence[HostScalar]) -> bool:
    """Whether a function may raise in other steps than this one, and an ``except`` of the user's stands around it.

    Args:
        function: it.
        operands: its arguments.
    """
    if function not in _RAISE and getattr(function, "__module__", "") != "math":
        return False
    changing = operands[1:] if function in _DIVIDE else operands
    if all(o.node is None for o in changing):
        return False
    return any(_catches(frame) for frame in frames_of_the_user(inspect.currentframe()))


@functools.cache
def raises(function: Callable[..., Any]) -> Callable[..., bool]:
    """Says whether a function raises; the same one in each trace, and of the same name on each rank."""

    def question(*operands: Any) -> bool:
        try:
            function(*operands)
        except _ERRORS:
            return True
        return False

    question.__name__ = question.__qualname__ = f"{function.__name__} raises"
    return question


def _catches(frame: FrameType) -> bool:
    return any(begin <= frame.f_lasti < end for begin, end in _caught_in(frame.f_code))


@functools.cache
def _caught_in(code: CodeType) -> tuple[tuple[int, int], ...]:
    """Where in a code object an error may be caught: within ``try`` and ``with suppress(...)``."""
    if not code.co_exceptiontable:
        return ()
    steps = {step.offset: step.opname for step in dis.get_instructions(code)}
    suppresses = "suppress" in code.co_names
    return tuple(_entries(code, steps, suppresses=suppresses))


def _entries(code: CodeType, steps: dict[int, str], *, suppresses: bool) -> Iterator[tuple[int, int]]:
    entries: Any = dis.Bytecode(code).exception_entries  # pyright: ignore[reportAttributeAccessIssue]
    for entry in entries:
        handler = [steps[offset] for offset in sorted(steps) if offset >= entry.target][:2]
        if handler[:1] != ["PUSH_EXC_INFO"]:
            continue  # what ends an ``except`` clause
        if handler[1:] != ["WITH_EXCEPT_START"] or suppresses:
            yield entry.start, entry.end
