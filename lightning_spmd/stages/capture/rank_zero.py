"""``@rank_zero_only`` functions of the user's that a step calls: all ranks make one graph, rank 0 does what they do.

While a step is captured they run on every rank. Calls that are recorded in one (of a logger, of ``print``) are marked,
and made again on rank 0 alone. Lightning's own functions of that kind run where they always do, but for those that log.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import FrameType

from lightning_spmd import _private_api as private
from lightning_spmd.stages.capture.user_code import is_user_code, trace_file

_LOGGING = frozenset({"rank_zero_info", "rank_zero_debug"})


@contextlib.contextmanager
def rank_zero_functions_run() -> Iterator[None]:
    """Inside, the user's functions that rank 0 alone runs run on every rank."""
    rank = private.rank_zero_only_rank()
    if not rank:
        yield
        return
    private.set_rank_zero_only(_Rank(rank))
    try:
        yield
    finally:
        private.set_rank_zero_only(rank)


def is_for_rank_zero() -> bool:
    """Whether the user's code that runs is called by a function that rank 0 alone runs."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - documented in `sys`
    while frame is not None and frame.f_code.co_filename != trace_file():
        if frame.f_code is private.RANK_ZERO_CODE:
            return True
        frame = frame.f_back
    return False


class _Rank(int):
    """A rank that is 0 for the decorator where it asks on behalf of the user's function."""

    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        return int.__eq__(self, other) is True or (other == 0 and _asks_for_the_user(sys._getframe(1)))

    def __ne__(self, other: object) -> bool:
        return not self == other


def _asks_for_the_user(frame: FrameType) -> bool:
    if frame.f_code is not private.RANK_ZERO_CODE:
        return False
    code = getattr(frame.f_locals.get("fn"), "__code__", None)
    if code is None:
        return False
    return code.co_name in _LOGGING or is_user_code(code, frame.f_locals["fn"].__globals__)
