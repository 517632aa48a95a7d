"""The memory layout of a tensor, derived from its shape and strides.

A tensor is *dense* if its elements fill their memory without gaps and overlaps, in any order of dimensions: plain
(row-major), channels-last, transposed. Most operators accept any layout. Some depend on it: torch's fused optimizers on
the host walk parameter, gradient and state side by side in memory order, whatever their strides. So a graph's tensors
must have the layouts of the captured graph; :func:`walked` says where that is checked.

Strides of dimensions of size one mean nothing. A tensor without elements has every layout.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from lightning_spmd.ir.node_info import TensorSpec, spec_of

_FUSED = [getattr(torch.ops.aten, f"_fused_{name}_") for name in ("adam", "adamw", "sgd", "adagrad")]
_WALKERS = {getattr(packet, overload) for packet in _FUSED for overload in packet.overloads()}
"""Operators on lists whose kernels on the host walk the memory of an index's tensors side by side."""


def is_dense(spec: TensorSpec) -> bool:
    """Whether the elements fill their memory without gaps or overlaps, in any order of dimensions."""
    if spec.numel == 0:
        return True
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(spec.shape, spec.stride, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def memory_order(spec: TensorSpec) -> tuple[int, ...]:
    """The dimensions of a dense tensor from the outermost in memory to the innermost; in order if it is not dense.

    Dimensions of size one keep their place if the others are in order, so that memory is row-major.
    """
    plain = tuple(range(len(spec.shape)))
    large = [d for d in plain if spec.shape[d] != 1]
    if not is_dense(spec) or large == sorted(large, key=lambda d: -spec.stride[d]):
        return plain
    return tuple(sorted(plain, key=lambda d: (-spec.stride[d], d)))


def strides_in_order(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Strides of a dense tensor of this shape with this order of dimensions, the outermost first."""
    strides, step = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


Layout = tuple[tuple[int, int], ...]
"""Dimensions from the innermost in memory to the outermost, each with how its elements follow those inside: 0 without a
gap, 1 with a gap of one element of the next dimension, else the complement of its stride. Kernels look at strides of
dimensions of size one, too: images of one channel may lie with channels last."""


@functools.lru_cache(maxsize=4096)
def layout_of(shape: Sequence[int], stride: Sequence[int]) -> Layout | None:
    """What tensors of other sizes that lie alike have in common; None of row-major ones.

    A part of a larger tensor (``padded[:, :longest]``) keeps the strides of the whole, or lacks one element
    (``tokens[:, :-1]``).

    Args:
        shape: of a tensor.
        stride: of it.
    """
    found, dense, gap = list[tuple[int, int]](), 1, 1
    for d in sorted(range(len(shape)), key=lambda d: (stride[d], -d)):
        how = 0 if stride[d] == dense else 1 if found and stride[d] == dense + gap else ~stride[d]
        found.append((d, how))
        dense, gap = (dense, gap) if shape[d] == 1 else (stride[d] * shape[d], stride[d])
    return None if found == [(d, 0) for d in reversed(range(len(shape)))] else tuple(found)


def strides_as(layout: Layout | None, shape: Sequence[Any]) -> tuple[Any, ...]:
    """Strides of a tensor of another shape with the layout of :func:`layout_of`; sizes may be symbols.

    A symbol is compared with the strides of a larger tensor, which its part is within.
    """
    if layout is None:
        layout = tuple([(d, 0) for d in reversed(range(len(shape)))])
    strides, dense, gap = dict[int, Any](), 1, 1
    for d, how in layout:
        strides[d] = dense + gap * how if how >= 0 else ~how
        bool(how >= 0 or dense <= strides[d])  # of symbols this is a condition
        is_one = type(shape[d]) is int and shape[d] == 1
        dense, gap = (dense, gap) if is_one else (strides[d] * shape[d], strides[d])
    return tuple([strides[d] for d in range(len(shape))])


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of the plain tensor of this shape."""
    return strides_in_order(shape, range(len(shape)))


def is_plain(spec: TensorSpec) -> bool:
    """Whether the tensor is row-major without gaps."""
    return lies_as(spec, TensorSpec(spec.shape, row_major(spec.shape), spec.dtype, spec.device))


def densely(spec: TensorSpec) -> TensorSpec:
    """A dense tensor with the same memory order; a row-major one if the tensor has gaps or overlaps."""
    return TensorSpec(spec.shape, strides_in_order(spec.shape, memory_order(spec)), spec.dtype, spec.device)


def lies_as(tensor: TensorSpec, other: TensorSpec) -> bool:
    """Whether two tensors of one shape have the same strides wherever they matter."""
    if 0 in tensor.shape:
        return True
    sizes = zip(tensor.shape, tensor.stride, other.stride, strict=True)
    return all(size == 1 or one == two for size, one, two in sizes)


def has_layout(tensor: Tensor, spec: TensorSpec) -> bool:
    """As :func:`lies_as`, for a tensor."""
    sizes = zip(tensor.shape, tensor.stride(), spec.stride, strict=True)
    return tensor.numel() == 0 or all(size == 1 or got == wanted for size, got, wanted in sizes)


def in_layout(tensor: Tensor, spec: TensorSpec) -> Tensor:
    """The tensor itself, or a copy in the layout of ``spec``."""
    if has_layout(tensor, spec):
        return tensor
    return torch.empty_strided(spec.shape, spec.stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def walked(node: fx.Node) -> Iterator[list[fx.Node]]:
    """For every index of an operator that walks memory the tensors that it takes side by side; nothing for others."""
    if not walks_memory(node.target):
        return
    lists: list[Any] = [a for a in node.args if isinstance(a, (list, tuple)) and a]
    for first, *others in zip(*lists, strict=True):
        # a step counter is one number, whatever the parameter is
        yield [first, *(n for n in others if spec_of(n).shape == spec_of(first).shape)]


def walks_memory(target: Any) -> bool:
    """Whether an operator is one of those."""
    return target in _WALKERS
