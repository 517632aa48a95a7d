"""Losses over the global batch.

A mean is the local sum over the *global* count. For cross-entropy the count is the total weight of the targets that are
not ignored, which the ranks hold in unequal parts: it is all-reduced as one scalar before it divides, so the loss is
that of one device and not the mean of the ranks' means.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from lightning_spmd.ir.placement import PARTIAL
from lightning_spmd.stages.expand.call import Layout, OpCall, Rule, Where, along

if TYPE_CHECKING:
    from lightning_spmd.stages.expand.emit import LocalCall

aten = torch.ops.aten
NONE, MEAN, SUM = 0, 1, 2

_ROW_LOSSES = ("multi_margin_loss", "multilabel_margin_loss_forward")


# ---------------------------------------------------------------- cross-entropy
def _emit_nll_mean(call: LocalCall) -> list[fx.Node | None]:
    total, weight = call.items(call.default(reduction=SUM))
    if total is None or weight is None:
        return [total, weight]
    weight = call.all_reduce(weight, call.emitting_axes(_emit_nll_mean))
    return [call.call(aten.div.Tensor, total, weight), weight]


def _class_dimensions(call: OpCall) -> list[int]:
    """Dimensions of the scores that the targets have too."""
    return [d for d in range(len(call["self"].meta["val"].shape)) if d != 1] if call["target"].meta["val"].shape else []


def _target_dim(dim: int) -> int:
    return dim if dim == 0 else dim - 1


def nll_forward(call: OpCall) -> list[Layout]:
    """``nll_loss_forward`` and its 2-d form: scores ``(N, C, ...)``, targets ``(N, ...)``."""
    found: list[Layout] = []
    if len(call["self"].meta["val"].shape) < 2:
        return found
    for dim in _class_dimensions(call):
        inputs = call.named({"self": dim, "target": _target_dim(dim)})
        if call["reduction"] == NONE:
            found += along(call, inputs, [_target_dim(dim), PARTIAL])
        elif call["reduction"] == SUM:
            found += along(call, inputs, [PARTIAL, PARTIAL])
        else:
            found += along(call, inputs, [PARTIAL, None], _emit_nll_mean)
    return found


def nll_backward(call: OpCall) -> list[Layout]:
    """The kernel divides by the total weight that it is given, which is global already."""
    found: list[Layout] = []
    if len(call["self"].meta["val"].shape) < 2:
        return found
    weight = call.index("total_weight")
    for dim in _class_dimensions(call):
        upstream = _target_dim(dim) if call["reduction"] == NONE else None
        inputs: list[Where] = list(call.named({"self": dim, "target": _target_dim(dim), "grad_output": upstream}))
        if call["reduction"] != MEAN and weight is not None:
            inputs[weight] = call.current[weight]
        found += along(call, inputs, [dim])
    return found


# ---------------------------------------------------------------- element-wise losses
def _count(call: LocalCall) -> int:
    shape = call.spec("self").shape
    name = call.op.overloadpacket.__name__
    return shape[0] if name.startswith(_ROW_LOSSES) else math.prod(shape)


def _emit_mean(call: LocalCall) -> list[fx.Node | None]:
    local = call.default(reduction=SUM)
    outputs = [local] if len(call.outputs) == 1 else call.items(local)
    total = outputs[0]
    return [None if total is None else call.call(aten.div.Tensor, total, _count(call)), *outputs[1:]]


def _emit_mean_backward(call: LocalCall) -> list[fx.Node | None]:
    scaled = call.call(aten.div.Tensor, call["grad_output"], _count(call))
    return [call.default(reduction=SUM, grad_output=scaled)]


def _dims(call: OpCall) -> list[int]:
    name = call.op.overloadpacket.__name__
    return [0] if name.startswith(_ROW_LOSSES) else list(range(len(call["self"].meta["val"].shape)))


def _operand_dims(call: OpCall, dim: int) -> list[Where]:
    shape = call["self"].meta["val"].shape
    found: list[Where] = []
    row_loss = call.op.overloadpacket.__name__.startswith(_ROW_LOSSES)
    for i, spec in enumerate(call.specs):
        if row_loss:
            found.append(None if i == call.index("weight") or not spec.shape else 0)
            continue
        own = dim - (len(shape) - len(spec.shape))
        found.append(own if own >= 0 and spec.shape and spec.shape[own] == shape[dim] else None)
    return found


def elementwise_loss(call: OpCall) -> list[Layout]:
    """Losses that are a sum or mean over elements (or rows)."""
    found: list[Layout] = []
    for dim in _dims(call):
        inputs = _operand_dims(call, dim)
        others: list[Where] = [None if o is None else dim for o in call.outputs[1:]]
        if call["reduction"] == NONE:
            found += along(call, inputs, [dim, *others])
        else:
            found += along(call, inputs, [PARTIAL, *others], _emit_mean if call["reduction"] == MEAN else None)
    return found


def elementwise_loss_backward(call: OpCall) -> list[Layout]:
    """Gradients of the same: the mean's divisor is the global count."""
    found: list[Layout] = []
    upstream = call.index("grad_output")
    for dim in _dims(call):
        inputs = _operand_dims(call, dim)
        if call["reduction"] != NONE and upstream is not None:
            inputs[upstream] = None
        found += along(call, inputs, [dim], _emit_mean_backward if call["reduction"] == MEAN else None)
    return found


_ELEMENTWISE = [
    "mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits",
    "soft_margin_loss", "multi_margin_loss", "multilabel_margin_loss",
]  # fmt: skip

RULES: dict[Any, Rule] = {
    **dict.fromkeys([aten.nll_loss_forward, aten.nll_loss2d_forward], nll_forward),
    **dict.fromkeys([aten.nll_loss_backward, aten.nll_loss2d_backward], nll_backward),
    **{
        getattr(aten, n): elementwise_loss
        for n in [*_ELEMENTWISE, "multilabel_margin_loss_forward"]
        if hasattr(aten, n)
    },
    **{
        getattr(aten, f"{n}_backward"): elementwise_loss_backward
        for n in _ELEMENTWISE
        if hasattr(aten, f"{n}_backward")
    },
}


def _ctc(call: OpCall) -> list[Layout]:
    """``_ctc_loss``: log-probabilities ``(T, N, C)``, padded targets ``(N, S)``, one loss a sequence."""
    if len(call["targets"].meta["val"].shape) != 2 or call.index("input_lengths") is None:
        return []
    return along(call, call.named({"log_probs": 1, "targets": 0, "input_lengths": 0, "target_lengths": 0}), [0, 0])


RULES[aten._ctc_loss] = _ctc
