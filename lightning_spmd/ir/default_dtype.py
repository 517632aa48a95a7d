"""Torch's default dtype, which decides what a factory without ``dtype`` makes, and autocast, likewise of products."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable
from typing import Any

import torch
from torch import fx

from lightning_spmd import _private_api as private
from lightning_spmd.ir.node_info import NodeInfo, info_of


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


@contextlib.contextmanager
def autocast_as(
    wanted: Iterable[tuple[str, torch.dtype]], *, keeps_casts: bool | None = None
) -> Generator[None, None, None]:
    """Calls inside have autocast for these types of devices, with its dtype, and for no others.

    It is off for parts in full precision, also under a precision that is on around the whole step.

    Args:
        wanted: types of devices with dtypes.
        keeps_casts: whether a weight is cast once for all calls in one block; None: as around it.
    """
    with contextlib.ExitStack() as stack:
        on = dict(wanted)
        for kind, _ in private.autocast_state() or ():
            if kind not in on:
                stack.enter_context(torch.autocast(kind, enabled=False))
        for kind, dtype in on.items():
            stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=keeps_casts))
        yield


@contextlib.contextmanager
def switches_of(info: NodeInfo) -> Generator[None, None, None]:
    """Calls inside have the default dtype and the autocast of a recorded call; who knows what it calls itself."""
    with default_dtype(info.default), autocast_as(info.autocast):
        yield


def as_recorded(node: fx.Node, called: Callable[..., Any]) -> Callable[..., Any]:
    """What a node calls, under the switches that an operator of others was called under.

    Args:
        node: of a graph.
        called: its target, or what does the same.
    """
    info = info_of(node)
    return called if info.default is torch.float32 and not info.autocast else switches_of(info)(called)
