"""What a step prints and logs as text: recorded, and done again after each run with that run's values."""

from __future__ import annotations

import builtins
import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from lightning_spmd.stages.capture.user_code import is_user_code

Record = Callable[[str, tuple[Any, ...], dict[str, Any]], Any]
_LOGGING = "logging/__init__.py"
_ON_THE_WAY = (_LOGGING, "utilities/rank_zero.py", "core/rank_zero.py", "contextlib.py")


@contextlib.contextmanager
def prints_followed(record: Record, drop: Callable[[str], Any]) -> Iterator[None]:
    """Inside, ``print`` and ``logging`` of the user's code are recorded instead.

    Args:
        record: ``(name, args, kwargs)`` of what is done after each run.
        drop: told each text that nobody will see, for the level of its logger.
    """
    plain_print, plain_log = builtins.print, logging.Logger._log  # noqa: SLF001 - what all methods of a logger call
    plain_question = logging.Logger.isEnabledFor

    def recorded_print(*args: Any, **kwargs: Any) -> None:
        if _is_of_the_user(sys._getframe(1)):  # noqa: SLF001 - documented in `sys`
            record("print()", args, kwargs)
        else:
            plain_print(*args, **kwargs)

    def recorded_log(logger: logging.Logger, level: int, message: Any, args: Any, *rest: Any, **kwargs: Any) -> None:
        if _is_of_the_user(sys._getframe(1)):  # noqa: SLF001 - documented in `sys`
            # not kept: where the line is that logs, and an error that is being handled
            record("logging", (logger.name, level, message, args), {"extra": kwargs.get("extra")})
        else:
            plain_log(logger, level, message, args, *rest, **kwargs)

    def question(logger: logging.Logger, level: int) -> bool:
        answer, asking = plain_question(logger, level), sys._getframe(1)  # noqa: SLF001 - documented in `sys`
        if not answer and asking.f_code.co_filename.endswith(_LOGGING):
            for text in (asking.f_locals.get("msg"), *asking.f_locals.get("args", ())):
                if type(text) is str:
                    drop(text)
        return answer

    setattr(logging.Logger, "isEnabledFor", question)  # noqa: B010 - its parameter has another name
    builtins.print = recorded_print
    setattr(logging.Logger, "_log", recorded_log)  # noqa: B010 - its parameters have other names
    try:
        yield
    finally:
        logging.Logger.isEnabledFor = plain_question
        builtins.print, logging.Logger._log = plain_print, plain_log  # noqa: SLF001 - see above


def _is_of_the_user(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename.endswith(_ON_THE_WAY):
        frame = frame.f_back
    return frame is not None and is_user_code(frame.f_code, frame.f_globals)
