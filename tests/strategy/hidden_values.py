"""A value that no guard sees, and steps that are traced again at every use of their graph."""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Callable
from typing import Any

from lightning_spmd.strategy.recheck import Schedule

_MEMORY = ctypes.c_double(1.0)


class InMemory:
    """A number at an address: nothing in Python tells that it changed."""

    def __init__(self, address: int) -> None:
        self.address = address

    @property
    def value(self) -> float:
        return ctypes.c_double.from_address(self.address).value

    @value.setter
    def value(self, number: float) -> None:
        ctypes.c_double.from_address(self.address).value = number


HIDDEN = InMemory(ctypes.addressof(_MEMORY))


def look_at_every_use(replace: Callable[..., None] = setattr) -> None:
    def is_due(*_: object) -> bool:
        return True

    replace(Schedule, "is_due", is_due)


def line_of(kind: Any) -> str:
    """The line of a class' or function's source that is marked HERE."""
    source, first = inspect.getsourcelines(kind)
    return f"test_recheck.py:{first + next((i for i, text in enumerate(source) if '# HERE' in text), 0)}"
