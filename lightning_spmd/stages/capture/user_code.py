"""Whose code a frame is: the user's, or a library's whose own state is known (torch, Lightning, the standard library).

Other installed packages (transformers, timm) count as the user's code: the state that they keep is unknown here.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import os
import sys
import sysconfig
import threading
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor

from lightning_spmd import _private_api as private

_LIBRARIES = (
    "torch",
    "functorch",
    "torchgen",
    "lightning",
    "pytorch_lightning",
    "lightning_fabric",
    "lightning_utilities",
    "torchmetrics",
    "numpy",
    "sympy",
    "triton",
    "lightning_spmd",
)


def _folders() -> tuple[str, ...]:
    found: list[str] = []
    for name in _LIBRARIES:
        spec = importlib.util.find_spec(name)
        found += [] if spec is None else [os.path.join(p, "") for p in spec.submodule_search_locations or ()]
    return tuple(found)


_LIBRARY_FOLDERS = _folders()
_EXAMPLES = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(__file__))), "examples", "")
_NOTES = os.path.join(os.path.dirname(__file__), "followed_trace.py")  # where it makes calls that were noted
_STANDARD = tuple({os.path.join(sysconfig.get_path(k), "") for k in ("stdlib", "platstdlib")})
_INSTALLED = ("site-packages", "dist-packages")
_said = threading.local()


@functools.cache
def is_user_file(filename: str) -> bool:
    """Whether a source file is not of torch, Lightning, torchmetrics, NumPy, this package or the standard library."""
    if filename.startswith(_EXAMPLES):
        return True
    is_standard = filename.startswith(_STANDARD) and not is_installed(filename)
    return not is_standard and not filename.startswith(_LIBRARY_FOLDERS)


def is_installed(filename: str) -> bool:
    """Whether a source file belongs to an installed package."""
    return any(part in filename for part in _INSTALLED)


def is_user_code(code: CodeType, scope: dict[str, Any]) -> bool:
    """Whether a code object with these globals is the user's; generated code (dataclasses) is its module's."""
    if not code.co_filename.startswith("<"):
        return is_user_file(code.co_filename)
    name = scope.get("__name__")
    if name == "__main__":
        return True
    module = sys.modules.get(name) if isinstance(name, str) else None
    if module is None:
        return False
    filename = getattr(module, "__file__", None)
    return name not in sys.builtin_module_names if filename is None else is_user_file(filename)


def user_location() -> str | None:
    """``file:line`` of the innermost frame of the user's code, or None.

    Only what capture called counts: behind it the stack holds the script's line with ``trainer.fit``. Where there is no
    code of the user's, as in an optimizer or a layer of torch's own, its line there is taken.
    """
    noted: str | None = getattr(_said, "place", None)
    if noted is not None:
        return noted or None
    frame: FrameType | None = inspect.currentframe()
    else_taken: FrameType | None = None
    while frame is not None:
        code = frame.f_code
        file = code.co_filename
        if file == _NOTES:
            break
        if is_user_file(file) if file[:1] != "<" else is_user_code(code, frame.f_globals):
            return f"{file}:{frame.f_lineno}"
        if else_taken is None and _is_stated_in_torch(file):
            else_taken = frame
        frame = frame.f_back
    return None if else_taken is None else f"{else_taken.f_code.co_filename}:{else_taken.f_lineno}"


@contextlib.contextmanager
def located_at(place: str) -> Iterator[None]:
    """A context in which recorded calls are attributed to the user's code at ``place``."""
    before, _said.place = getattr(_said, "place", None), place
    try:
        yield
    finally:
        _said.place = before


def location_of(error: BaseException) -> str | None:
    """``file:line`` of the user's code, else of torch's optimizer or layer, closest to where ``error`` was raised."""
    found, else_taken, trace = None, None, error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        here = f"{frame.f_code.co_filename}:{trace.tb_lineno}"
        if is_user_code(frame.f_code, frame.f_globals):
            found = here
        elif _is_stated_in_torch(frame.f_code.co_filename):
            else_taken = here
        trace = trace.tb_next
    return found or else_taken


@functools.cache
def _is_stated_in_torch(file: str) -> bool:
    """Whether a file of torch holds code that a user chose by name; not what every optimizer or layer has in common."""
    chosen = "/torch/optim/" in file or "/torch/nn/modules/" in file
    return chosen and not file.endswith(("/optimizer.py", "/module.py"))


def class_in_words(kind: type) -> str:
    """What is said of a tensor whose class makes torch's calls itself, or wants their results to be of it."""
    return f"a tensor of class {kind.__qualname__} ({kind.__module__}): graphs have torch's own"


def not_in_graphs(tensor: Tensor) -> str | None:
    """What is said of a tensor of a kind that graphs do not have; None of others."""
    if private.is_another_class(type(tensor)):
        return class_in_words(type(tensor))
    if tensor.layout is torch.strided and not tensor.is_quantized:
        return None
    kind = "quantized" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
    return f"a {kind} tensor, which graphs do not have"
