"""Random numbers that a step draws from Python and NumPy are the same on all ranks, as on one device."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

from lightning_spmd.messages import the_step, warn
from lightning_spmd.stages.runtime.control import ControlPlane


@contextlib.contextmanager
def as_on_rank_zero(control: ControlPlane) -> Iterator[None]:
    """Python inside draws what rank 0 does; if it does not draw, generators are each rank's own again.

    Args:
        control: messages among the ranks, which are all here.
    """
    mine = _states()
    first = control.gather(mine)[0]
    differ = any(control.gather(repr(first) != repr(mine)))
    if differ:
        _set_states(first)
    try:
        yield
    finally:
        if differ and repr(_states()) == repr(first):
            _set_states(mine)
        elif differ:
            warn(
                f"{the_step()} draws random numbers of Python or NumPy, whose states differ between the ranks; all "
                "ranks go on with rank 0's, so that they draw what one device would"
            )


def _states() -> tuple[Any, Any]:
    numpy = sys.modules.get("numpy")
    legacy = None if numpy is None else numpy.random.get_state()
    return random.getstate(), None if legacy is None else (legacy[0], legacy[1].tolist(), *legacy[2:])


def _set_states(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    numpy = sys.modules.get("numpy")
    if numpy is not None and states[1] is not None:
        numpy.random.set_state(states[1])
