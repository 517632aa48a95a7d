"""Embeddings. The table is replicated, the indices are split; the table's gradient is a partial sum."""

from __future__ import annotations

from typing import Any

import torch

from lightning_spmd.ir.placement import PARTIAL
from lightning_spmd.stages.expand.call import Layout, OpCall, Rule, along, linear

aten = torch.ops.aten


def _lookup(call: OpCall) -> list[Layout]:
    index, width = call.specs[1], len(call.shape) - 1
    found = [c for d in range(len(index.shape)) for c in along(call, [None, d], [d])]
    return found + along(call, [1, None], [width]) + linear(call, (0,))


def _gradient(call: OpCall) -> list[Layout]:
    if call["scale_grad_by_freq"]:
        return []
    index, width = call.specs[1], len(call.specs[0].shape) - 1
    found = [c for d in range(len(index.shape)) for c in along(call, [d, d], [PARTIAL])]
    return found + along(call, [width, None], [1]) + linear(call, (0,))


RULES: dict[Any, Rule] = {
    aten.embedding: _lookup,
    aten.embedding_dense_backward: _gradient,
}
