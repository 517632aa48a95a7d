"""Joining and splitting along a dimension. Parts of a fused projection stay blocks of one dimension."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lightning_spmd.ir.placement import Placement, Shard, block_sizes, blocks_of
from lightning_spmd.stages.expand.call import Layout, LocalCall, Localizer, OpCall, Rule, along, linear

aten = torch.ops.aten


_MANY_BLOCKS = 64
"""More blocks of one dimension than a fused projection has: the rows of a batch, which nothing joins or splits."""


def _known_blocks(size: int, placement: Shard) -> tuple[int, ...] | None:
    if isinstance(placement.outer, int) and placement.outer > _MANY_BLOCKS:
        return None
    return block_sizes(size, placement.outer)


def _pieces_of_blocks(sizes: Sequence[int], placement: Shard, pieces: Sequence[int]) -> list[Placement] | None:
    """Placements of consecutive pieces of a dimension split in blocks, if each is some whole blocks."""
    rest, found = list(sizes), list[Placement]()
    for piece in pieces:
        taken: list[int] = []
        while rest and sum(taken) < piece:
            taken.append(rest.pop(0))
        if sum(taken) != piece or not taken:
            return None
        found.append(Shard(placement.dim, blocks_of(taken)))
    return found


def _split(call: OpCall) -> list[Layout]:
    ndim = len(call.specs[0].shape)
    at = call["dim"] % ndim
    found: list[Layout] = []
    for d in range(ndim):
        if d != at:
            found += along(call, [d], [d] * len(call.outputs))
    current = call.current[0]
    if isinstance(current, Shard) and current.dim == at:
        sizes = _known_blocks(call.specs[0].shape[at], current)
        parts = _pieces_of_blocks(sizes, current, [o.shape[at] for o in call.outputs]) if sizes else None
        if parts is not None:
            found.append(Layout((current,), tuple(parts)))
    return found + linear(call, (0,))


def _split_sizes(call: LocalCall) -> dict[str, Any]:
    at = call["dim"]
    sizes = [call.output_shape(i)[at] for i in range(len(call.outputs))]
    return {"split_size": sizes[0]} if "split_size" in call.globals else {"split_sizes": sizes}


def _unbind(call: OpCall) -> list[Layout]:
    ndim = len(call.specs[0].shape)
    at = call["dim"] % ndim
    found: list[Layout] = []
    for d in range(ndim):
        if d != at:
            found += along(call, [d], [d - (d > at)] * len(call.outputs))
    return found + linear(call, (0,))


def _cat(call: OpCall) -> list[Layout]:
    ndim = len(call.shape)
    at = call["dim"] % ndim
    found: list[Layout] = []
    for d in range(ndim):
        if d != at:
            found += along(call, [d if len(s.shape) == ndim else None for s in call.specs], [d])
    if sum(s.numel > 0 for s in call.specs) == 1:  # a cache that is still empty, and the first keys
        found += along(call, [at if s.numel else None for s in call.specs], [at])
    return found + _joined_blocks(call, at) + linear(call, range(len(call.operands)))


def _joined_blocks(call: OpCall, at: int) -> list[Layout]:
    """Parts that are split themselves, one behind the other: the blocks of a fused projection's gradient."""
    if not any(isinstance(p, Shard) and p.dim == at for p in call.current):
        return []
    inputs: list[Placement] = []
    blocks: list[int] = []
    for placement, spec in zip(call.current, call.specs, strict=True):
        own = placement if isinstance(placement, Shard) and placement.dim == at else Shard(at)
        sizes = _known_blocks(spec.shape[at], own) if len(spec.shape) == len(call.shape) else None
        if sizes is None or not call.axis.splits(spec.shape[at], own.outer):
            return []
        inputs.append(own)
        blocks += sizes
    return [Layout(tuple(inputs), (Shard(at, blocks_of(blocks)),))] if len(blocks) <= _MANY_BLOCKS else []


def _stack(call: OpCall) -> list[Layout]:
    at = call["dim"] % len(call.shape)
    found: list[Layout] = []
    for d in range(len(call.shape) - 1):
        found += along(call, [d] * len(call.operands), [d + (d >= at)])
    return found + linear(call, range(len(call.operands)))


RULES: dict[Any, Rule] = {
    **dict.fromkeys(
        [
            aten.split,
            aten.split_with_sizes,
            aten.unsafe_split,
            aten.unsafe_split_with_sizes,
            aten.chunk,
            aten.unsafe_chunk,
        ],
        _split,
    ),
    aten.unbind: _unbind,
    aten.cat: _cat,
    aten.stack: _stack,
}


LOCALIZERS: dict[Any, Localizer] = {
    **dict.fromkeys([aten.split.Tensor, aten.unsafe_split.Tensor], _split_sizes),
    **dict.fromkeys([aten.split_with_sizes, aten.unsafe_split_with_sizes], _split_sizes),
}
