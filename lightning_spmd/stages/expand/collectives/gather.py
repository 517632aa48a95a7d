"""Gathers of pieces, of blocks of unequal size, and of chunks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import fx

from lightning_spmd.errors import ExpansionError
from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.ir.placement import Chunk, ShardAxis, block_sizes
from lightning_spmd.parallel.pieces import order_of_pieces
from lightning_spmd.stages.expand.collectives import exchange
from lightning_spmd.stages.expand.collectives.reduce_scatter import padded, permuted, permuted_back
from lightning_spmd.stages.expand.program.local_program import LocalProgram

aten = torch.ops.aten
_functional = torch.ops._c10d_functional


def gather_chunks(
    program: LocalProgram, node: fx.Node, source: Chunk, size: int, axis: ShardAxis, spec: TensorSpec
) -> fx.Node:
    """The whole of a dimension of global ``size`` of which every rank holds a chunk."""
    if source.dim != 0:
        raise ExpansionError(f"no way from chunks of dimension {source.dim}: they are of the first dimension")
    longest, chunks, order = axis.chunk_size(size), axis.chunks, order_of_pieces(spec, (source,))
    equal = longest * chunks.size == size
    node = permuted(program, node, order)
    piece = node if equal else padded(program, node, 0, longest)
    shape = (longest * chunks.size, *program.shape(piece)[1:])
    op = _functional.all_gather_into_tensor.default
    gathered = program.collective(op, piece, shape, chunks.size, chunks.group)
    whole = gathered if equal else program.call(aten.slice.Tensor, gathered, 0, 0, size)
    return permuted_back(program, whole, order)


def gather_uneven_blocks(
    program: LocalProgram, node: fx.Node, dim: int, blocks: tuple[int, ...], axis: ShardAxis, whole: int
) -> fx.Node:
    """As :func:`_gather`: one collective of everything, then every block is put together from the ranks' pieces."""
    local = program.shape(node)
    before, rows, after = math.prod(local[:dim]), local[dim], math.prod(local[dim + 1 :])
    piece = exchange.reshaped(program, node, (before, rows, after))
    if not axis.is_even:
        sizes = block_sizes(whole, blocks) or ()
        merged = gather_padded(program, piece, sizes, axis)
        return program.dense(exchange.reshaped(program, merged, (*local[:dim], whole, *local[dim + 1 :])))
    ranks = _by_rank(program, piece, rows, axis)
    joined, start = [], 0
    for size in block_sizes(rows, blocks) or ():
        block = program.call(aten.slice.Tensor, ranks, 2, start, start + size)
        block = program.call(aten.transpose.int, block, 0, 1)
        joined.append(exchange.reshaped(program, block, (before, axis.size * size, after)))
        start += size
    merged = program.call(aten.cat.default, joined, 1)
    return exchange.reshaped(program, merged, (*local[:dim], axis.size * rows, *local[dim + 1 :]))


def gather_padded(program: LocalProgram, piece: fx.Node, sizes: Sequence[int], axis: ShardAxis) -> fx.Node:
    """Gather the middle dimension of ``(before, rows, after)``, in blocks of global ``sizes``; pieces may be uneven."""
    before, rows, after = program.shape(piece)
    longest = max(sum(axis.local_size(size, r) for size in sizes) for r in range(axis.size))
    if longest != rows or not axis.is_even:
        piece = program.call(aten.constant_pad_nd.default, piece, [0, 0, 0, longest - rows])
        piece.meta["rank_dependent"] = True
    pieces = program.call(aten.transpose.int, _by_rank(program, piece, longest, axis), 0, 1)
    merged = exchange.reshaped(program, pieces, (before, axis.size * longest, after))
    if axis.is_even:
        return merged
    order = program.constant(_rows_of_blocks(axis, sizes, longest, merged))
    return program.call(aten.index_select.default, merged, 1, order)


def _by_rank(program: LocalProgram, piece: fx.Node, rows: int, axis: ShardAxis) -> fx.Node:
    """``(rank, before, rows, after)`` of the pieces of all ranks."""
    before, _, after = program.shape(piece)
    gather = _functional.all_gather_into_tensor.default
    gathered = program.collective(gather, piece, (axis.size * before, rows, after), axis.size, axis.group)
    return program.call(aten.view.default, gathered, [axis.size, before, rows, after])


def _rows_of_blocks(axis: ShardAxis, sizes: Sequence[int], longest: int, like: fx.Node) -> torch.Tensor:
    """Where each row of consecutive blocks lies among the ranks' pieces, one behind the other and each padded."""
    rows: list[int] = []
    begin = [r * longest for r in range(axis.size)]
    for size in sizes:
        for r in range(axis.size):
            length = axis.local_size(size, r)
            rows += range(begin[r], begin[r] + length)
            begin[r] += length
    return torch.tensor(rows, device=like.meta["val"].device, dtype=torch.int64)
