"""``torch.equal`` and ``torch.allclose``: a comparison of all elements in the graph, and one boolean that is read.

``torch.cov`` and ``torch.corrcoef`` use them to check for enough observations; these numbers are known.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

Call = Callable[..., Any]
COMPARISONS = (aten.equal.default, aten.allclose.default)


def is_comparable(func: Any, one: Tensor, other: Tensor) -> bool:
    """Whether the graph may compare two tensors; those of two dtypes or devices are for eager training to judge."""
    alike = one.dtype == other.dtype and one.device == other.device
    return alike and (func is aten.equal.default or one.dtype.is_floating_point)


def same_elements(call: Call, one: Tensor, other: Tensor) -> Tensor | None:
    """Whether two tensors are equal, as a tensor; None if they have not the same shape."""
    if one.shape != other.shape:
        return None
    return call(aten.all.default, call(aten.eq.Tensor, one, other))


def close_elements(
    call: Call, one: Tensor, other: Tensor, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False
) -> Tensor:
    """Whether all elements are close, as a tensor: what ATen computes, which is no operator of its own."""
    close = call(aten.eq.Tensor, one, other)
    if equal_nan:
        both = call(aten.logical_and.default, call(aten.ne.Tensor, one, one), call(aten.ne.Tensor, other, other))
        close = call(aten.logical_or.default, close, both)
    if rtol or atol:
        allowed = call(aten.add.Scalar, call(aten.abs.default, call(aten.mul.Scalar, other, rtol)), atol)
        apart = call(aten.abs.default, call(aten.sub.Tensor, one, other))
        finite = call(aten.lt.Scalar, apart, math.inf)
        near = call(aten.logical_and.default, finite, call(aten.le.Tensor, apart, allowed))
        close = call(aten.logical_or.default, close, near)
    return call(aten.all.default, close)
