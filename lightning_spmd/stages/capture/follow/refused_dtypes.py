"""Dtypes that a kernel refuses: fake tensors do not know, and the step may catch the error where it makes the call."""

from __future__ import annotations

import functools
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
        Exception: the kernel's own; it takes neither zeros nor ones, so values are not what it refuses.
    """
    tensors = tensors_in((args, kwargs))
    dtypes = tuple([tensor.dtype for tensor in tensors])
    if _ALL_TAKE.issuperset(dtypes) and sum(dtype.is_floating_point for dtype in set(dtypes)) < 2:
        return
    key = func, dtypes
    if key in _TAKEN or func.namespace != "aten" or func.is_view or torch.Tag.nondeterministic_seeded in func.tags:
        return
    sizes = [size for tensor in tensors for size in tensor.shape]
    if any(tensor.device.type != "cpu" for tensor in tensors) or not all(type(size) is int for size in sizes):
        return
    for make in (torch.zeros, torch.ones):
        try:
            with private.disable_dispatch_modes(), torch.no_grad():
                real = mapped(functools.partial(_as, make), (args, kwargs))
                func(*real[0], **real[1])
        except Exception:
            if make is torch.ones:
                raise
        else:
            _TAKEN.add(key)
            return


def _as(make: Any, value: Any) -> Any:
    return make(value.shape, dtype=value.dtype) if isinstance(value, Tensor) else value
