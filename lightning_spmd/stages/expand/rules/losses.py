"""Losses over the global batch: a mean is the local sum over the *global* count. Not here: ``cross_entropy``."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from lightning_spmd.ir.operators.ctc import CTC_LOSS, CTC_LOSS_BACKWARD, PAD_TARGETS
from lightning_spmd.ir.placement import PARTIAL, REPLICATE
from lightning_spmd.stages.expand.call import Layout, LocalCall, OpCall, Rule, Where, along

aten = torch.ops.aten
NONE, MEAN, SUM = 0, 1, 2

_ROW_LOSSES = ("multi_margin_loss", "multilabel_margin_loss")


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
    ndim = len(call["self"].meta["val"].shape)
    if call.op.overloadpacket.__name__.startswith(_ROW_LOSSES):
        return [0] if ndim == 2 else []  # of one dimension it is one row
    return list(range(ndim))


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


def _pad_targets(call: OpCall) -> list[Layout]:
    """Labels without padding are cut by the lengths of all sequences: they are gathered, scores are not."""
    return [Layout((REPLICATE, REPLICATE), (REPLICATE,))]


def _ctc_backward(call: OpCall) -> list[Layout]:
    """Each sequence has its own gradient."""
    rows = dict.fromkeys(["grad", "targets", "input_lengths", "target_lengths", "neg_log_likelihood", "log_alpha"], 0)
    return along(call, call.named({**rows, "log_probs": 1}), [1])


RULES[aten._ctc_loss] = RULES[CTC_LOSS] = _ctc
RULES[CTC_LOSS_BACKWARD] = _ctc_backward
RULES[PAD_TARGETS] = _pad_targets
