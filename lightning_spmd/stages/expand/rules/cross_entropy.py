"""Cross-entropy over the global batch, and over classes that are split (vocabulary parallelism, arXiv:1909.08053).

A mean divides by the total weight of the targets that are not ignored, which the ranks hold in unequal parts: it is
all-reduced as one scalar before it divides, so the loss is that of one device and not the mean of the ranks' means.

With split classes no rank ever sees all scores of a row. The log-softmax reduces one maximum and one sum a row; the
rank that has the target's class picks its score, so the loss is a partial sum. The gradient of a row adds up to
something that every rank knows from the target alone: :func:`_emit_nll_backward` leaves it to the log-softmax' own
gradient, which otherwise reduces it.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from lightning_spmd.ir.placement import PARTIAL, REPLICATE, Placement, Shard, ShardAxis
from lightning_spmd.stages.expand.call import Layout, LocalCall, OpCall, Rule, Where, along
from lightning_spmd.stages.expand.rules import reductions

aten = torch.ops.aten
NONE, MEAN, SUM = 0, 1, 2
_CLASSES = Shard(1)


# ---------------------------------------------------------------- log-softmax along a split dimension
def _over_split(call: OpCall, emit: Any) -> list[Layout]:
    dim = call["dim"] % len(call.shape)
    if Shard(dim) not in call.current:
        return []
    return along(call, [dim] * len(call.operands), [dim], emit)


def _emit_log_softmax(call: LocalCall) -> list[fx.Node | None]:
    axes, run = call.emitting_axes(_emit_log_softmax), call.call
    dtype, dim = call.outputs[0].dtype, [call.globals["dim"]]
    inner = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    scores = call["self"]
    if scores.meta["val"].dtype != inner:
        scores = run(aten._to_copy.default, scores, dtype=inner)
    # a NaN that gets lost here is in the sum of the exponentials
    largest = call.all_reduce(run(aten.amax.default, scores, dim, True), axes, "max", keep_nan=False)
    shifted = run(aten.sub.Tensor, scores, largest)
    total = call.all_reduce(run(aten.sum.dim_IntList, run(aten.exp.default, shifted), dim, True), axes)
    result = run(aten.sub.Tensor, shifted, run(aten.log.default, total))
    return [result if inner == dtype else run(aten._to_copy.default, result, dtype=dtype)]


def _log_softmax(call: OpCall) -> list[Layout]:
    return reductions.worked_along(call) + _over_split(call, _emit_log_softmax)


def _emit_log_softmax_backward(call: LocalCall) -> list[fx.Node | None]:
    run, gradient = call.call, call["grad_output"]
    dtype = call.outputs[0].dtype
    inner = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype

    def wide(value: fx.Node) -> fx.Node:
        return value if value.meta["val"].dtype == inner else run(aten._to_copy.default, value, dtype=inner)

    total = call.program.class_sums.get(gradient)
    gradient = wide(gradient)
    if total is None:
        total = run(aten.sum.dim_IntList, gradient, [call.globals["dim"]], True)
        total = call.all_reduce(total, call.emitting_axes(_emit_log_softmax_backward))
    shares = run(aten.mul.Tensor, run(aten.exp.default, wide(call["output"])), wide(total))
    result = run(aten.sub.Tensor, gradient, shares)
    return [result if inner == dtype else run(aten._to_copy.default, result, dtype=dtype)]


def _log_softmax_backward(call: OpCall) -> list[Layout]:
    return reductions.worked_along(call) + _over_split(call, _emit_log_softmax_backward)


# ---------------------------------------------------------------- negative log-likelihood
def _class_axes(call: LocalCall) -> list[ShardAxis]:
    position = list(call.globals).index("self")  # "grad_output" is a tensor before it, where there is one
    pairs = zip(call.program.axes, call.layouts, strict=True)
    return [axis for axis, layout in pairs if layout.inputs[position] == _CLASSES]


def _own_targets(call: LocalCall, axis: ShardAxis) -> tuple[fx.Node, fx.Node, fx.Node, fx.Node]:
    """(target as an index into this rank's classes, which are elsewhere, which are ignored, weight of each)."""
    run, target, scores = call.call, call["target"], call.spec("self")
    classes = scores.shape[1]
    own = run(aten.sub.Tensor, target, axis.offset(classes))
    own.meta["rank_dependent"] = True
    elsewhere = run(
        aten.logical_or.default,
        run(aten.lt.Scalar, own, 0),
        run(aten.ge.Scalar, own, axis.local_size(classes)),
    )
    ignored = run(aten.eq.Scalar, target, call.globals["ignore_index"])
    elsewhere = run(aten.logical_or.default, elsewhere, ignored)
    weight = call.get("weight")
    if weight is None:
        weights = run(aten.ones_like.default, target, dtype=scores.dtype)
    else:
        valid = run(aten.masked_fill.Scalar, target, ignored, 0)
        weights = run(aten.view.default, valid, [-1])
        weights = run(aten.view.default, run(aten.index_select.default, weight, 0, weights), call.program.shape(target))
    weights = run(aten.masked_fill.Scalar, weights, ignored, 0)
    return run(aten.masked_fill.Scalar, own, elsewhere, 0), elsewhere, ignored, weights


def _emit_nll(call: LocalCall) -> list[fx.Node | None]:
    """Forward. Axes that split the classes leave a partial sum; the total weight is reduced over the others."""
    reduction, run = call.globals["reduction"], call.call
    split = _class_axes(call)
    rows = [axis for axis in call.emitting_axes(_emit_nll) if axis not in split] if reduction == MEAN else []
    if split:
        own, elsewhere, _, weights = _own_targets(call, split[0])
        picked = run(aten.gather.default, call["self"], 1, run(aten.unsqueeze.default, own, 1))
        losses = run(aten.mul.Tensor, run(aten.neg.default, run(aten.squeeze.dim, picked, 1)), weights)
        losses = run(aten.masked_fill.Scalar, losses, elsewhere, 0)
        total_weight = run(aten.sum.default, weights)
        if reduction == NONE:
            return [losses, run(aten.mul.Scalar, total_weight, 0.0)]
        total = run(aten.sum.default, losses)
    else:
        both = call.default(reduction=SUM)
        total, total_weight = (run(operator.getitem, both, i) for i in (0, 1))
    if reduction != MEAN:
        return [total, total_weight]
    total_weight = call.all_reduce(total_weight, rows)
    return [run(aten.div.Tensor, total, total_weight), total_weight]


def _emit_nll_backward(call: LocalCall) -> list[fx.Node | None]:
    """The kernel's own arithmetic at the target's class, on the rank that has it."""
    run = call.call
    (axis,) = _class_axes(call)
    own, elsewhere, ignored, weights = _own_targets(call, axis)
    upstream = call["grad_output"]
    if call.globals["reduction"] == MEAN:
        upstream = run(aten.div.Tensor, upstream, call["total_weight"])
    slope = run(aten.neg.default, run(aten.mul.Tensor, weights, upstream))
    slope = run(aten.masked_fill.Scalar, slope, ignored, 0)  # a total weight of zero must not make ignored rows NaN
    here = run(aten.masked_fill.Scalar, slope, elsewhere, 0)
    zeros = run(aten.zeros_like.default, call["self"])
    at = run(aten.unsqueeze.default, own, 1)
    gradient = run(aten.scatter.src, zeros, 1, at, run(aten.unsqueeze.default, here, 1))
    call.program.class_sums[gradient] = run(aten.unsqueeze.default, slope, 1)
    return [gradient]


def _row_dimensions(call: OpCall) -> list[int]:
    """Dimensions of the scores that the targets have too."""
    return [d for d in range(len(call["self"].meta["val"].shape)) if d != 1] if call["target"].meta["val"].shape else []


def _target_dim(dim: int) -> int:
    return dim if dim == 0 else dim - 1


def _has_classes(call: OpCall) -> bool:
    return len(call["self"].meta["val"].shape) >= 2


def _split_classes(call: OpCall, outputs: tuple[Placement, ...], emit: Any) -> list[Layout]:
    position = call.index("self")
    if position is None or call.current[position] != _CLASSES:
        return []
    inputs = tuple(_CLASSES if i == position else REPLICATE for i in range(len(call.operands)))
    return [Layout(inputs, outputs, emit, local=True)]


def nll_forward(call: OpCall) -> list[Layout]:
    """``nll_loss_forward`` and its 2-d form: scores ``(N, C, ...)``, targets ``(N, ...)``."""
    found: list[Layout] = []
    if not _has_classes(call):
        return found
    for dim in _row_dimensions(call):
        inputs = call.named({"self": dim, "target": _target_dim(dim)})
        if call["reduction"] == NONE:
            found += along(call, inputs, [_target_dim(dim), PARTIAL])
        elif call["reduction"] == SUM:
            found += along(call, inputs, [PARTIAL, PARTIAL])
        else:
            found += along(call, inputs, [PARTIAL, None], _emit_nll)
    return found + _split_classes(call, (PARTIAL, REPLICATE), _emit_nll)


def nll_backward(call: OpCall) -> list[Layout]:
    """The kernel divides by the total weight that it is given, which is global already."""
    found: list[Layout] = []
    if not _has_classes(call):
        return found
    weight = call.index("total_weight")
    for dim in _row_dimensions(call):
        upstream = _target_dim(dim) if call["reduction"] == NONE else None
        inputs: list[Where] = list(call.named({"self": dim, "target": _target_dim(dim), "grad_output": upstream}))
        if call["reduction"] != MEAN and weight is not None:
            inputs[weight] = call.current[weight]
        found += along(call, inputs, [dim])
    return found + _split_classes(call, (_CLASSES,), _emit_nll_backward)


RULES: dict[Any, Rule] = {
    aten._log_softmax: _log_softmax,
    aten._log_softmax_backward_data: _log_softmax_backward,
    **dict.fromkeys([aten.nll_loss_forward, aten.nll_loss2d_forward], nll_forward),
    **dict.fromkeys([aten.nll_loss_backward, aten.nll_loss2d_backward], nll_backward),
}
