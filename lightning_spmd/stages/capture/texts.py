"""Texts made of values that are known only after the graph ran: ``print(f"loss {loss.item():.3f}")``.

While a step is captured such a value gives a mark in place of its digits, where the text can only be printed, logged or
appended (``text_flow``). Recorded calls that take the text make it anew after each run. Elsewhere the text is of the
value itself, for which the graph then holds.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from lightning_spmd.errors import CaptureError
from lightning_spmd.ir.first import first
from lightning_spmd.messages import batch_hook, the_step
from lightning_spmd.stages.capture.host_scalar import scalar_of
from lightning_spmd.stages.capture.number_types import replaced
from lightning_spmd.stages.capture.text_flow import goes_to_a_sink
from lightning_spmd.stages.capture.user_code import is_user_code, is_user_file, user_location

_MARK = re.compile("\ue000([0-9]+)\ue001")
_KINDS: tuple[tuple[Any, type], ...] = ((torch.SymFloat, float), (torch.SymInt, int), (torch.SymBool, bool))


class Texts:
    """The marks of one trace."""

    def __init__(self) -> None:
        self._values: list[tuple[Any, str]] = []
        self._open: dict[int, str | None] = {}

    def mark(self, value: Any, spec: str) -> str | None:
        """What stands for ``format(value, spec)`` in the text that the user's code makes; None: it may not wait."""
        frame = sys._getframe(1)  # noqa: SLF001 - documented in `sys`
        while frame is not None and frame.f_code.co_filename[:1] != "<" and not is_user_file(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is None or not is_user_code(frame.f_code, frame.f_globals) or not goes_to_a_sink(frame):
            return None
        self._values.append((value, spec))
        number = len(self._values) - 1
        self._open[number] = user_location()
        return f"\ue000{number}\ue001"

    def parts(self, text: str) -> tuple[list[str], list[Any], list[str]] | None:
        """Constant pieces of a text, the values between them, and how each is formatted; None: it has no marks."""
        if "\ue000" not in text:
            return None
        found = _MARK.split(text)
        numbers = [int(n) for n in found[1::2]]
        for number in numbers:
            self._open.pop(number, None)
        return found[::2], [self._values[n][0] for n in numbers], [self._values[n][1] for n in numbers]

    def check(self) -> None:
        """Every text went where it was expected to go.

        Raises:
            CaptureError: somebody else has it.
        """
        if self._open:
            raise CaptureError(
                f"{the_step()} makes a text of a tensor's value that no graph can follow; print or log it with "
                f"print(), self.print() or logging, or do it in {batch_hook('end')}",
                first(self._open.values(), "open mark"),
            )

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Inside, ``f"{number:.3f}"`` and ``str(number)`` of recorded numbers are marks where they may be."""
        with contextlib.ExitStack() as stack:
            for kind, plain in _KINDS:
                stack.enter_context(replaced(kind, "__format__", self._format_of(plain)))
                stack.enter_context(replaced(kind, "__str__", self._str_of(kind)))
                stack.enter_context(replaced(kind, "__hash__", _hash_of(kind)))
            stack.enter_context(replaced(torch.SymFloat, "__round__", _rounded))
            yield

    def _format_of(self, plain: type) -> Callable[[Any, str], str]:
        def formatted(number: Any, spec: str) -> str:
            if scalar_of(number) is not None and (mark := self.mark(number, spec)) is not None:
                return mark
            return format(plain(number), spec)

        return formatted

    def _str_of(self, kind: Any) -> Callable[[Any], str]:
        before = kind.__str__

        def text(number: Any) -> str:
            scalar = scalar_of(number)
            mark = self.mark(number, "") if scalar is not None else None
            return before(number) if mark is None else mark

        return text


def _hash_of(kind: Any) -> Callable[[Any], int]:
    before = kind.__hash__

    def hashed(number: Any) -> int:
        scalar = scalar_of(number)
        return before(number) if scalar is None else hash(scalar.recorder.decide(scalar))

    return hashed


def _rounded(number: Any, digits: int | None = None) -> Any:
    rounded = number.node.round(*(() if digits is None else (digits,)))
    return rounded.as_symbol() if scalar_of(number) is not None else torch.SymFloat(rounded)
