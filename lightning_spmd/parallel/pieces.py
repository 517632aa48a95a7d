"""Cuts tensors into the parts of the ranks of a mesh, and joins them. Placements are in the mesh's order.

A piece has the memory order of the whole, except that a chunk's dimension is outermost. So a chunk is one contiguous
range of a collective's message, and parameter, gradient and state have the same memory order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_spmd.ir.layout import memory_order, strides_in_order
from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.ir.placement import Chunk, Partial, Placement, Shard, ShardAxis, block_sizes


def local_shape(shape: Sequence[int], placements: Sequence[Placement], axes: Sequence[ShardAxis]) -> tuple[int, ...]:
    """This rank's shape of a tensor of global ``shape``."""
    local = list(shape)
    for placement, axis in zip(placements, axes, strict=True):
        if isinstance(placement, Shard):
            local[placement.dim] = axis.shard_size(local[placement.dim], placement.outer)
        elif isinstance(placement, Chunk):
            local[placement.dim] = axis.chunk(local[placement.dim])[1]
    return tuple(local)


def order_of_pieces(spec: TensorSpec, placements: Sequence[Placement]) -> tuple[int, ...]:
    """Dimensions of a rank's piece from the outermost in memory to the innermost."""
    chunked = dict.fromkeys(p.dim for p in placements if isinstance(p, Chunk))
    return (*chunked, *(d for d in memory_order(spec) if d not in chunked))


def local_spec(spec: TensorSpec, placements: Sequence[Placement], axes: Sequence[ShardAxis]) -> TensorSpec:
    """This rank's spec of a tensor: the tensor's own if the rank has all of it, otherwise a dense piece."""
    if not any(isinstance(p, (Shard, Chunk)) for p in placements):
        return spec
    shape = local_shape(spec.shape, placements, axes)
    stride = strides_in_order(shape, order_of_pieces(spec, placements))
    return TensorSpec(shape, stride, spec.dtype, spec.device)


def local_piece(tensor: Tensor, placements: Sequence[Placement], axes: Sequence[ShardAxis]) -> Tensor:
    """This rank's part of a whole tensor: a view if it is one range, otherwise a copy.

    Args:
        tensor: the whole tensor.
        placements: one entry per axis.
        axes: the mesh as the rank sees it.

    Raises:
        ValueError: for a partial sum, whose parts do not follow from the whole.
    """
    for placement, axis in zip(placements, axes, strict=True):
        if isinstance(placement, Partial):
            raise ValueError("a partial sum has no pieces")
        if isinstance(placement, Chunk):
            tensor = tensor.narrow(placement.dim, *axis.chunk(tensor.shape[placement.dim]))
        elif isinstance(placement, Shard):
            blocks = tensor.split(list(_blocks(tensor, placement)), placement.dim)
            mine = [b.narrow(placement.dim, *p) for b in blocks for p in axis.pieces(b.shape[placement.dim])]
            tensor = mine[0] if len(mine) == 1 else torch.cat(mine, placement.dim)
    return tensor


def joined(pieces: Sequence[Tensor], placement: Placement) -> Tensor:
    """The tensor of which the ranks of one axis hold ``pieces``. Join the innermost axis first."""
    if isinstance(placement, Chunk):
        return torch.cat(list(pieces), placement.dim)
    if isinstance(placement, Shard):
        blocks = [piece.split(list(_blocks(piece, placement)), placement.dim) for piece in pieces]
        return torch.cat([part for parts in zip(*blocks, strict=True) for part in parts], placement.dim)
    if isinstance(placement, Partial):
        raise ValueError("a partial sum is reduced, not joined")
    return pieces[0]


def _blocks(tensor: Tensor, placement: Shard) -> tuple[int, ...]:
    size = tensor.shape[placement.dim]
    sizes = block_sizes(size, placement.outer)
    if sizes is None:
        raise ValueError(f"a dimension of {size} does not consist of blocks as in {placement}")
    return sizes
