"""SLURM's signal before a job's time is over (``sbatch --signal=USR1@60``): noted from the first line on.

The package imports this file before anything else. Unless somebody listens the signal ends a process, and the imports
of a slow start take long. Under SLURM it is noted here, and nothing else happens in the handler; what is done about it
is in ``strategy/ranks/requeue.py``, at the end of a batch. It is blocked as well, because SLURM sends it to every
process of a task: a child process inherits that, and would inherit no handler.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Mapping
from typing import Any

_noted: set[int] = set()
_watched: set[int] = set()


def runs_under_slurm(environment: Mapping[str, str]) -> bool:
    """Whether Lightning would take its ranks from SLURM."""
    return "SLURM_NTASKS" in environment and environment.get("SLURM_JOB_NAME") not in ("bash", "interactive")


def watch(number: int) -> bool:
    """Note a signal from now on instead of dying of it; False if it has another handler already."""
    if number in _watched:
        if signal.getsignal(number) is _note:
            return True
        _unblock(number)  # for the handler that somebody put in place of ours
    if threading.current_thread() is not threading.main_thread():
        return False
    if signal.getsignal(number) is not signal.SIG_DFL:
        return False
    signal.signal(number, _note)
    signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    _watched.add(number)
    return True


def release() -> list[int]:
    """Leave the signals to others; the numbers of those that have come already."""
    come = []
    for number in list(_watched):
        if signal.getsignal(number) is _note:
            come += [number] if received(number) else []
            forget(number)
            signal.signal(number, signal.SIG_DFL)
        _unblock(number)
    return come


def _unblock(number: int) -> None:
    _watched.discard(number)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})


def is_watching() -> bool:
    """Whether any signal is noted here."""
    return bool(_watched)


def received(number: int) -> bool:
    """Whether a watched signal has come since it was last forgotten."""
    if number in signal.sigpending():
        with contextlib.suppress(InterruptedError):
            if signal.sigtimedwait({number}, 0) is not None:
                _noted.add(number)
    return number in _noted


def forget(number: int) -> None:
    """It has been answered."""
    received(number)
    _noted.discard(number)


def _note(number: int, _: Any) -> None:
    _noted.add(number)


if hasattr(signal, "SIGUSR1") and runs_under_slurm(os.environ):
    watch(signal.SIGUSR1)
