"""Which live tensors overlap in memory."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

Named = tuple[str, Tensor]


def shared(tensors: Iterable[Named]) -> list[tuple[Named, Named]]:
    """Pairs of tensors with an element in common."""
    plain = [named for named in tensors if _has_memory(named[1])]
    ordered = sorted(plain, key=lambda named: (str(named[1].device), named[1].data_ptr()))
    found: list[tuple[Named, Named]] = []
    for index, (name, tensor) in enumerate(ordered):
        end = tensor.data_ptr() + reach(tensor) * tensor.element_size()
        for other_name, other in ordered[index + 1 :]:
            if other.data_ptr() >= end or other.device != tensor.device:
                break
            if _meet(tensor, other):
                found.append(((name, tensor), (other_name, other)))
    return found


def _has_memory(tensor: Tensor) -> bool:
    plain = type(tensor) in (Tensor, nn.Parameter, nn.Buffer) and tensor.layout is torch.strided
    return plain and not tensor.is_meta and tensor.numel() > 0


def reach(tensor: Tensor) -> int:
    """Number of elements from the first one in memory to the last one."""
    return int(1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)))


def may_meet(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one storage overlap; pieces of a bucket, one behind the other, do not."""
    begins, ends = zip(*map(_extent, (one, other)), strict=True)
    return max(begins) < min(ends)


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Where the bytes of a tensor begin and end in its storage."""
    begin, size = int(tensor.storage_offset()), tensor.element_size()
    return begin * size, (begin + (reach(tensor) if tensor.numel() else 0)) * size


def _meet(one: Tensor, other: Tensor) -> bool:
    """Whether the elements of two tensors meet where their memory overlaps: columns of one matrix do not."""
    offset, rest = divmod(other.data_ptr() - one.data_ptr(), one.element_size())
    if rest or one.element_size() != other.element_size():
        return True
    taken = places_of(one, max(reach(one), offset + reach(other)))
    return bool(taken.as_strided(other.shape, other.stride(), offset).any())


def places_of(tensor: Tensor, length: int) -> Tensor:
    """Which of the storage elements from the tensor's first one on belong to it."""
    taken = torch.zeros(length, dtype=torch.bool)
    shape = [min(size, 1) if stride == 0 else size for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    taken.as_strided(shape, tensor.stride()).fill_(True)
    return taken
