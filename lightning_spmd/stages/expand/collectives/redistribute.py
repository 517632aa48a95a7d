"""Placement changes: what they cost and how they are written.

==================  ====================================================  ==================================
change              local program                                         cost in bytes moved
==================  ====================================================  ==================================
R → S               slice (rank-dependent offset)                         none
R → P               keep on the first rank, zero elsewhere                none
P → R               all_reduce                                            2 × size
P → S               reduce_scatter, or all_reduce and slice               size (or as P → R)
P → C               reduce_scatter of what is padded to equal chunks, and  size
                    under hybrid sharding an all_reduce of the chunk
R → C, C → R        slice; all_gather of padded chunks                    none; size
S → R               all_gather; 4 × size counts as a penalty, since what  4 × size
                    is split usually is an activation
S → S'              all_to_all of equal pieces of two dimensions          4 × size / ranks
S → P               the piece among zeros                                 none; counts as through R
S → S', C → S, ...  otherwise through R
==================  ====================================================  ==================================

Every change is a constant number of nodes at any number of ranks.

What a collective sends is dense, its outermost dimension in memory first: elements travel in the order in which the
captured tensor has them, so that a channels-last gradient needs no copy and comes back channels-last. Pieces lie as
``parallel.pieces`` says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import fx

from lightning_spmd.cost.collectives import LATENCY, LOCAL_WORK, SPLIT_ACTIVATION, relative_bytes
from lightning_spmd.errors import ExpansionError
from lightning_spmd.ir.layout import is_dense, memory_order
from lightning_spmd.ir.node_info import Section, TensorSpec
from lightning_spmd.ir.placement import (
    PARTIAL,
    REPLICATE,
    Blocks,
    Brought,
    Chosen,
    Chunk,
    Partial,
    Placement,
    Replicate,
    Shard,
    ShardAxis,
    block_sizes,
)
from lightning_spmd.parallel.pieces import local_shape, order_of_pieces
from lightning_spmd.stages.expand.collectives import exchange
from lightning_spmd.stages.expand.collectives.exchange import can_exchange
from lightning_spmd.stages.expand.collectives.gather import gather_chunks, gather_padded, gather_uneven_blocks
from lightning_spmd.stages.expand.collectives.reduce_scatter import (
    permuted,
    permuted_back,
    rank_dependent_slice,
    reduce_scatter_chunks,
    reduce_scatter_shards,
)
from lightning_spmd.stages.expand.program.local_program import LocalProgram

aten = torch.ops.aten
_functional = torch.ops._c10d_functional

_UNINITIALIZED = (
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten.empty_like.default,
)


def cost(spec: TensorSpec, have: Placement, want: Placement, section: Section, axis: ShardAxis) -> float:
    """Cost of one placement change on ``axis`` of a tensor of this global spec, in bytes of ``cost.collectives``."""
    if have == want:
        return 0.0
    size = spec.bytes
    if any(isinstance(p, Shard) and isinstance(p.outer, Chosen) for p in (have, want)) and have != REPLICATE:
        return math.inf
    if any(isinstance(p, Shard) and isinstance(p.outer, Brought) for p in (have, want)):
        return math.inf
    if isinstance(have, Replicate):
        if isinstance(want, (Shard, Chunk)):
            return LOCAL_WORK * size
        # The optimizer's own arithmetic on a replicated state is never worth splitting into a partial sum.
        return 10.0 * size + 2 * LATENCY if section in (Section.OPTIMIZER, Section.CLIP) else 2 * LOCAL_WORK * size
    if isinstance(have, Partial):
        if isinstance(want, Partial):
            return math.inf
        kind = "all_reduce" if isinstance(want, Replicate) else "reduce_scatter"
        return relative_bytes(kind, axis.size) * size + LATENCY
    if _is_exchange(have, want, axis):
        return SPLIT_ACTIVATION * relative_bytes("all_to_all", axis.size) * size + LATENCY
    factor = 1.0 if isinstance(have, Chunk) else SPLIT_ACTIVATION
    moved = factor * relative_bytes("all_gather", axis.size) * size + LATENCY
    return moved + (0.0 if isinstance(want, Replicate) else cost(spec, REPLICATE, want, section, axis))


def goes_through_whole(have: Placement, want: Placement, axis: ShardAxis) -> bool:
    """Whether a change from one split to another puts the whole tensor together on the way."""
    return isinstance(have, Shard) and isinstance(want, Shard) and not _is_exchange(have, want, axis)


def _is_exchange(have: Placement, want: Placement, axis: ShardAxis) -> bool:
    """Whether ranks can send each other pieces of pieces."""
    return (
        isinstance(have, Shard)
        and isinstance(want, Shard)
        and have.dim != want.dim
        and can_exchange(have, axis)
        and can_exchange(want, axis)
    )


def redistribute(
    program: LocalProgram, node: fx.Node, spec: TensorSpec, have: Sequence[Placement], want: Sequence[Placement]
) -> dict[tuple[Placement, ...], fx.Node]:
    """Write the change of a tensor of this global spec from ``have`` to ``want``, axis by axis.

    What is split is put together from the innermost axis outwards, sums are scattered and pieces taken from the
    outermost inwards: so a dimension that two axes split is always split by the outer one first, as :func:`local_shape`
    says. Sums that every rank of an axis wants are reduced last, when other axes have made them smaller.

    Returns:
        The versions of the value that came to exist on the way which later readers may use, the wanted one last.
    """
    for source, target in zip(have, want, strict=True):
        if source != target and isinstance(source, Shard) and isinstance(source.outer, Chosen):
            raise ExpansionError("rows that values choose lie in each rank's own order: nothing puts them together")
    now = list(have)
    versions: dict[tuple[Placement, ...], fx.Node] = {}

    def step(i: int, placement: Placement, new: fx.Node) -> fx.Node:
        now[i] = placement
        new.meta["placements"] = tuple(now)
        versions[tuple(now)] = new
        return new

    for i in reversed(range(len(now))):
        source, axis = now[i], program.axes[i]
        if not isinstance(source, (Shard, Chunk)) or (source == want[i] and not _in_the_way(now, want, i, program)):
            continue
        target = want[i]
        if isinstance(source, Shard) and isinstance(target, Shard) and _can_exchange_alone(now, want, i, axis):
            node = step(i, target, exchange.all_to_all(program, node, source, target, axis))
            continue
        if isinstance(source, Shard) and target == PARTIAL and _is_alone(now, want, i) and can_exchange(source, axis):
            node = step(i, target, exchange.among_zeros(program, node, source, axis))
            continue
        if isinstance(source, Chunk):
            whole = _unsharded_size(spec.shape, now, i, program.axes)
            node = step(i, REPLICATE, gather_chunks(program, node, source, whole, axis, spec))
        else:
            node = step(i, REPLICATE, _gather(program, node, spec.shape, tuple(now), i))
    whole_sums = [i for i, p in enumerate(now) if isinstance(p, Partial) and isinstance(want[i], Replicate)]
    for i, axis in enumerate(program.axes):
        source, target = now[i], want[i]
        if source == target or i in whole_sums:
            continue
        if isinstance(source, Partial):
            if isinstance(target, Chunk):
                others = [program.axes[other] for other in whole_sums if now[other] == PARTIAL]
                node = reduce_scatter_chunks(program, node, target, axis, spec, others)
                for other in whole_sums:
                    now[other] = REPLICATE if now[other] == PARTIAL else now[other]
                node = step(i, target, node)
                continue
            if isinstance(target, Shard) and source.op == "sum" and can_exchange(target, axis):
                node = step(i, target, _reduce_scatter_shard(program, node, target, now, i, spec))
                continue
            node = step(i, REPLICATE, _all_reduce(program, node, source, axis, order_of_pieces(spec, now)))
        if isinstance(target, Shard):
            node = step(i, target, _slice(program, node, target, _local_blocks(target, now, i, program.axes), axis))
        elif isinstance(target, Chunk):
            node = step(i, target, _chunk(program, node, target, axis, spec))
        elif isinstance(target, Partial):
            node = step(i, target, _keep_on_first(program, node, target, axis))
    for i in whole_sums:
        source = now[i]
        if isinstance(source, Partial):  # not reduced on the way
            axis, order = program.axes[i], order_of_pieces(spec, now)
            node = step(i, REPLICATE, _all_reduce(program, node, source, axis, order))
    return versions


def _in_the_way(now: Sequence[Placement], want: Sequence[Placement], inner: int, program: LocalProgram) -> bool:
    """Whether an outer axis is about to split or join the dimension that axis ``inner`` splits already."""
    split = now[inner]
    for outer in range(inner):
        if now[outer] == want[outer] or not isinstance(split, (Shard, Chunk)):
            continue
        for placement in (now[outer], want[outer]):
            if isinstance(placement, (Shard, Chunk)) and placement.dim == split.dim:
                axis = program.axes[inner]
                if not (isinstance(placement, Shard) and isinstance(split, Shard) and _nested(placement, split, axis)):
                    return True
    return False


def _nested(outer: Shard, inner: Shard, inner_axis: ShardAxis) -> bool:
    """Whether the pieces of the inner axis are whole blocks of the outer one's: then the order does not matter."""
    if not isinstance(outer.outer, int) or not isinstance(inner.outer, int):
        return False
    return outer.outer % (inner.outer * inner_axis.total) == 0


