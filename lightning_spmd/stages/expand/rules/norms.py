"""Layer, group and RMS norms: row-wise; gradients of weight and bias are partial sums."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from lightning_spmd.ir.first import first
from lightning_spmd.ir.placement import PARTIAL
from lightning_spmd.stages.expand.call import Layout, LocalCall, Localizer, OpCall, Rule, Where, along

aten = torch.ops.aten


def _rows(call: OpCall, leading: int, whole: tuple[str, ...], outputs: list[Where]) -> list[Layout]:
    found: list[Layout] = []
    names = [n for n, v in call.arguments.items() if call.index(n) is not None]
    for dim in range(leading):
        inputs = call.named({n: None if n in whole else dim for n in names})
        placed = [dim if o == 0 else o for o in outputs]
        placed = [None if spec is None else o for o, spec in zip(placed, call.outputs, strict=True)]
        found += along(call, inputs, placed)
    return found


def _layer(call: OpCall) -> list[Layout]:
    leading = len(call.specs[0].shape) - len(call["normalized_shape"])
    return _rows(call, leading, ("weight", "bias"), [0] * len(call.outputs))


def _layer_backward(call: OpCall) -> list[Layout]:
    leading = len(call.specs[0].shape) - len(call["normalized_shape"])
    return _rows(call, leading, ("weight", "bias"), [0, *[PARTIAL] * (len(call.outputs) - 1)])


def _group(call: OpCall) -> list[Layout]:
    return _rows(call, 1, ("weight", "bias"), [0, 0, 0]) + _groups(call, [1, 1, 1])


def _group_backward(call: OpCall) -> list[Layout]:
    return _rows(call, 1, ("weight", "bias"), [0, PARTIAL, PARTIAL]) + _groups(call, [1, 0, 0])


def _groups(call: OpCall, outputs: list[Where]) -> list[Layout]:
    """Split whole groups of channels."""
    if not call.axis.divides(call["group"]):
        return []
    inputs: list[Where] = [1 if len(spec.shape) > 1 else 0 for spec in call.specs]
    return along(call, inputs, [None if s is None else o for o, s in zip(outputs, call.outputs, strict=True)])


def _local_sizes(call: LocalCall) -> dict[str, Any]:
    operand = first(call.globals, "operand")
    for name in ("input", "grad_out"):  # a slice of the channels is not contiguous, as the kernels want it
        if isinstance(call.get(name), fx.Node):
            call.replace(name, call.program.dense(call[name]))
    rows, channels = call.program.shape(call[operand])[:2]
    return {"N": rows, "C": channels, "group": call.globals["group"] * channels // call.globals["C"]}


RULES: dict[Any, Rule] = {
    aten.native_layer_norm: _layer,
    aten.native_layer_norm_backward: _layer_backward,
    aten._fused_rms_norm: _layer,
    aten._fused_rms_norm_backward: _layer_backward,
    aten.native_group_norm: _group,
    aten.native_group_norm_backward: _group_backward,
}
LOCALIZERS: dict[Any, Localizer] = {
    aten.native_group_norm: _local_sizes,
    aten.native_group_norm_backward: _local_sizes,
}
