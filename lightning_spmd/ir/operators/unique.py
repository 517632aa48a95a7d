"""``unique`` and ``unique_consecutive``, as operators that are told how many values there are.

The kernels are torch's own: which of equal values they keep (0 and -0), and in which order, is theirs to decide. So one
operator counts what they find, and the other finds it once the graph has that number as a size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_spmd.ir.operators.library import define_operator

aten = torch.ops.aten
_FLAT = aten._unique2.default  # noqa: SLF001 - an operator's public name
_Three = tuple[Tensor, Tensor, Tensor]


def _found(x: Tensor, dim: int | None, consecutive: bool, is_sorted: bool, inverse: bool, counts: bool) -> _Three:
    inverse, counts = (True, True) if dim is not None else (inverse, counts)  # as kernels of the host do in any case
    if consecutive:
        return aten.unique_consecutive.default(x, inverse, counts, dim)
    if dim is None:
        return _FLAT(x, is_sorted, inverse, counts)
    return aten.unique_dim.default(x, dim, is_sorted, inverse, counts)


def _count(x: Tensor, dim: int | None, consecutive: bool) -> Tensor:
    values = _found(x, dim, consecutive, True, False, False)[0]
    return torch.tensor(values.shape[dim or 0], device=x.device)


def _count_shape(x: Tensor, dim: int | None, consecutive: bool) -> Tensor:
    return x.new_empty((), dtype=torch.int64)


def _unique(
    x: Tensor, dim: int | None, consecutive: bool, is_sorted: bool, inverse: bool, counts: bool, size: int
) -> _Three:
    found = _found(x, dim, consecutive, is_sorted, inverse, counts)
    if found[0].shape[dim or 0] != size:
        raise RuntimeError(f"unique found {found[0].shape[dim or 0]} values where {size} were counted")
    return found


def _shapes(
    x: Tensor, dim: int | None, consecutive: bool, is_sorted: bool, inverse: bool, counts: bool, size: int
) -> _Three:
    def numbers(*shape: int) -> Tensor:
        return x.new_empty(shape, dtype=torch.int64)

    if dim is None:
        return x.new_empty(size), numbers(*x.shape) if inverse else numbers(0), numbers(size) if counts else numbers(0)
    others = [length for place, length in enumerate(x.shape) if place != dim % x.ndim]
    return x.new_empty(size, *others).movedim(0, dim), numbers(x.shape[dim]), numbers(size)


UNIQUE_COUNT = define_operator(
    "unique_count(Tensor x, int? dim, bool consecutive) -> Tensor",
    _count,
    _count_shape,
)
UNIQUE = define_operator(
    "unique(Tensor x, int? dim, bool consecutive, bool sorted, bool inverse, bool counts, SymInt size)"
    " -> (Tensor, Tensor, Tensor)",
    _unique,
    _shapes,
)
