"""What the package says while it runs: on rank zero alone, every time it is said, at the user's own line where known.

``warnings.warn`` shows a text once for each place that warns: in one process a second ``fit`` would fall back mutely.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from lightning_utilities.core import rank_zero
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_only

_LOCATION = re.compile(r"(?:\bat |\()(\S[^\n:()]*):(\d+)\b")


_METHOD: ContextVar[str] = ContextVar("method", default="training_step")
# As Lightning names the hooks around each step.
_STAGES = {"training_step": "train", "validation_step": "validation", "test_step": "test", "predict_step": "predict"}


def speaking_of(method: str) -> contextlib.AbstractContextManager[None]:
    """A context in which messages name this step method: the same code makes graphs of all of them."""
    return _UNCHANGED if _METHOD.get() == method else _speaking_of(method)


_UNCHANGED = contextlib.nullcontext()


@contextlib.contextmanager
def _speaking_of(method: str) -> Iterator[None]:
    token = _METHOD.set(method)
    try:
        yield
    finally:
        _METHOD.reset(token)


def the_step() -> str:
    """``training_step``, or the method that runs in its place."""
    return _METHOD.get()


def batch_hook(moment: str) -> str:
    """The hook before (``"start"``) or after (``"end"``) each step: ``on_train_batch_end``."""
    return f"on_{_STAGES[the_step()]}_batch_{moment}"


_HEARERS: list[list[str]] = []


def hear(said: list[str]) -> None:
    """From now on everything that is said is also put into a list."""
    _HEARERS.append(said)


def hear_no_more(said: list[str]) -> None:
    """The end of :func:`hear`."""
    _HEARERS[:] = [hearer for hearer in _HEARERS if hearer is not said]


def _note(text: str) -> None:
    for hearer in _HEARERS:
        hearer.append(text)


def tell(text: str) -> None:
    """An info message of Lightning's logger."""
    _note(text)
    mention(text)


def mention(text: str) -> None:
    """The same of what is no longer true when a table of the run is made."""
    with _above_the_bar():
        rank_zero_info(text)


_PRINTERS: list[Callable[[str], None]] = []


@contextlib.contextmanager
def printing_with(printer: Callable[[str], None] | None) -> Iterator[None]:
    """While a progress bar is visible, log lines on the terminal are printed above it, not through it.

    Args:
        printer: prints a text above the bar; None: nobody watches one.
    """
    if printer is not None:
        _PRINTERS.append(printer)
    try:
        yield
    finally:
        if printer is not None:
            _PRINTERS.remove(printer)


class _Above:
    """A stream whose lines go above the progress bar."""

    def __init__(self, printer: Callable[[str], None]) -> None:
        self._printer = printer

    def write(self, text: str) -> None:
        """A line of the log, with its end."""
        self._printer(text.removesuffix("\n"))

    def flush(self) -> None:
        """Nothing is kept."""


@contextlib.contextmanager
def _above_the_bar() -> Iterator[None]:
    """Handlers of Lightning's logger that write on the terminal print above the bar; files and others as ever."""
    # Not by its name: where pytorch_lightning is imported as well, whichever came last has put its own there.
    logger: logging.Logger | None = rank_zero.log if _PRINTERS else None
    moved: list[tuple[logging.StreamHandler[Any], Any]] = []
    while logger is not None:
        for handler in logger.handlers:
            stream = getattr(handler, "stream", None)
            if type(handler) is logging.StreamHandler and getattr(stream, "isatty", lambda: False)():
                moved.append((handler, handler.setStream(_Above(_PRINTERS[-1]))))  # type: ignore[arg-type]
        logger = logger.parent if logger.propagate else None
    try:
        yield
    finally:
        for handler, stream in moved:
            handler.setStream(stream)


def warn(text: str, category: type[Warning] = UserWarning, *, everywhere: bool = False) -> None:
    """A warning; shown at the text's first ``at file:line`` or ``(file:line)``; ``everywhere``: by every rank."""
    _note(text)
    (_warn if everywhere else rank_zero_only(_warn))(text, category)


def _warn(text: str, category: type[Warning]) -> None:
    found = _LOCATION.search(text)
    file, line = (found[1], int(found[2])) if found else (__file__, 1)
    # a registry of its own, for the shared one remembers what was said already; filters count as ever
    warnings.warn_explicit(text, category, file, line, module=__name__, registry={})


def place_of(code: Any) -> str:
    """``" (file:line)"`` of a function, method, class or callable object; empty where Python does not know."""
    code = inspect.unwrap(getattr(code, "__func__", code))
    code = getattr(code, "func", code)  # functools.partial
    compiled = getattr(code, "__code__", None)
    if compiled is not None:
        return f" ({compiled.co_filename}:{compiled.co_firstlineno})"
    kind = code if inspect.isclass(code) else type(code)
    try:
        return f" ({inspect.getsourcefile(kind)}:{inspect.getsourcelines(kind)[1]})"
    except (OSError, TypeError):
        return ""
