"""Recurrent layers that are one kernel: the rows of the batch are independent, time and units are not.

These are cuDNN's (LSTM, GRU, plain), oneDNN's LSTM, and the cells of one time step that are one kernel on GPUs. What a
forward kernel keeps for its backward (reserve or workspace, packed weights) is opaque and of this rank's own; nothing
else reads it. Packed sequences, where rows end at different times, have no dimension of rows and no rule there; as
padded rows with lengths (``ir.operators.packed_rnn``) they have one.
"""

from __future__ import annotations

from typing import Any

import torch

from lightning_spmd.ir.operators.onednn_lstm import LSTM_LAYER, LSTM_LAYER_BACKWARD
from lightning_spmd.ir.operators.packed_rnn import PACKED_NOISE, PACKED_RNN, PACKED_RNN_BACKWARD
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


def _lengths(call: OpCall) -> list[Where]:
    return [] if call["lengths"] is None else [0]


def _packed_forward(call: OpCall) -> list[Layout]:
    rows = 0 if call["rows_first"] else 1
    states, weights = len(call["hx"]), len(call["weights"])
    inputs: list[Where] = [rows, *_lengths(call), *[_STATE_ROWS] * states, *[None] * weights]
    outputs: list[Where] = [rows, *[_STATE_ROWS] * states, None]
    return along(call, inputs, outputs)


def _packed_backward(call: OpCall) -> list[Layout]:
    rows = 0 if call["rows_first"] else 1
    states, weights = len(call["hx"]), len(call["weights"])
    given: list[Where] = [rows, *[_STATE_ROWS] * states]
    of_grads = [dim for dim, gradient in zip(given, call["grads"], strict=True) if gradient is not None]
    inputs = [*of_grads, rows, *_lengths(call), *[_STATE_ROWS] * states, *[None] * weights, None]
    made: list[Where] = [*given, *[PARTIAL] * weights]
    return along(call, inputs, [dim for dim, wants in zip(made, call["wanted"], strict=True) if wants])


def _lstm_layer(call: OpCall) -> list[Layout]:
    """Time comes first; states are those of one layer, (rows, units)."""
    return along(call, [1, None, None, None, None, 0, 0], [1, 0, 0, 0])


def _lstm_layer_backward(call: OpCall) -> list[Layout]:
    made: list[Where] = [1, 0, 0]
    of_grads = [d for d, name in zip(made, ("output", "hy", "cy"), strict=True) if call[f"grad_{name}"] is not None]
    inputs: list[Where] = [1, None, None, None, None, 0, 0, *made, *of_grads, 0]
    return along(call, inputs, [1, PARTIAL, PARTIAL, PARTIAL, PARTIAL, 0, 0])


def _cell(call: OpCall) -> list[Layout]:
    """Everything but the biases has a row for each of the batch."""
    names = [argument.name for argument in call.op._schema.arguments]
    dims: dict[str, int | None] = {name: 0 for name in names if not name.endswith("_bias")}
    return along(call, call.named(dims), [0] * len(call.outputs))


def _cell_backward(call: OpCall) -> list[Layout]:
    """The gradients of biases, which come last, are sums over the rows."""
    biases = {aten._thnn_fused_lstm_cell_backward_impl: 1}.get(call.op.overloadpacket, 2)
    made: list[Where] = [*[0] * (len(call.outputs) - biases), *[PARTIAL] * biases]
    outputs = [None if spec is None else where for where, spec in zip(made, call.outputs, strict=True)]
    return along(call, [0] * len(call.operands), outputs)


def _packed_noise(call: OpCall) -> list[Layout]:
    rows = 0 if call["rows_first"] else 1
    return along(call, [rows, 0], [rows])


RULES: dict[Any, Rule] = {
    LSTM_LAYER: _lstm_layer,
    LSTM_LAYER_BACKWARD: _lstm_layer_backward,
    aten._cudnn_rnn: _forward,
    aten._cudnn_rnn_backward: _backward,
    aten._thnn_fused_lstm_cell: _cell,
    aten._thnn_fused_lstm_cell_backward_impl: _cell_backward,
    aten._thnn_fused_gru_cell: _cell,
    aten._thnn_fused_gru_cell_backward: _cell_backward,
    PACKED_RNN: _packed_forward,
    PACKED_RNN_BACKWARD: _packed_backward,
    PACKED_NOISE: _packed_noise,
}
