"""States of the global random generators of torch, Python and NumPy: taken before a run, put back after it."""

from __future__ import annotations

import random
import sys
from typing import Any

from lightning_spmd import _private_api as private


class TorchRandomState:
    """The states of torch's default generators, of the host and of this rank's GPU, as they are now.

    The generators themselves are asked: while a step is followed, torch's functions for this are the user's.
    """

    def __init__(self) -> None:
        self._states = private.generator_states()

    def restore(self) -> None:
        """Put them back."""
        private.set_generator_states(self._states)


def python_random_states() -> tuple[Any, Any]:
    """The states of Python's and NumPy's generators as plain numbers; None for NumPy where it is not imported."""
    if "numpy" not in sys.modules:
        return random.getstate(), None
    name, numbers, *rest = sys.modules["numpy"].random.get_state()
    return random.getstate(), (str(name), numbers.tolist(), *rest)


def set_python_random_states(states: tuple[Any, Any]) -> None:
    """Set what :func:`python_random_states` gave, here or in another process."""
    random.setstate(states[0])
    if states[1] is not None and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(states[1])