def _local_blocks(placement: Shard, now: Sequence[Placement], position: int, axes: Sequence[ShardAxis]) -> Blocks:
    """How many of a placement's blocks this rank has, where axes inside ``position`` split the dimension as well."""
    blocks = placement.outer
    for axis, inner in zip(axes[position + 1 :], now[position + 1 :], strict=True):
        if isinstance(inner, (Shard, Chunk)) and inner.dim == placement.dim:
            if not isinstance(inner, Shard) or not isinstance(blocks, int) or not _nested(placement, inner, axis):
                raise ExpansionError(
                    f"no way to move {placement}, inside of whose pieces {inner} splits the dimension again"
                )
            blocks = axis.local_size(blocks)
    return blocks


def _can_exchange_alone(now: Sequence[Placement], want: Sequence[Placement], position: int, axis: ShardAxis) -> bool:
    """Whether an axis can exchange pieces of two dimensions that no other axis splits."""
    return _is_exchange(now[position], want[position], axis) and _is_alone(now, want, position)


def _is_alone(now: Sequence[Placement], want: Sequence[Placement], position: int) -> bool:
    """Whether no other axis splits the dimensions that an axis splits or is to split."""
    dims = {p.dim for p in (now[position], want[position]) if isinstance(p, (Shard, Chunk))}
    others = [p for places in (now, want) for i, p in enumerate(places) if i != position]
    return not any(isinstance(p, (Shard, Chunk)) and p.dim in dims for p in others)


