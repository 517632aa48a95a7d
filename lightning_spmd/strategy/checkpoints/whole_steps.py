"""No checkpoint of half a step: callbacks that save on exceptions write complete state or nothing.

A graph updates weights one after the other. Where it ends in the middle (Ctrl-C, a rank that is gone, no memory), some
are of this step and some of the one before, and a checkpoint of that would take the place of a good ``last.ckpt``.
And a rank that has failed alone must not wait for the others, which wait for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_spmd.ir.reads import ReadMiss
from lightning_spmd.messages import warn
from lightning_spmd.stages.runtime.trial_runs.trial_runs import FirstRunError

_UNDONE = (ReadMiss, FirstRunError)
"""Raised by runs that have changed nothing."""

_OF_ONE: dict[str, Any] = {
    "barrier": lambda *_, **__: None,
    "broadcast": lambda obj, *_, **__: obj,
    "reduce_boolean_decision": lambda decision, *_, **__: decision,
}
"""What callbacks that save ask all ranks, for a rank that is alone."""


class Wholeness:
    """Whether weights and optimizer state are those of a step that the Trainer has counted."""

    def __init__(self) -> None:
        self._broken = False
        self._batch: int | None = None

    @contextlib.contextmanager
    def changing(self, trainer: Any, *, updates: bool = True) -> Iterator[None]:
        """Inside, weights are changed.

        Args:
            trainer: counts batches.
            updates: the update of the batch that is being trained is among the changes.
        """
        before = self._batch
        self._batch = _batches(trainer) if updates else before
        try:
            yield
        except _UNDONE:
            self._batch = before
            raise
        except BaseException:
            self._broken = True
            raise

    def problem(self, trainer: Any) -> str | None:
        """Why no checkpoint can be written now, or None."""
        if self._broken:
            return "training ended in the middle of an update, so some weights may be of this step and some of the last"
        if self._batch is not None and self._batch == _batches(trainer):
            return "training ended between an update and the Trainer's counting it"
        return None


def _batches(trainer: Any) -> int:
    return int(trainer.fit_loop.epoch_loop.batch_progress.total.processed)


class OnlyWhole(Callback):
    """One of the first callbacks of a fit: decides what those behind it may save at an exception.

    Args:
        iteration: gives what trains, if that are graphs.
        alone: whether a rank can fail without the others.
        in_parts: whether a checkpoint takes all ranks.
    """

    def __init__(self, iteration: Callable[[], Any], *, alone: bool, in_parts: Callable[[], bool]) -> None:
        self._iteration = iteration
        self._alone = alone
        self._in_parts = in_parts

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Before callbacks that save."""
        alone = self._alone and not isinstance(exception, SIGTERMException)  # which all ranks raise at one place
        iteration = self._iteration()
        problem = None if iteration is None else iteration.context.whole.problem(trainer)
        if problem is None and alone and self._in_parts():
            problem = "each rank has a part of it, and this one does not know what the others do"
        if problem is not None:
            _refuse(trainer, problem)
        if alone:
            vars(trainer.strategy).update(_OF_ONE)


def _refuse(trainer: Any, problem: str) -> None:
    def refused(filepath: Any, *_: Any, **__: Any) -> None:
        warn(f"the checkpoint {filepath} is not written: {problem}. Those that were written before are as they were")

    trainer.save_checkpoint = refused
    vars(trainer.strategy)["remove_checkpoint"] = lambda *_, **__: None  # in favour of one that is not there


def save_as_ever(trainer: Any) -> None:
    """The fit is over."""
    vars(trainer).pop("save_checkpoint", None)
    for name in (*_OF_ONE, "remove_checkpoint"):
        vars(trainer.strategy).pop(name, None)
