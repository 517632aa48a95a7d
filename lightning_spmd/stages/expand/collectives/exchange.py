"""Split dimensions before and after a collective: which elements belong to which rank.

Collectives cut and join the first dimension of a tensor in equal pieces, one a rank. Here a split dimension becomes
that: ``(before, ranks · length, after) → (ranks, before, length, after)``, and back. On a folded axis a rank's piece is
two, the r-th of all and the r-th from the end.

==================  ====================================================  =====================================
change              collective                                            bytes that a rank sends
==================  ====================================================  =====================================
P → S in blocks     reduce_scatter of (ranks, piece)                      (N - 1) / N × size
S → S'              all_to_all of (ranks, piece of the other dimension)   (N - 1) / N × its own piece
S → R, folded       all_gather of pieces                                  its own piece
S → P               none: the piece among zeros                           nothing
==================  ====================================================  =====================================

All of them are a constant number of nodes at any number of ranks. Axes here hold equal shares.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import fx

from lightning_spmd.ir.placement import Chunk, Placement, Shard, ShardAxis
from lightning_spmd.stages.expand.program.local_program import LocalProgram

aten = torch.ops.aten
_functional = torch.ops._c10d_functional


def can_exchange(placement: Shard, axis: ShardAxis) -> bool:
    """Whether all ranks' pieces have the same size, in equal blocks, as the functions of this file require."""
    return axis.is_even and isinstance(placement.outer, int)


