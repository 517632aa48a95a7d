"""Embeddings.

The table is replicated and the indices are split: the table's gradient is a partial sum. Or the table's rows are split
(vocabulary parallelism, arXiv:1909.08053): every rank looks up the rows it has, zeros elsewhere, and the result is a
partial sum; each rank's own rows of the gradient need nothing from the others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from lightning_spmd.ir.placement import PARTIAL, REPLICATE, Shard
from lightning_spmd.stages.expand.call import Emit, Layout, LocalCall, OpCall, Rule, along, linear

aten = torch.ops.aten


def own_entries(call: LocalCall, indices: fx.Node, size: int, emit: Emit) -> tuple[fx.Node, fx.Node, int]:
    """(indices into this rank's piece of a dimension of ``size``, which ones are elsewhere, the piece's size).

    Indices that point elsewhere are 0.
    """
    (axis,) = call.emitting_axes(emit)
    length = axis.local_size(size)
    own = call.call(aten.sub.Tensor, indices, axis.offset(size))
    own.meta["rank_dependent"] = True
    below, above = call.call(aten.lt.Scalar, own, 0), call.call(aten.ge.Scalar, own, length)
    elsewhere = call.call(aten.logical_or.default, below, above)
    return call.call(aten.masked_fill.Scalar, own, elsewhere, 0), elsewhere, length


def _emit_lookup(call: LocalCall) -> list[fx.Node | None]:
    own, elsewhere, _ = own_entries(call, call["indices"], call.spec("weight").shape[0], _emit_lookup)
    rows = call.call(aten.embedding.default, call["weight"], own)
    return [call.call(aten.masked_fill.Scalar, rows, call.call(aten.unsqueeze.default, elsewhere, -1), 0)]


def _lookup(call: OpCall) -> list[Layout]:
    index, width = call.specs[1], len(call.shape) - 1
    found = [c for d in range(len(index.shape)) for c in along(call, [None, d], [d])]
    if call.current[0] == Shard(0):
        found.append(Layout((Shard(0), REPLICATE), (PARTIAL,), _emit_lookup, local=True))
    return found + along(call, [1, None], [width]) + linear(call, (0,))


def _emit_own_rows(call: LocalCall) -> list[fx.Node | None]:
    count, padding = call.globals["num_weights"], call.globals["padding_idx"]
    own, elsewhere, length = own_entries(call, call["indices"], count, _emit_own_rows)
    if padding >= 0:
        padded = call.call(aten.eq.Scalar, call["indices"], padding)
        elsewhere = call.call(aten.logical_or.default, elsewhere, padded)
    mask = call.call(aten.unsqueeze.default, elsewhere, -1)
    gradient = call.call(aten.masked_fill.Scalar, call["grad_output"], mask, 0)
    return [call.call(aten.embedding_dense_backward.default, gradient, own, length, -1, False)]


def _gradient(call: OpCall) -> list[Layout]:
    if call["scale_grad_by_freq"]:
        return []
    index, width = call.specs[1], len(call.specs[0].shape) - 1
    found = [c for d in range(len(index.shape)) for c in along(call, [d, d], [PARTIAL])]
    if call.forced == Shard(0) and call.axis.divides(call.shape[0]):
        found.append(Layout((REPLICATE, REPLICATE), (Shard(0),), _emit_own_rows, local=True))
    return found + along(call, [width, None], [1]) + linear(call, (0,))


RULES: dict[Any, Rule] = {
    aten.embedding: _lookup,
    aten.embedding_dense_backward: _gradient,
}
