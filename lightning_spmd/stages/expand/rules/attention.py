"""Scaled-dot-product attention: batch and heads are independent, and so are the rows of queries.

Over an axis that splits sequences, queries, keys and values lie in pieces of the sequence, and every rank's queries
need all keys: these layouts bring a program of their own (``attention/``), the cost model
says which. DTensor 2.13 searches for ever on the CPU operator; no rule of it is asked for any of these.
"""

from __future__ import annotations

from typing import Any

import torch

from lightning_spmd.cost.attention import AttentionShape, machine_of, ring_is_better
from lightning_spmd.ir.placement import PARTIAL, REPLICATE, Placement, Shard
from lightning_spmd.stages.expand.attention.gathered_attention import SEQUENCE, emit_gathered, emit_gathered_backward
from lightning_spmd.stages.expand.attention.kernels import KERNELS, can_be_parted, mask_of
from lightning_spmd.stages.expand.attention.ring_attention import emit_ring, emit_ring_backward
from lightning_spmd.stages.expand.call import Layout, OpCall, Rule, Where, along

aten = torch.ops.aten
_ROWS = Shard(SEQUENCE)
_KEYS = ("key", "value")


def heads_and_batch(call: OpCall) -> list[Layout]:
    """Split dimension 0 (batch) or 1 (heads) of everything of four dimensions; a mask follows unless it broadcasts."""
    found: list[Layout] = []
    batch, heads = call["query"].meta["val"].shape[:2]
    mask = mask_of(call)
    for dim, size in ((0, batch), (1, heads)):
        inputs: list[Where] = []
        for i, spec in enumerate(call.specs):
            if i == mask:
                own = dim - (4 - len(spec.shape))
                inputs.append(own if own >= 0 and spec.shape[own] == size else None)
            else:
                inputs.append(dim if len(spec.shape) >= 3 else None)
        outputs: list[Where] = [
            dim
            if spec is not None and hasattr(spec, "shape") and len(spec.shape) >= 3 and spec.shape[dim] == size
            else None
            for spec in call.outputs
        ]
        if dim == 1:
            outputs = [
                dim if hasattr(s, "shape") and len(s.shape) >= 3 and s.shape[0] == batch else None for s in call.outputs
            ]
        found += along(call, inputs, outputs)
    return found


def _is_backward(call: OpCall) -> bool:
    return "grad_out" in call.arguments or "grad_out_" in call.arguments


def _mask_rows(call: OpCall, mask: int) -> Placement:
    """A mask has a row a query, or one for all."""
    shape = call.specs[mask].shape
    return Shard(len(shape) - 2) if shape[-2:-1] == call["query"].meta["val"].shape[2:3] else REPLICATE


def _split_rows(call: OpCall, keys: Placement) -> Layout:
    """Queries, and all that has a row for each of them, in pieces; keys, values and their gradients as given."""
    mask, key_places = mask_of(call), [call.index(name) for name in _KEYS]
    inputs: list[Placement] = []
    for i, spec in enumerate(call.specs):
        if i == mask:
            inputs.append(_mask_rows(call, i))
        elif i in key_places:
            inputs.append(keys)
        else:
            inputs.append(_ROWS if len(spec.shape) >= 3 else REPLICATE)
    has_rows = [hasattr(spec, "shape") and len(spec.shape) >= 3 for spec in call.outputs]
    if _is_backward(call):
        gradients = PARTIAL if keys == REPLICATE else keys
        return Layout(tuple(inputs), (_ROWS, gradients, gradients, *[REPLICATE] * (len(has_rows) - 3)))
    return Layout(tuple(inputs), tuple(_ROWS if rows else REPLICATE for rows in has_rows))


def rows_of_queries(call: OpCall) -> list[Layout]:
    """Pieces of the sequence: of the queries alone where every rank has all keys, else of both."""
    query, key = (call[name].meta["val"].shape for name in ("query", "key"))
    places = [call.current[i] for name in ("query", *_KEYS) if (i := call.index(name)) is not None]
    rows = min(length for rank in range(call.axis.size) for _, length in _pieces(call, query[SEQUENCE], rank))
    if places[0] != _ROWS or not can_be_parted(call, rows):
        return []
    if not call["is_causal"] and REPLICATE in places[1:]:
        return [_split_rows(call, REPLICATE)]
    if not call.splits_sequences or not call.axis.divides(key[SEQUENCE]):
        return []
    if call["is_causal"] and query[SEQUENCE] != key[SEQUENCE]:
        return []
    forward, backward = (
        (emit_ring, emit_ring_backward) if _prefers_ring(call) else (emit_gathered, emit_gathered_backward)
    )
    layout = _split_rows(call, _ROWS)
    return [Layout(layout.inputs, layout.outputs, backward if _is_backward(call) else forward)]


def _pieces(call: OpCall, size: int, rank: int) -> tuple[tuple[int, int], ...]:
    return call.axis.pieces(size, rank) if call.axis.divides(size) else ((0, size),)


def _prefers_ring(call: OpCall) -> bool:
    query, key = call["query"].meta["val"], call["key"].meta["val"]
    if not call.axis.is_even or (call["is_causal"] and not call.axis.folded):
        return False
    batch, heads, rows, size = query.shape
    shape = AttentionShape(batch, heads, key.shape[1], rows, key.shape[SEQUENCE], size, query.dtype.itemsize)
    return ring_is_better(
        shape, call.axis.size, machine_of(query.device), causal=bool(call["is_causal"]), backward=_is_backward(call)
    )


def attention(call: OpCall) -> list[Layout]:
    """All of these."""
    return heads_and_batch(call) + rows_of_queries(call)


_PACKED = ("cum_seq_q", "cum_seq_k", "cu_seqlens_q", "cu_seqlens_k", "bias", "alibi_slopes", "block_table", "seqlen_k")
"""With these, rows of the batch are not a dimension, or lie otherwise than the queries do."""
_LOGARITHMS = ("logsumexp", "softmax_logsumexp")


def heads_last(call: OpCall) -> list[Layout]:
    """The kernels below ``scaled_dot_product_attention``, for tensors of (batch, sequence, heads, size).

    Their logarithms are (batch, heads, sequence). Sequences packed one behind the other have no rows and no rule.
    """
    if any(call.get(name) is not None for name in _PACKED):
        return []
    found: list[Layout] = []
    for dim, of_logarithms in ((0, 0), (2, 1)):
        names = ("query", "key", "value", "out", "grad_out", "grad_out_")
        dims: dict[str, int | None] = {**dict.fromkeys(names, dim), **dict.fromkeys(_LOGARITHMS, of_logarithms)}
        ranks: dict[int, Where] = {4: dim, 3: of_logarithms}
        outputs = [ranks.get(len(s.shape)) if hasattr(s, "shape") else None for s in call.outputs]
        found += along(call, call.named(dims), outputs)
    return found


_HEADS_LAST = ("_flash_attention_forward", "_flash_attention_backward", "_efficient_attention_forward",
               "_efficient_attention_backward")  # fmt: skip
RULES: dict[Any, Rule] = {
    **dict.fromkeys(KERNELS, attention),
    **{getattr(aten, name): heads_last for name in _HEADS_LAST},
}
