"""Dtypes that a kernel refuses: fake tensors do not know, and the step may catch the error where it makes the call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_spmd import _private_api as private
from lightning_spmd.stages.capture.follow.notes import mapped, tensors_in

_ALL_TAKE = {torch.float32, torch.float64, torch.int64, torch.bool}
_TAKEN = set[Any]()
"""Kernels with the dtypes that they have taken in this process."""


def check_dtypes(func: Any, args: Any, kwargs: Any) -> None:
    """Try out a kernel of the CPU on other or several floating dtypes when it is given them first.

    Args:
        func: an operator.
        args: fake tensors and others.
        kwargs: likewise.

    Raises:
        Exception: the kernel's own; it takes neither zeros nor ones, unless they have other dtypes.
    """
    if private.graph_task() != -1:  # what a kernel kept for its gradient, others cannot make up
        return
    tensors = tensors_in((args, kwargs))
    dtypes = tuple([tensor.dtype for tensor in tensors])
    if _ALL_TAKE.issuperset(dtypes) and sum(dtype.is_floating_point for dtype in set(dtypes)) < 2:
        return
    key = func, dtypes
    if torch.uint8 in dtypes:  # may be memory of a kernel in a form of its own
        return
    if key in _TAKEN or func.namespace != "aten" or func.is_view or torch.Tag.nondeterministic_seeded in func.tags:
        return
    sizes = [size for tensor in tensors for size in tensor.shape]
    if any(tensor.device.type != "cpu" for tensor in tensors) or not all(type(size) is int for size in sizes):
        return
    if (error := _refuses(func, args, kwargs, lambda dtype: dtype)) is None:
        _TAKEN.add(key)
    elif _refuses(func, args, kwargs, _usual) is None:
        raise error


def _refuses(func: Any, args: Any, kwargs: Any, other: Callable[[torch.dtype], torch.dtype]) -> Exception | None:
    """What a kernel says against both zeros and ones; None if it takes one of them."""
    refused: Exception | None = None
    for make in (torch.zeros, torch.ones):

        def made(value: Any, make: Any = make) -> Any:
            return make(value.shape, dtype=other(value.dtype)) if isinstance(value, Tensor) else value

        try:
            with private.disable_dispatch_modes(), torch.no_grad():
                real = mapped(made, (args, kwargs))
                func(*real[0], **real[1])
        except Exception as error:
            refused = error
        else:
            return None
    return refused


def _usual(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_floating_point:
        return torch.float32
    return dtype if dtype.is_complex or dtype is torch.bool else torch.int64
