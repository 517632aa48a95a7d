"""cuDNN's recurrent layers (LSTM, GRU, plain): the rows of the batch are independent, time and units are not.

What the forward kernel keeps for its backward (the reserve, the packed weights) is opaque and of this rank's own;
nobody else reads it. Packed sequences, where rows end at different times, have no dimension of rows and no rule.
"""

from __future__ import annotations

from typing import Any

import torch

from lightning_spmd.ir.placement import PARTIAL
from lightning_spmd.stages.expand.call import Layout, OpCall, Rule, Where, along

aten = torch.ops.aten
_STATE_ROWS = 1
"""Which dimension of hidden states the rows are: (layers times directions, rows, units)."""


def _dims(call: OpCall) -> dict[str, int | None]:
    rows = 0 if call["batch_first"] else 1
    dims: dict[str, int | None] = {}
    dims.update(dict.fromkeys(("input", "output", "grad_output"), rows))
    dims.update(dict.fromkeys(("hx", "cx", "grad_hy", "grad_cy"), _STATE_ROWS))
    return dims


def _forward(call: OpCall) -> list[Layout]:
    if call["batch_sizes"]:
        return []
    dims = _dims(call)
    outputs: list[Where] = [dims["input"], _STATE_ROWS, _STATE_ROWS if call["cx"] is not None else None, None, None]
    return along(call, call.named(dims), outputs)


def _backward(call: OpCall) -> list[Layout]:
    if call["batch_sizes"]:
        return []
    dims = _dims(call)
    states = (_STATE_ROWS, _STATE_ROWS if call["cx"] is not None else None)
    weights: list[Where] = [PARTIAL] * (len(call.outputs) - 3)
    outputs: list[Where] = [dims["input"], *states, *weights]
    return along(call, call.named(dims), [None if s is None else o for o, s in zip(outputs, call.outputs, strict=True)])


RULES: dict[Any, Rule] = {aten._cudnn_rnn: _forward, aten._cudnn_rnn_backward: _backward}
