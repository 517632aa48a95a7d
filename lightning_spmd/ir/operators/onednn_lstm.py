"""One layer of an LSTM by oneDNN, the kernel that eager uses on a CPU, as operators that a graph can hold.

    output, h, c, workspace = aten.mkldnn_rnn_layer(x, ...)      keeps a workspace under grad mode alone
    output, h, c, workspace = lstm_layer(x, ..., keeps=True)     whenever it is told to, below autograd

The size of the workspace is oneDNN's affair: it depends on the processor. A graph wants to know sizes, so it sees a
first part of the workspace, by rows, about as large as what there is. The whole hangs on that; where it is lost (the
part was copied), the forward pass is computed again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_spmd.ir.operators.library import define_operator

aten = torch.ops.aten
_EAGER, _EAGER_BACKWARD = (
    getattr(getattr(aten, name, None), "default", None)  # torch may be built without oneDNN
    for name in ("mkldnn_rnn_layer", "mkldnn_rnn_layer_backward")
)
_TENSORS = "Tensor input, Tensor weight0, Tensor weight1, Tensor weight2, Tensor weight3, Tensor hx, Tensor cx"
_KEPT = 8
"""Numbers that the graph counts as kept for a unit of a row and a step of time: four gates, and what they come from."""


def _forward(*given: Any) -> tuple[Tensor, ...]:
    *operands, keeps = given
    shown = _forward_shapes(*given)
    if not shown[0].numel():  # a rank without rows
        return shown
    tensors = [t.detach().contiguous() for t in operands[:7]]
    with torch.set_grad_enabled(keeps):
        output, h, c, whole = aten.mkldnn_rnn_layer(*tensors, *operands[7:])
    if not keeps:
        return output, h, c, shown[3]
    kept = shown[3]
    part = whole.narrow(0, 0, kept.numel()).view(kept.shape) if kept.numel() <= whole.numel() else kept
    part.whole = whole  # type: ignore[attr-defined]
    return output, h, c, part


def _backward(*given: Any) -> tuple[Tensor, ...]:
    if not given[7].numel():
        return tuple(t.zero_() for t in _backward_shapes(*given))
    tensors, gradients, how = [t.detach().contiguous() for t in given[:10]], given[10:13], given[13:22]
    whole = given[22].__dict__.get("whole")
    if whole is None:
        reverse, mode, size, layers, biases, train, both, batch_sizes, rows_first = how
        again = reverse, batch_sizes, mode, size, layers, biases, both, rows_first, train
        with torch.enable_grad():
            *_, whole = aten.mkldnn_rnn_layer(*tensors[:7], *again)
    return aten.mkldnn_rnn_layer_backward(*tensors, *gradients, *how, whole)


def _forward_shapes(*given: Any) -> tuple[Tensor, ...]:
    input, hx, cx, units, keeps = given[0], given[5], given[6], given[10], given[16]
    time, rows, _ = input.shape
    kept = input.new_empty((rows, time * units * _KEPT * input.element_size() * keeps), dtype=torch.uint8)
    return input.new_empty((time, rows, units)), hx.new_empty(hx.shape), cx.new_empty(cx.shape), kept


def _backward_shapes(*given: Any) -> tuple[Tensor, ...]:
    """The kernel gives float32 whatever it is given, and gradients of biases where there are none."""
    input, weight0, weight1, _, _, hx, cx = given[:7]
    bias = weight0.shape[:1]
    shapes = input.shape, weight0.shape, weight1.shape, bias, bias, hx.shape, cx.shape
    return tuple(input.new_empty(shape, dtype=torch.float32) for shape in shapes)


LSTM_LAYER = define_operator(
    f"lstm_layer({_TENSORS}, bool reverse, int[] batch_sizes, int mode, int hidden_size, int num_layers, "
    "bool has_biases, bool bidirectional, bool batch_first, bool train, bool keeps) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _forward_shapes,
)
LSTM_LAYER_BACKWARD = define_operator(
    f"lstm_layer_backward({_TENSORS}, Tensor output, Tensor hy, Tensor cy, Tensor? grad_output, Tensor? grad_hy, "
    "Tensor? grad_cy, bool reverse, int mode, int hidden_size, int num_layers, bool has_biases, bool train, "
    "bool bidirectional, int[] batch_sizes, bool batch_first, Tensor workspace) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _backward_shapes,
)


def in_a_graph(op: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """The operator that stands in a graph for one of eager's, and its arguments.

    Args:
        op: any operator.
        args: its arguments.
    """
    if op is _EAGER_BACKWARD:
        return LSTM_LAYER_BACKWARD, args
    return (op, args) if op is not _EAGER else (LSTM_LAYER, (*args, torch.is_grad_enabled()))
