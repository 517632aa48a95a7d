"""Operators on lists of tensors (optimizers, clipping): every index of the lists is a call of its own.

Written lists return nothing. Linear ones pass partial sums; everything else needs the gradients reduced, and that is
where each parameter's one all-reduce lands.
"""

from __future__ import annotations

from typing import Any

import torch

from lightning_spmd.ir.placement import PARTIAL, REPLICATE, Placement, Shard
from lightning_spmd.stages.expand.call import Layout, OpCall, Rule, flatten_values, is_tensor

aten = torch.ops.aten

_LINEAR_IN_FIRST = {"mul", "div", "neg", "zero"}
_LINEAR_IN_BOTH = {"add", "sub"}


def _columns(call: OpCall) -> list[list[int]]:
    """For every index of the lists, the positions of its operands; single tensors belong to none."""
    lists: list[list[int]] = []
    position = 0
    for value in call.arguments.values():
        tensors = [v for v in flatten_values(value) if is_tensor(v)]
        if isinstance(value, (list, tuple)) and tensors:
            lists.append(list(range(position, position + len(tensors))))
        position += len(tensors)
    longest = max((len(entry) for entry in lists), default=0)
    return [[entry[i] for entry in lists if len(entry) == longest] for i in range(longest)]


def foreach(call: OpCall) -> list[Layout]:
    """One layout: each index split as its tensors are, a partial sum where that is linear, else replicated."""
    name = call.op.overloadpacket.__name__.removeprefix("_foreach_").rstrip("_")
    inputs: list[Placement] = [REPLICATE] * len(call.operands)
    columns = _columns(call)
    outputs: list[Placement] = [REPLICATE] * max(len(columns), len(call.outputs))
    for i, column in enumerate(columns):
        current = [call.current[c] for c in column]
        chosen: Placement = REPLICATE
        if isinstance(current[0], Shard) and name != "norm" and name != "max":
            chosen = current[0]
            wanted = [chosen if call.specs[c].shape == call.specs[column[0]].shape else REPLICATE for c in column]
        elif current[0] == PARTIAL and name in _LINEAR_IN_FIRST | _LINEAR_IN_BOTH:
            both = name in _LINEAR_IN_BOTH
            if not both or (len(column) > 1 and all(p == PARTIAL for p in current)):
                chosen = PARTIAL
            wanted = [chosen if both or k == 0 else REPLICATE for k in range(len(column))]
        else:
            wanted = [REPLICATE] * len(column)
        for c, placement in zip(column, wanted, strict=True):
            inputs[c] = placement
        outputs[i] = chosen
    return [Layout(tuple(inputs), tuple(outputs[: max(len(call.outputs), 1)]))]


def _operators() -> list[Any]:
    known = [
        f"_foreach_{n}{suffix}"
        for n in (
            "add", "sub", "mul", "div", "neg", "zero", "sqrt", "rsqrt", "pow", "lerp", "addcmul", "addcdiv", "norm",
            "max", "maximum", "minimum", "clamp_min", "clamp_max", "abs", "exp", "log", "sign", "reciprocal", "copy",
            "floor", "ceil", "round", "trunc", "frac", "sigmoid", "tanh", "erf", "expm1", "log1p",
        )
        for suffix in ("", "_")
    ]  # fmt: skip
    fused = [f"_fused_{n}_" for n in ("adam", "adamw", "sgd", "adagrad")]
    return [getattr(aten, n) for n in [*known, *fused] if hasattr(aten, n)]


RULES: dict[Any, Rule] = dict.fromkeys([*_operators(), aten._amp_foreach_non_finite_check_and_unscale_], foreach)
