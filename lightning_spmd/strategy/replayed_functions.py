"""Functions of Python, NumPy and logging that a step calls with values of tensors, done after each run."""

from __future__ import annotations

import builtins
import functools
import importlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from lightning_spmd.stages.capture.logger_calls import Itself


def _text(pieces: Sequence[str], values: Sequence[Any], specs: Sequence[str]) -> str:
    """A text with values in it."""
    words = [*map(format, values, specs), ""]
    return "".join(piece + word for piece, word in zip(pieces, words, strict=True))


def _log(name: str, level: int, message: Any, args: Any, *, extra: Any = None) -> None:
    logging.getLogger(name).log(level, message, *args, extra=extra)


def _numpy(kind: str, *args: Any, **kwargs: Any) -> Any:
    """What a recorded call of NumPy gives."""
    if kind == "array":
        return _array(args[0])
    if kind == "method":
        return getattr(args[1], args[0])(*args[2:], **kwargs)
    if kind == "item":
        return args[0][args[1]]
    if kind == "python":
        number = getattr(builtins, args[0])
        return number(*args[1:])
    if kind == "function":
        module, _, name = args[0].rpartition(".")
        return getattr(importlib.import_module(module), name)(*args[1], **args[2])
    function = getattr(importlib.import_module("numpy"), args[0])
    return (function if args[1] == "__call__" else getattr(function, args[1]))(*args[2:], **kwargs)


def _array(tensor: Tensor) -> Any:
    return tensor.detach().cpu().clone().numpy()  # an array of its own, as the graph may write again where it was


def _logger(root: Any, names: Sequence[str], /, *args: Any, **kwargs: Any) -> Any:
    """A call of a logger, or of something of it."""
    return _of_logger(root, names)(*args, **kwargs)


def _of_logger(root: Any, names: Sequence[str]) -> Any:
    found: Any = root.read() if isinstance(root, Itself) else root
    return functools.reduce(getattr, names, found)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "print()": print,
    "logging": _log,
    "text": _text,
    "numpy": _numpy,
    "logger": _logger,
    "logger's": _of_logger,
}
