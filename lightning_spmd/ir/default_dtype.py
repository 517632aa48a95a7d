"""Torch's default dtype, which decides what a factory without ``dtype`` makes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import fx

from lightning_spmd.ir.node_info import info_of


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


def as_recorded(node: fx.Node, called: Callable[..., Any]) -> Callable[..., Any]:
    """What a node calls, under the default that an operator of others was called under.

    Args:
        node: of a graph.
        called: its target, or what does the same.
    """
    dtype = info_of(node).default
    return called if dtype is torch.float32 else default_dtype(dtype)(called)
