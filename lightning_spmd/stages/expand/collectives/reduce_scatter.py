"""Sums that end up sharded: reduce-scatters into pieces and chunks, in the order of the whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from lightning_spmd.errors import ExpansionError
from lightning_spmd.ir.layout import memory_order
from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.ir.placement import Chunk, ShardAxis
from lightning_spmd.parallel.pieces import order_of_pieces
from lightning_spmd.stages.expand.program.local_program import LocalProgram

aten = torch.ops.aten
_functional = torch.ops._c10d_functional


def permuted(program: LocalProgram, node: fx.Node, order: Sequence[int]) -> fx.Node:
    """A view whose first dimension is the one named first: row-major where ``node`` lies in that order."""
    return node if list(order) == sorted(order) else program.call(aten.permute.default, node, list(order))


def permuted_back(program: LocalProgram, node: fx.Node, order: Sequence[int]) -> fx.Node:
    """The inverse of :func:`permuted`."""
    return permuted(program, node, [order.index(d) for d in range(len(order))])


def _reduce_scatter(program: LocalProgram, node: fx.Node, axis: ShardAxis) -> fx.Node:
    """This rank's piece of a sum along the first dimension, the only one that the collective knows."""
    op = _functional.reduce_scatter_tensor.default
    rows, *rest = program.shape(node)
    return program.collective(op, node, (rows // axis.size, *rest), "sum", axis.size, axis.group)


def reduce_scatter_shards(program: LocalProgram, node: fx.Node, axis: ShardAxis, dim: int, spec: TensorSpec) -> fx.Node:
    """This rank's piece of a sum along any dimension, in the order of the whole."""
    order = memory_order(spec)
    outermost = (dim, *(d for d in order if d != dim))
    piece = _reduce_scatter(program, permuted(program, node, outermost), axis)
    piece = permuted_back(program, piece, outermost)
    if outermost == order:
        return piece
    dense = program.call(aten.clone.default, permuted(program, piece, order), memory_format=torch.contiguous_format)
    return permuted_back(program, dense, order)


def rank_dependent_slice(program: LocalProgram, node: fx.Node, dim: int, start: int, length: int) -> fx.Node:
    """A range whose place or length differs from rank to rank."""
    piece = program.call(aten.slice.Tensor, node, dim, start, start + length)
    piece.meta["rank_dependent"] = True
    return piece


def padded(program: LocalProgram, node: fx.Node, dim: int, size: int) -> fx.Node:
    """``node`` with zeros behind it along ``dim``, up to ``size``."""
    shape = program.shape(node)
    padding = [0, 0] * (len(shape) - 1 - dim) + [0, size - shape[dim]]
    padded = program.call(aten.constant_pad_nd.default, node, padding)
    padded.meta["rank_dependent"] = True
    return padded


def reduce_scatter_chunks(
    program: LocalProgram, node: fx.Node, target: Chunk, axis: ShardAxis, spec: TensorSpec, others: Sequence[ShardAxis]
) -> fx.Node:
    """This rank's chunk of a sum, over other axes too. Unequal chunks are padded: collectives move equal parts."""
    if target.dim != 0:
        raise ExpansionError(f"no way to chunks of dimension {target.dim}: they are of the first dimension")
    size, chunks, order = program.shape(node)[0], axis.chunks, order_of_pieces(spec, (target,))
    longest = axis.chunk_size(size)
    node = permuted(program, node, order)
    if longest * chunks.size != size:
        node = padded(program, node, 0, longest * chunks.size)
    piece = _reduce_scatter(program, node, chunks)
    for across in (axis.across, *others):
        piece = piece if across is None else program.all_reduce(piece, across)
    if longest * chunks.size != size:
        piece = rank_dependent_slice(program, piece, 0, 0, axis.chunk(size)[1])
    return permuted_back(program, piece, order)
