"""Requests to a run from outside: to end (SIGTERM), or to go back to SLURM's queue."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_spmd import _private_api as private
from lightning_spmd import early_signals

_REQUEUE, _STOP = 1, 2


class Requests:
    """What this process was told, and what all ranks know of it.

    Args:
        trainer: the Trainer.
        requeue_signal: number of the signal by which SLURM says that the time is nearly over; None: nobody does.

    Attributes:
        requeue_signal: likewise.
        to_requeue: all ranks know that the job is to be started again, and do at the end of this batch what that needs.
        answered: they have done so; SLURM is about to end the job.
    """

    def __init__(self, trainer: Any, requeue_signal: int | None) -> None:
        self._trainer = trainer
        self.requeue_signal = requeue_signal
        self.to_requeue = False
        self.answered = False

    @property
    def told(self) -> int:
        """What this process was told, as a number; of several ranks the largest counts."""
        requeue = self.requeue_signal is not None and not self.answered and early_signals.received(self.requeue_signal)
        return _REQUEUE * requeue + _STOP * self.told_to_stop

    @property
    def told_to_stop(self) -> bool:
        """Whether this process received SIGTERM."""
        return private.told_to_stop(self._trainer)

    def hear(self, told: int) -> None:
        """Act on what the ranks were told.

        Raises:
            SIGTERMException: on every rank; one of them was told to stop, and there is nothing to do before.
        """
        if told & _REQUEUE and self.requeue_signal is not None and not self.answered:
            self.to_requeue = True
        if told & _STOP and not self.to_requeue:
            raise SIGTERMException
