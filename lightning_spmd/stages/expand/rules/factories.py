"""Tensors out of nothing: created whole on every rank, or as this rank's piece where a later write wants it so."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from lightning_spmd.ir.placement import REPLICATE, Shard
from lightning_spmd.ir.reads import READ
from lightning_spmd.parallel.pieces import local_spec
from lightning_spmd.stages.expand.call import Layout, LocalCall, Localizer, OpCall, Rule

aten = torch.ops.aten


def create(call: OpCall) -> list[Layout]:
    """Any placement of the result; operands (``new_zeros``) give dtype and device, not values."""
    operands = tuple(call.current)
    found = [Layout(operands, (REPLICATE,))]
    if isinstance(call.forced, Shard):
        found.append(Layout(operands, (call.forced,)))
    return found


def emit_zeros(call: LocalCall) -> list[fx.Node | None]:
    """As large as the result is on this rank, whatever part of it the operand is (``zeros_like``)."""
    spec = call.outputs[0]
    return [call.call(aten.zeros.default, call.output_shape(), dtype=spec.dtype, device=spec.device)]


def read(call: OpCall) -> list[Layout]:
    """A number that Python reads is the global one: of a whole tensor, on every rank."""
    return []


def _size(call: LocalCall) -> dict[str, Any]:
    return {"size": call.output_shape()}


_SIZED = [
    aten.zeros,
    aten.ones,
    aten.full,
    aten.empty.memory_format,
    aten.new_zeros,
    aten.new_ones,
    aten.new_full,
    aten.new_empty,
]

RULES: dict[Any, Rule] = dict.fromkeys(
    [*_SIZED, aten.scalar_tensor, aten.new_empty_strided, aten.empty_strided], create
)
RULES[READ] = read


def _size_and_stride(call: LocalCall) -> dict[str, Any]:
    placements = [layout.outputs[0] for layout in call.layouts]
    spec = local_spec(call.outputs[0], placements, call.program.axes)
    return {"size": list(spec.shape), "stride": list(spec.stride)}


LOCALIZERS: dict[Any, Localizer] = {
    **dict.fromkeys(_SIZED, _size),
    **dict.fromkeys([aten.new_empty_strided, aten.empty_strided], _size_and_stride),
}
