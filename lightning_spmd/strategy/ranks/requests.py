"""Requests to a run from outside: to end (SIGTERM), or to return to SLURM's queue."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_spmd import _private_api as private
from lightning_spmd import early_signals

_REQUEUE, _STOP = 1, 2


class Requests:
    """The requests that this process received, and those that all ranks know of.

    Args:
        trainer: the Trainer.
        requeue_signal: the signal by which SLURM announces the time limit; None if there is none.

    Attributes:
        requeue_signal: the signal by which SLURM announces the time limit; None if there is none.
        to_requeue: all ranks know that the job is to be requeued. They write a checkpoint at the end of this batch.
        answered: they have done so, and SLURM is about to end the job.
    """

    def __init__(self, trainer: Any, requeue_signal: int | None) -> None:
        self._trainer = trainer
        self.requeue_signal = requeue_signal
        self.to_requeue = False
        self.answered = False

    @property
    def told(self) -> int:
        """The requests to this process as a number; the largest of all ranks counts."""
        requeue = self.requeue_signal is not None and not self.answered and early_signals.received(self.requeue_signal)
        return _REQUEUE * requeue + _STOP * self.told_to_stop

    @property
    def told_to_stop(self) -> bool:
        """Whether this process received SIGTERM."""
        return private.told_to_stop(self._trainer)

    def hear(self, told: int) -> None:
        """Act on the requests of all ranks.

        Raises:
            SIGTERMException: on every rank, if one of them received SIGTERM and nothing has to be done first.
        """
        if told & _REQUEUE and self.requeue_signal is not None and not self.answered:
            self.to_requeue = True
        if told & _STOP and not self.to_requeue:
            raise SIGTERMException
