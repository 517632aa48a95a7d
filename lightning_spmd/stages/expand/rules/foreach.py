"""Operators on lists of tensors (optimizers, clipping): every index of the lists is a call of its own.

Written lists return nothing. Linear ones pass partial sums; everything else needs the gradients reduced, and that is
where each parameter's one all-reduce lands.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from lightning_spmd.ir.placement import PARTIAL, REPLICATE, Chunk, Placement, Shard
from lightning_spmd.stages.expand.call import Layout, LocalCall, OpCall, Rule, axis_of_pieces, flatten_values, is_tensor
from lightning_spmd.stages.expand.rules.reductions import norm_of_norms

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
    columns, in_place = _columns(call), call.op._schema.is_mutable
    outputs: list[Placement] = [REPLICATE] * max(len(columns), len(call.outputs))
    for i, column in enumerate(columns):
        current = [call.current[c] for c in column]
        chosen: Placement = REPLICATE
        split = next((p for p in current if isinstance(p, (Shard, Chunk))), None)
        if in_place and current[0] == REPLICATE and call.operands[column[0]].op == "placeholder":
            split = None  # a parameter that is whole stays so, whatever its gradient is
        if split is not None and name != "max" and (name != "norm" or _norm_is_known(call, column[0], split)):
            chosen = split
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
    outputs = outputs[: max(len(call.outputs), 1)]
    if (
        call.index("found_inf") is not None
        and name.startswith("_amp")
        and any(isinstance(p, (Shard, Chunk)) for p in inputs)
    ):
        return [Layout(tuple(inputs), tuple(outputs), _emit_found_inf)]
    if name == "norm" and any(isinstance(p, (Shard, Chunk)) for p in outputs):
        return [Layout(tuple(inputs), (REPLICATE,) * len(outputs), _emit_norms)]
    return [Layout(tuple(inputs), tuple(outputs))]


def _norm_is_known(call: OpCall, operand: int, split: Shard | Chunk) -> bool:
    """Whether the norm follows from the norms of the pieces. An empty piece has no largest element."""
    power = call["ord"]
    if not isinstance(power, (int, float)) or power <= 0:
        return False
    if not math.isinf(power):
        return True
    if isinstance(split, Shard):
        return call.axis.is_even
    size, holders = call.specs[operand].shape[split.dim], call.axis.chunks
    return all(holders.chunk(size, rank)[1] for rank in range(holders.size))


def _emit_norms(call: LocalCall) -> list[fx.Node | None]:
    """Norms of split tensors from powers of the local ones, all in one reduction an axis."""
    power = float(call["ord"])
    items = [node for node in call.items(call.default()) if node is not None]
    for axis, layout in zip(call.program.axes, call.layouts, strict=True):
        split = [i for i, p in enumerate(layout.inputs) if isinstance(p, (Shard, Chunk))]
        if not split:
            continue
        local = call.call(aten.stack.default, [items[i] for i in split])
        holders = axis_of_pieces(axis, layout.inputs)
        if math.isinf(power):
            norms = call.all_reduce(local, [holders], "max")
        else:
            norms = norm_of_norms(call, local, [holders], power)
        for position, i in enumerate(split):
            items[i] = call.call(aten.select.int, norms, 0, position)
    return list(items)


def _emit_found_inf(call: LocalCall) -> list[fx.Node | None]:
    """Each rank looks at its parts; what one of them finds holds for all."""
    call.default()
    found = call["found_inf"]
    call.call(aten.copy_.default, found, call.all_reduce(found, call.emitting_axes(_emit_found_inf), "max"))
    return []


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
