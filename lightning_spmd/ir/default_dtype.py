"""Torch's default dtype, which decides what a factory without ``dtype`` makes."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

import torch


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Generator[None, None, None]:
    """Calls inside have this default.

    Graphs run with float32, for a recorded call without ``dtype`` was made where that was the default.

    Args:
        dtype: the default.
    """
    before = torch.get_default_dtype()
    if dtype is before:
        yield
        return
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
