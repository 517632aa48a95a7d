"""Random numbers that a step draws from Python and NumPy are the same on all ranks, as on one device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from lightning_spmd.ir.random_states import python_random_states, set_python_random_states
from lightning_spmd.messages import the_step, warn
from lightning_spmd.stages.runtime.agreement.control import ControlPlane


@contextlib.contextmanager
def as_on_rank_zero(control: ControlPlane) -> Iterator[None]:
    """Python inside draws what rank 0 does; if it does not draw, generators are each rank's own again.

    Args:
        control: messages among the ranks, which are all here.
    """
    mine = python_random_states()
    first = control.gather(mine)[0]
    differ = any(control.gather(repr(first) != repr(mine)))
    if differ:
        set_python_random_states(first)
    try:
        yield
    finally:
        if differ and repr(python_random_states()) == repr(first):
            set_python_random_states(mine)
        elif differ:
            warn(
                f"{the_step()} draws random numbers of Python or NumPy, whose states differ between the ranks; all "
                "ranks go on with rank 0's, so that they draw what one device would"
            )
