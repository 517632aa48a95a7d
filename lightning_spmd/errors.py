"""Exceptions of lightning_spmd. Each docstring says what the error means and what to do.

Everything a user can cause derives from :class:`SPMDError`, so one ``except`` catches it all.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextvars import ContextVar


class SPMDError(RuntimeError):
    """Base class of every error that lightning_spmd raises on purpose."""


class ConfigurationError(SPMDError, ValueError):
    """An argument, a Trainer flag or a hook does not fit this strategy.

    The message names the argument or flag, its value, the values that are allowed and the fix.
    """


class CaptureError(SPMDError):
    """``training_step`` (or the optimizer) did something that a graph cannot express.

    The message names the source line. With replicated parameters the step runs without a graph instead, and a message
    says so; move the statement into a hook such as ``on_train_batch_end``. ``docs/limits.md`` has a list.

    Args:
        message: what happened, where, and the fix.
        location: ``file:line`` in the user's code, where known.
    """

    def __init__(self, message: str, location: str | None = None) -> None:
        super().__init__(message if location is None else f"{message}\n  at {location}")
        self.location = location
        if (made := _made.get()) is not None:
            made.append(self)


class NoCommonGraphError(CaptureError):
    """A step has no graph for all numbers of rows or elements that the data may say: each of them gets its own."""


_made: ContextVar[list[CaptureError] | None] = ContextVar("capture errors that were made", default=None)


@contextlib.contextmanager
def none_swallowed() -> Iterator[None]:
    """Around code that is not ours and may catch a :class:`CaptureError`, which is a ``RuntimeError``, and go on.

    Raises:
        CaptureError: the first one that was created inside and did not get out.
    """
    made: list[CaptureError] = []
    token = _made.set(made)
    try:
        yield
    finally:
        _made.reset(token)
    if made:
        raise made[0]


def answered(errors: list[CaptureError]) -> None:
    """These errors were handled: torch tried one implementation after the other, and a later one worked."""
    made = _made.get()
    if made is not None:
        made[:] = [error for error in made if all(error is not other for other in errors)]


class BatchError(SPMDError, ValueError):
    """The batch cannot be split over the data-parallel ranks.

    Its tensors have no common first dimension, or the ranks hold tensors that differ in more than the batch dimension.
    ``SPMDStrategy(batch="local")`` takes each rank's batch as it is.

    Args:
        message: what does not fit, and the fix.
        is_ragged: each rank's batch is valid by itself, but together they are not one batch.
    """

    def __init__(self, message: str, *, is_ragged: bool = False) -> None:
        super().__init__(message)
        self.is_ragged = is_ragged


class ExpansionError(SPMDError):
    """A captured graph could not be turned into each rank's graph. The message names the operator and its module."""


class CannotShowError(SPMDError):
    """Gradients cannot be shown to hooks in the middle of an iteration's graph; two graphs take its place."""


class UpdateMustWaitError(SPMDError):
    """The update of a step reads what that step computes only now; another graph takes its place."""


class VerificationError(SPMDError):
    """A graph broke an invariant of its stage: a defect of lightning_spmd, please report it with the message."""


class RankDisagreementError(SPMDError):
    """The ranks do different things and would hang in the next collective.

    They built different graphs, or are at different places of the run. The message names the first difference and both
    sides. The usual cause is Python code that depends on the rank (``if self.global_rank == 0``) inside
    ``training_step``, ``configure_optimizers`` or a hook that stops or skips something on one rank alone.
    """


class RankLostError(SPMDError):
    """Another rank failed or its process ended, so training cannot go on.

    The message names the rank and what is known about it: the error that it raised, or the signal that ended it. Its
    own output says more. Processes that end without a message were often killed because memory ran out.
    """


def portable(problem: SPMDError) -> SPMDError:
    """The same error without what cannot be pickled (graph nodes)."""
    kind = type(problem) if type(problem).__module__ == SPMDError.__module__ else ExpansionError
    return kind(str(problem))


_FRAME = re.compile(r'^\s*File "([^"]+)", line (\d+)', re.MULTILINE)
_INSTALLED = ("site-packages", "dist-packages")
_LIBRARIES = ("torch", "lightning", "pytorch_lightning", "torchmetrics", "jsonargparse")
_STANDARD = tuple(os.path.join(sysconfig.get_path(kind), "") for kind in ("stdlib", "platstdlib"))
_PACKAGE = os.path.join(os.path.dirname(__file__), "")


def own_line(error: BaseException) -> str | None:
    """``file:line`` of the user's code closest to where an error was raised; None if there is none in its traceback.

    An error of a DataLoader's worker has its traceback in its text. A script that only called ``trainer.fit`` is not
    where an error inside was raised.

    Args:
        error: the error that was raised.
    """
    if "Original Traceback" in str(error):
        frames = [(file, int(line)) for file, line in _FRAME.findall(str(error))]
    else:
        frames = [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and error.filename:  # in a file that was to be imported
        frames.append((error.filename, error.lineno or 1))
    inside = next((number for number, (file, _) in enumerate(frames) if is_of_trainer(file)), 0)
    found = [frame for frame in frames[inside:] if is_own_file(frame[0])]
    return f"{found[-1][0]}:{found[-1][1]}" if found else None


def is_of_trainer(file: str) -> bool:
    """Whether a source file is Lightning's or this package's."""
    return file.startswith((_PACKAGE, *_folders("lightning")))


def is_own_file(file: str) -> bool:
    """Whether a source file is the user's: of no installed package, nor of the standard library."""
    if file.startswith(("<", _PACKAGE)) or any(part in file for part in _INSTALLED):
        return False
    return not file.startswith((*_STANDARD, *_folders(*_LIBRARIES)))


def _folders(*names: str) -> list[str]:
    """Folders of libraries, which may be installed from a checkout."""
    files = [getattr(sys.modules.get(name), "__file__", None) for name in names]
    return [os.path.join(os.path.dirname(file), "") for file in files if file]