def pieces_first(program: LocalProgram, node: fx.Node, dim: int, outer: int, axis: ShardAxis) -> fx.Node:
    """``(N, before, piece, after)``, dense: entry r is rank r's piece of a whole dimension in ``outer`` blocks."""
    shape = program.shape(node)
    before, after = math.prod(shape[:dim]) * outer, math.prod(shape[dim + 1 :])
    length = shape[dim] // outer // axis.size
    if not axis.folded:
        pieces = reshaped(program, node, (before, axis.size, length, after))
        return program.dense(program.call(aten.transpose.int, pieces, 0, 1))
    halves = reshaped(program, node, (before, 2 * axis.size, length // 2, after))
    low = program.call(aten.slice.Tensor, halves, 1, 0, axis.size)
    high = program.call(aten.flip.default, program.call(aten.slice.Tensor, halves, 1, axis.size, 2 * axis.size), [1])
    both = program.call(aten.stack.default, [low, high], 2)
    pieces = reshaped(program, both, (before, axis.size, length, after))
    return program.dense(program.call(aten.transpose.int, pieces, 0, 1))


def pieces_joined(
    program: LocalProgram, node: fx.Node, shape: Sequence[int], dim: int, outer: int, axis: ShardAxis
) -> fx.Node:
    """The tensor of ``shape`` whose dimension ``dim``, in ``outer`` blocks, the ranks' pieces ``(N, ...)`` make up."""
    before, after = math.prod(shape[:dim]) * outer, math.prod(shape[dim + 1 :])
    length = shape[dim] // outer // axis.size
    if not axis.folded:
        pieces = program.call(aten.view.default, node, [axis.size, before, length, after])
        return program.dense(reshaped(program, program.call(aten.transpose.int, pieces, 0, 1), shape))
    pieces = program.call(aten.view.default, node, [axis.size, before, 2, length // 2, after])
    low = program.call(aten.select.int, pieces, 2, 0)
    high = program.call(aten.flip.default, program.call(aten.select.int, pieces, 2, 1), [0])
    halves = program.call(aten.cat.default, [low, high])
    return program.dense(reshaped(program, program.call(aten.transpose.int, halves, 0, 1), shape))


def reduce_scatter(program: LocalProgram, node: fx.Node, target: Shard, axis: ShardAxis) -> fx.Node:
    """This rank's piece of a sum, whatever the dimension and its blocks."""
    shape, outer = program.shape(node), _blocks(target)
    pieces = pieces_first(program, node, target.dim, outer, axis)
    whole = reshaped(program, pieces, (math.prod(shape),))
    op = _functional.reduce_scatter_tensor.default
    piece = program.collective(op, whole, (math.prod(shape) // axis.size,), "sum", axis.size, axis.group)
    return reshaped(program, piece, _with(shape, target.dim, shape[target.dim] // axis.size))


def all_gather(program: LocalProgram, node: fx.Node, source: Shard, axis: ShardAxis) -> fx.Node:
    """All ranks' pieces, in the order of the whole."""
    shape = program.shape(node)
    flat = reshaped(program, node, (math.prod(shape),))
    op = _functional.all_gather_into_tensor.default
    gathered = program.collective(op, flat, (math.prod(shape) * axis.size,), axis.size, axis.group)
    whole = _with(shape, source.dim, shape[source.dim] * axis.size)
    return pieces_joined(program, gathered, whole, source.dim, _blocks(source), axis)


def all_to_all(program: LocalProgram, node: fx.Node, source: Shard, target: Shard, axis: ShardAxis) -> fx.Node:
    """The tensor split along another dimension: every rank sends to each other one that one's part of its piece."""
    shape = program.shape(node)
    pieces = pieces_first(program, node, target.dim, _blocks(target), axis)
    shape = _with(shape, target.dim, shape[target.dim] // axis.size)
    equal = [1] * axis.size
    rows = reshaped(program, pieces, (axis.size, math.prod(shape)))
    op = _functional.all_to_all_single.default
    received = program.collective(op, rows, (axis.size, math.prod(shape)), equal, equal, axis.group)
    whole = _with(shape, source.dim, shape[source.dim] * axis.size)
    return pieces_joined(program, received, whole, source.dim, _blocks(source), axis)


def among_zeros(program: LocalProgram, node: fx.Node, source: Shard, axis: ShardAxis) -> fx.Node:
    """This rank's piece at its place in the whole, zeros elsewhere; the sum over the ranks is the whole."""
    shape = program.shape(node)
    size = math.prod(shape)
    flat = reshaped(program, node, (1, size))
    padding = [0, 0, axis.rank, axis.size - 1 - axis.rank]
    pieces = program.call(aten.constant_pad_nd.default, flat, padding)
    pieces.meta["rank_dependent"] = True
    whole = _with(shape, source.dim, shape[source.dim] * axis.size)
    return pieces_joined(program, pieces, whole, source.dim, _blocks(source), axis)


def positions(
    size: int, dim: int, placements: Sequence[Placement], axes: Sequence[ShardAxis]
) -> list[tuple[int, int]] | None:
    """(start, length) of this rank's parts of a dimension that several axes may split, in storage order.

    None if a placement splits it in blocks.
    """
    found = [(0, size)]
    for placement, axis in zip(placements, axes, strict=True):
        if not isinstance(placement, (Shard, Chunk)) or placement.dim != dim:
            continue
        if isinstance(placement, Shard) and placement.outer != 1:
            return None
        whole = sum(length for _, length in found)
        pieces = (axis.chunk(whole),) if isinstance(placement, Chunk) else axis.pieces(whole)
        found = [part for piece in pieces for part in _within(found, *piece)]
    return found


def _within(ranges: Sequence[tuple[int, int]], start: int, length: int) -> Iterator[tuple[int, int]]:
    """The part of consecutive ranges from their ``start``-th element on."""
    for first, size in ranges:
        taken = min(size - start, length) if start < size else 0
        if taken > 0:
            yield first + start, taken
        start, length = max(start - size, 0), length - taken


def own_index(
    size: int, index: int, dim: int, placements: Sequence[Placement], axes: Sequence[ShardAxis]
) -> int | None:
    """This rank's local index of ``index`` in a dimension that several axes may split; None if another rank has it."""
    here: int | None = index
    for placement, axis in zip(placements, axes, strict=True):
        if here is None or not isinstance(placement, (Shard, Chunk)) or placement.dim != dim:
            continue
        if isinstance(placement, Shard):
            here, size = axis.find(size, here, placement.outer), axis.shard_size(size, placement.outer)
        else:
            start, size = axis.chunk(size)
            here = here - start if start <= here < start + size else None
    return here


def reshaped(program: LocalProgram, node: fx.Node, shape: Sequence[int]) -> fx.Node:
    """``node`` in another shape: a view where that is possible."""
    if program.agreed(program.shape(node) == tuple(shape)):
        return node
    view = program.call_if_possible(aten.view.default, node, list(shape))
    if view is not None:
        return view
    whole = program.call(aten.clone.default, node, memory_format=torch.contiguous_format)
    return program.call(aten.view.default, whole, list(shape))


def _blocks(placement: Shard) -> int:
    if not isinstance(placement.outer, int):
        raise TypeError(f"{placement} has blocks of different sizes")
    return placement.outer


def _with(shape: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])
