"""Scaled-dot-product attention: batch and heads are independent, so nothing is ever gathered.

DTensor 2.13 searches for ever on the CPU operator; no rule of it is asked for any of these.
"""

from __future__ import annotations

from typing import Any

import torch

from lightning_spmd.stages.expand.call import Layout, OpCall, Rule, Where, along

aten = torch.ops.aten

_MASKS = ("attn_mask", "attn_bias")


def heads_and_batch(call: OpCall) -> list[Layout]:
    """Split dimension 0 (batch) or 1 (heads) of everything of four dimensions; a mask follows unless it broadcasts."""
    found: list[Layout] = []
    batch, heads = call["query"].meta["val"].shape[:2]
    mask = next((i for n in _MASKS if n in call.arguments and (i := call.index(n)) is not None), None)
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


_FAMILY = [
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
]
RULES: dict[Any, Rule] = {
    getattr(aten, name + suffix): heads_and_batch
    for name in _FAMILY
    for suffix in ("", "_backward")
    if hasattr(aten, name + suffix)
}
