"""Convolutions: the batch is split, the weight's gradient is a partial sum."""

from __future__ import annotations

from typing import Any

import torch

from lightning_spmd.ir.placement import PARTIAL
from lightning_spmd.stages.expand.call import Layout, OpCall, Rule, Where, along

aten = torch.ops.aten


def _forward(call: OpCall) -> list[Layout]:
    return along(call, call.named({"input": 0, "self": 0}), [0])


def _backward(call: OpCall) -> list[Layout]:
    outputs: list[Where] = [0, PARTIAL, PARTIAL]
    outputs = [None if spec is None else where for where, spec in zip(outputs, call.outputs, strict=True)]
    return along(call, call.named({"grad_output": 0, "input": 0, "self": 0}), outputs)


RULES: dict[Any, Rule] = {
    **dict.fromkeys(
        [aten.convolution, aten._convolution, aten.mkldnn_convolution, aten.convolution_overrideable], _forward
    ),
    **dict.fromkeys([aten.convolution_backward, aten.convolution_backward_overrideable], _backward),
}