def _reduce_scatter_shard(
    program: LocalProgram, node: fx.Node, target: Shard, now: Sequence[Placement], position: int, spec: TensorSpec
) -> fx.Node:
    axis = program.axes[position]
    if target.outer == 1 and not axis.folded:
        return reduce_scatter_shards(program, node, axis, target.dim, spec)
    blocks = _local_blocks(target, now, position, program.axes)
    return exchange.reduce_scatter(program, node, Shard(target.dim, blocks), axis)


def _all_reduce(
    program: LocalProgram, node: fx.Node, source: Partial, axis: ShardAxis, order: Sequence[int]
) -> fx.Node:
    """A sum (or maximum, or minimum) on every rank, in the order in which it lies."""
    return permuted_back(program, program.all_reduce(permuted(program, node, order), axis, source.op), order)


def _chunk(program: LocalProgram, node: fx.Node, target: Chunk, axis: ShardAxis, spec: TensorSpec) -> fx.Node:
    """This rank's chunk of a whole tensor: a view, or a copy where the chunk is no range of memory.

    Which of them follows from the whole: ranks with one row or none must take the same operators.
    """
    start, length = axis.chunk(program.shape(node)[target.dim])
    piece = rank_dependent_slice(program, node, target.dim, start, length)
    order = order_of_pieces(spec, (target,))
    if is_dense(spec) and order == memory_order(spec):
        return piece
    dense = program.call(aten.clone.default, permuted(program, piece, order), memory_format=torch.contiguous_format)
    dense.meta["rank_dependent"] = True
    return permuted_back(program, dense, order)


