"""Convolutions: the batch is split, and the weight's gradient is a partial sum; or channels are split.

Split output channels of the weight give split channels of the result; split input channels give a partial sum, as in a
matrix product. With groups, channels are split by whole groups on both sides and nothing is summed.
"""

from __future__ import annotations

from typing import Any

import torch

from lightning_spmd.ir.placement import PARTIAL
from lightning_spmd.stages.expand.call import Layout, LocalCall, Localizer, OpCall, Rule, Where, along

aten = torch.ops.aten


def _forward(call: OpCall) -> list[Layout]:
    return along(call, call.named({"input": 0, "self": 0}), [0])


def _backward(call: OpCall) -> list[Layout]:
    return along(call, call.named({"grad_output": 0, "input": 0, "self": 0}), _present(call, [0, PARTIAL, PARTIAL]))


def _present(call: OpCall, outputs: list[Where]) -> list[Where]:
    return [None if spec is None else where for where, spec in zip(outputs, call.outputs, strict=True)]


def _channels(call: OpCall) -> tuple[int, int]:
    """The weight's dimensions of (input, output) channels."""
    return (0, 1) if call.get("transposed") else (1, 0)


def _named(call: OpCall, **dims: Where) -> list[Where]:
    found: list[Where] = [None] * len(call.operands)
    for name, where in dims.items():
        if name in call.arguments and (i := call.index(name)) is not None:
            found[i] = where
    return found


def forward(call: OpCall) -> list[Layout]:
    """Split rows, or split channels of the weight."""
    found = _forward(call)
    if call["groups"] > 1:
        whole = call.axis.divides(call["groups"])
        return found + (along(call, _named(call, input=1, weight=0, bias=0), [1]) if whole else [])
    into, out = _channels(call)
    found += along(call, _named(call, weight=out, bias=0), [1])
    return found + along(call, _named(call, input=1, weight=into, bias=PARTIAL), [PARTIAL])


def backward(call: OpCall) -> list[Layout]:
    """The same for the gradients of input, weight and bias."""
    found = _backward(call)
    if call["groups"] > 1:
        whole = call.axis.divides(call["groups"])
        inputs = _named(call, grad_output=1, input=1, weight=0)
        return found + (along(call, inputs, _present(call, [1, 0, 0])) if whole else [])
    into, out = _channels(call)
    found += along(call, _named(call, grad_output=1, weight=out), _present(call, [PARTIAL, out, 0]))
    return found + along(call, _named(call, input=1, weight=into), _present(call, [1, into, None]))


def _local_groups(call: LocalCall) -> dict[str, Any]:
    """Groups and bias as this rank has them."""
    changed: dict[str, Any] = {}
    mine, all_channels = call.program.shape(call["input"])[1], call.spec("input").shape[1]
    if call.globals["groups"] > 1 and mine != all_channels:
        changed["groups"] = call.globals["groups"] * mine // all_channels
    if call.globals.get("bias_sizes") is not None:
        changed["bias_sizes"] = [call.program.shape(call["grad_output"])[1]]
    return changed


_FORWARD = [aten.convolution, aten._convolution, aten.convolution_overrideable]
_BACKWARD = [aten.convolution_backward, aten.convolution_backward_overrideable]

RULES: dict[Any, Rule] = {
    **dict.fromkeys(_FORWARD, forward),
    **dict.fromkeys(_BACKWARD, backward),
    aten.mkldnn_convolution: _forward,
}
LOCALIZERS: dict[Any, Localizer] = dict.fromkeys([*_FORWARD, aten.convolution_backward], _local_groups)
