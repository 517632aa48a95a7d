"""Placement changes: what they cost and how they are written.

==================  ====================================================  ==================================
change              local program                                         cost in bytes moved
==================  ====================================================  ==================================
R → S               slice (rank-dependent offset)                         none
R → P               keep on the first rank, zero elsewhere                none
P → R               all_reduce                                            2 × size
P → S               reduce_scatter, or all_reduce and slice               size (or as P → R)
S → R               all_gather; 4 × size counts as a penalty, since what  4 × size
                    is split usually is an activation
S → S', S → P       through R
==================  ====================================================  ==================================

Every change is a constant number of nodes at any number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import fx

from lightning_spmd.ir.node_info import Section, TensorSpec
from lightning_spmd.ir.placement import REPLICATE, Partial, Placement, Replicate, Shard, ShardAxis
from lightning_spmd.stages.expand.program import LocalProgram

aten = torch.ops.aten
_functional = torch.ops._c10d_functional

LATENCY = 1000.0
"""Bytes that a collective costs before its first byte: makes one collective dearer than any local work."""


def cost(spec: TensorSpec, have: Placement, want: Placement, section: Section) -> float:
    """Cost of one placement change of a tensor of this global spec."""
    if have == want:
        return 0.0
    size = spec.bytes
    if isinstance(have, Replicate):
        if isinstance(want, Shard):
            return 1e-3 * size
        # The optimizer's own arithmetic on a replicated state is never worth splitting into a partial sum.
        return 10.0 * size + 2 * LATENCY if section in (Section.OPTIMIZER, Section.CLIP) else 2e-3 * size
    if isinstance(have, Partial):
        if isinstance(want, Partial):
            return math.inf
        return 2.0 * size + LATENCY if isinstance(want, Replicate) else size + LATENCY
    return 4.0 * size + LATENCY + (0.0 if isinstance(want, Replicate) else cost(spec, REPLICATE, want, section))


def redistribute(
    program: LocalProgram, node: fx.Node, shape: Sequence[int], have: Sequence[Placement], want: Sequence[Placement]
) -> dict[tuple[Placement, ...], fx.Node]:
    """Write the change of a tensor of global ``shape`` from ``have`` to ``want``, axis by axis.

    Returns:
        The versions of the value that came to exist on the way which later readers may use, the wanted one last.
    """
    now = list(have)
    versions: dict[tuple[Placement, ...], fx.Node] = {}

    def step(i: int, placement: Placement, new: fx.Node) -> fx.Node:
        now[i] = placement
        new.meta["placements"] = tuple(now)
        versions[tuple(now)] = new
        return new

    for i in reversed(range(len(now))):
        source, target, axis = now[i], want[i], program.axes[i]
        if source == target or isinstance(source, Replicate):
            continue
        if isinstance(source, Shard):
            node = step(i, REPLICATE, _gather(program, node, shape, tuple(now), i))
        elif _can_reduce_scatter(target, axis):
            node = step(i, target, _reduce_scatter(program, node, axis))
        else:
            node = step(i, REPLICATE, program.all_reduce(node, axis, source.op))
    for i, axis in enumerate(program.axes):
        if now[i] == want[i]:
            continue
        target = want[i]
        if isinstance(target, Shard):
            node = step(i, target, _slice(program, node, target, axis))
        elif isinstance(target, Partial):
            node = step(i, target, _keep_on_first(program, node, target, axis))
    return versions


def _can_reduce_scatter(target: Placement, axis: ShardAxis) -> bool:
    return isinstance(target, Shard) and target.dim == 0 and target.outer == 1 and axis.is_even


def _reduce_scatter(program: LocalProgram, node: fx.Node, axis: ShardAxis) -> fx.Node:
    rows, *rest = program.shape(node)
    op = _functional.reduce_scatter_tensor.default
    return program.collective(op, node, (rows // axis.size, *rest), "sum", axis.size, axis.group)


def _slice(program: LocalProgram, node: fx.Node, target: Shard, axis: ShardAxis) -> fx.Node:
    shape = program.shape(node)
    block = shape[target.dim] // target.outer
    start, length = axis.offset(block), axis.local_size(block)
    if target.outer == 1:
        piece = program.call(aten.slice.Tensor, node, target.dim, start, start + length)
        piece.meta["rank_dependent"] = True
        return piece
    blocks = _reshape(program, node, (*shape[: target.dim], target.outer, block, *shape[target.dim + 1 :]))
    piece = program.call(aten.slice.Tensor, blocks, target.dim + 1, start, start + length)
    piece.meta["rank_dependent"] = True
    return _reshape(program, piece, (*shape[: target.dim], target.outer * length, *shape[target.dim + 1 :]))


def _keep_on_first(program: LocalProgram, node: fx.Node, target: Partial, axis: ShardAxis) -> fx.Node:
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
    dim, outer = placement.dim, placement.outer
    before, rows, after = math.prod(local[:dim]) * outer, local[dim] // outer, math.prod(local[dim + 1 :])
    whole = _unsharded_size(shape, now, position, program.axes)
    full = (*local[:dim], whole, *local[dim + 1 :])
    gather = _functional.all_gather_into_tensor.default
    if axis.is_even and before == 1:
        flat = node if outer == 1 and dim == 0 else _reshape(program, node, (rows, after))
        gathered = program.collective(
            gather, flat, (program.shape(flat)[0] * axis.size, *program.shape(flat)[1:]), axis.size, axis.group
        )
        return _reshape(program, gathered, full)
    block = whole // outer
    longest = max(axis.local_size(block, r) for r in range(axis.size))
    piece = _reshape(program, node, (before, rows, after))
    if longest != rows or not axis.is_even:
        piece = program.call(aten.constant_pad_nd.default, piece, [0, 0, 0, longest - rows])
        piece.meta["rank_dependent"] = True
    gathered = program.collective(gather, piece, (axis.size * before, longest, after), axis.size, axis.group)
    pieces = program.call(aten.view.default, gathered, [axis.size, before, longest, after])
    merged = _reshape(program, program.call(aten.transpose.int, pieces, 0, 1), (before, axis.size * longest, after))
    if not axis.is_even:
        merged = program.call(
            aten.index_select.default, merged, 1, program.constant(_valid_rows(axis, block, longest, merged))
        )
    return _reshape(program, merged, full)


def _valid_rows(axis: ShardAxis, block: int, longest: int, like: fx.Node) -> torch.Tensor:
    rows = [r * longest + i for r in range(axis.size) for i in range(axis.local_size(block, r))]
    return torch.tensor(rows, device=like.meta["val"].device)


def _unsharded_size(shape: Sequence[int], now: tuple[Placement, ...], position: int, axes: Sequence[ShardAxis]) -> int:
    """Size of the gathered dimension once ``position`` is replicated, other axes' splits of it remaining."""
    placement = now[position]
    size = shape[placement.dim] if isinstance(placement, Shard) else 0
    for i, (other, axis) in enumerate(zip(now, axes, strict=True)):
        if i != position and isinstance(other, Shard) and isinstance(placement, Shard) and other.dim == placement.dim:
            size = other.outer * axis.local_size(size // other.outer)
    return size


def _reshape(program: LocalProgram, node: fx.Node, shape: Sequence[int]) -> fx.Node:
    if program.shape(node) == tuple(shape):
        return node
    try:
        return program.call(aten.view.default, node, list(shape))
    except (RuntimeError, ValueError):
        whole = program.call(aten.clone.default, node, memory_format=torch.contiguous_format)
        return program.call(aten.view.default, whole, list(shape))