def _slice(program: LocalProgram, node: fx.Node, target: Shard, outer: Blocks, axis: ShardAxis) -> fx.Node:
    """This rank's piece; ``outer``: how many of the target's blocks there are here."""
    shape, dim = program.shape(node), target.dim
    if isinstance(outer, Chosen):  # all are the same: as many of the first as there are here
        size = axis.shard_size(shape[dim], outer)
        one = program.call(aten.slice.Tensor, node, dim, 0, 1)
        return program.call(aten.expand.default, one, [*shape[:dim], size, *shape[dim + 1 :]])
    if isinstance(outer, Brought):
        raise TypeError(f"cannot take a piece as {target}")
    if isinstance(outer, tuple):
        pieces, before = [], 0
        for block in block_sizes(shape[dim], outer) or ():
            pieces += _ranges(program, node, dim, [(before + start, n) for start, n in axis.pieces(block)])
            before += block
        return program.call(aten.cat.default, pieces, dim)
    block = shape[dim] // outer
    if target.outer == 1:
        return _joined(program, _ranges(program, node, dim, axis.pieces(block)), dim)
    blocks = exchange.reshaped(program, node, (*shape[:dim], outer, block, *shape[dim + 1 :]))
    piece = _joined(program, _ranges(program, blocks, dim + 1, axis.pieces(block)), dim + 1)
    return exchange.reshaped(program, piece, (*shape[:dim], outer * axis.local_size(block), *shape[dim + 1 :]))


def _ranges(program: LocalProgram, node: fx.Node, dim: int, ranges: Sequence[tuple[int, int]]) -> list[fx.Node]:
    return [rank_dependent_slice(program, node, dim, start, length) for start, length in ranges]


def _joined(program: LocalProgram, pieces: list[fx.Node], dim: int) -> fx.Node:
    return pieces[0] if len(pieces) == 1 else program.call(aten.cat.default, pieces, dim)


def _keep_on_first(program: LocalProgram, node: fx.Node, target: Partial, axis: ShardAxis) -> fx.Node:
    if node.target in _UNINITIALIZED and not node.users:  # something is about to write all of it
        return program.call(node.target, *node.args, **node.kwargs)
    if target.op != "sum":
        return node
    return zero_unless(program, node, axis.rank == 0)


def zero_unless(program: LocalProgram, node: fx.Node, keep: bool) -> fx.Node:
    """``node``'s value on the ranks where ``keep``, zeros on the others; the same operators on every rank."""
    device = node.meta["val"].device
    elsewhere = program.call(aten.full.default, [], not keep, dtype=torch.bool, device=device)
    elsewhere.meta["rank_dependent"] = True
    return program.call(aten.masked_fill.Scalar, node, elsewhere, 0)


def _gather(
    program: LocalProgram, node: fx.Node, shape: Sequence[int], now: tuple[Placement, ...], position: int
) -> fx.Node:
    axis, placement = program.axes[position], now[position]
    if not isinstance(placement, Shard):
        raise TypeError(f"cannot gather {placement}")
    local = program.shape(node)
    dim, outer = placement.dim, _local_blocks(placement, now, position, program.axes)
    if isinstance(outer, (Chosen, Brought)):
        raise TypeError(f"cannot gather {placement}")
    whole = _unsharded_size(shape, now, position, program.axes)
    if isinstance(outer, tuple):
        return gather_uneven_blocks(program, node, dim, outer, axis, whole)
    if axis.folded:
        return exchange.all_gather(program, node, Shard(dim, outer), axis)
    before, rows, after = math.prod(local[:dim]) * outer, local[dim] // outer, math.prod(local[dim + 1 :])
    full = (*local[:dim], whole, *local[dim + 1 :])
    if program.agreed(axis.is_even and before == 1):
        gather = _functional.all_gather_into_tensor.default
        flat = node if outer == 1 and dim == 0 else exchange.reshaped(program, node, (rows, after))
        gathered = program.collective(
            gather, flat, (program.shape(flat)[0] * axis.size, *program.shape(flat)[1:]), axis.size, axis.group
        )
        return exchange.reshaped(program, gathered, full)
    piece = exchange.reshaped(program, node, (before, rows, after))
    merged = gather_padded(program, piece, (whole // outer,), axis)
    # where a rank's piece has size 1, merging its dimension is a view and leaves the ranks' order
    return program.dense(exchange.reshaped(program, merged, full))


def _unsharded_size(shape: Sequence[int], now: Sequence[Placement], position: int, axes: Sequence[ShardAxis]) -> int:
    """Size of the gathered dimension once ``position`` is replicated, other axes' splits of it remaining."""
    placement = now[position]
    if not isinstance(placement, (Shard, Chunk)):
        return 0
    others = [REPLICATE if i == position else p for i, p in enumerate(now)]
    return local_shape(shape, others, axes)[placement.dim]
