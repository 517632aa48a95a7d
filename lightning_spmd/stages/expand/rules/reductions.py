"""Reductions and row-wise operators along a dimension.

Reducing over the split dimension gives a partial sum (or maximum); a mean is the local sum over the global count, so
ranks may hold different numbers of rows. Variances take two reductions, of the mean and of the squared deviations from
it: one would subtract large numbers from each other. Norms combine local powers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from lightning_spmd.ir.placement import PARTIAL, Chunk, Partial, Placement, Shard, ShardAxis
from lightning_spmd.stages.expand.call import Emit, Layout, LocalCall, OpCall, Rule, Where, along, linear, rowwise
from lightning_spmd.stages.expand.rules.pointwise import elementwise

aten = torch.ops.aten


def _reduced(arguments: Any, ndim: int) -> list[int]:
    dims = arguments.get("dim")
    if dims is None or dims == []:
        return list(range(ndim))
    return [d % ndim for d in ([dims] if isinstance(dims, int) else dims)] if ndim else []


def _after(dim: int, reduced: list[int], keepdim: bool) -> int:
    return dim if keepdim else dim - sum(1 for d in reduced if d < dim)


def _kept(call: OpCall) -> list[Layout]:
    """Layouts that split a dimension which is not reduced."""
    ndim = len(call.specs[0].shape)
    reduced = _reduced(call.arguments, ndim)
    found: list[Layout] = []
    for dim in range(ndim):
        if dim not in reduced:
            target = _after(dim, reduced, bool(call.get("keepdim", False)))
            found += along(call, [dim] * len(call.operands), [None if o is None else target for o in call.outputs])
    return found


def _over(call: OpCall, result: Where, emit: Emit | None = None) -> list[Layout]:
    """Layouts that split a reduced dimension."""
    reduced = _reduced(call.arguments, len(call.specs[0].shape))
    return [c for dim in reduced for c in along(call, [dim], [result] * len(call.outputs), emit)]


def _of_something(call: OpCall, layouts: list[Layout]) -> list[Layout]:
    """The layouts in which no rank has an empty piece, of which there is no maximum."""
    axis, shape = call.axis, call.specs[0].shape

    def fits(placement: Placement) -> bool:
        if isinstance(placement, Chunk):
            return all(axis.chunk(shape[placement.dim], rank)[1] for rank in range(len(axis.chunks.split)))
        if isinstance(placement, Shard) and placement.outer == 1:
            return all(axis.local_size(shape[placement.dim], rank) for rank in range(len(axis.split)))
        return True

    return [layout for layout in layouts if fits(layout.inputs[0])]


def _sum(call: OpCall) -> list[Layout]:
    return _kept(call) + _over(call, PARTIAL) + linear(call, (0,))


def _emit_mean(call: LocalCall) -> list[fx.Node | None]:
    spec = call.spec("self")
    dims = _reduced(call.globals, len(spec.shape))
    count = math.prod(spec.shape[d] for d in dims)
    dtype = call.outputs[0].dtype
    # Half precision: add up in float32, as mean itself does.
    inner = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    total = call.call(aten.sum.dim_IntList, call["self"], dims, bool(call.get("keepdim", False)), dtype=inner)
    mean = call.call(aten.div.Tensor, total, count)
    return [mean if inner == dtype else call.call(aten._to_copy.default, mean, dtype=dtype)]


def _mean(call: OpCall) -> list[Layout]:
    return _kept(call) + _over(call, PARTIAL, _emit_mean) + linear(call, (0,))


def _extreme(op: str) -> Rule:
    partial = Partial("max") if op == "max" else Partial("min")

    def rule(call: OpCall) -> list[Layout]:
        if len(call.operands) == 2 or len(call.outputs) == 2:
            return _kept(call) if len(call.outputs) == 2 else elementwise(call)
        integer_or_float = call.specs[0].dtype != torch.bool
        return _kept(call) + (_of_something(call, _over(call, partial)) if integer_or_float else [])

    return rule


def _emit_any(call: LocalCall) -> list[fx.Node | None]:
    local = call.default()
    number = call.call(aten._to_copy.default, local, dtype=torch.int32)
    op = "max" if call.op.overloadpacket in (aten.any, aten._is_any_true) else "min"
    whole = call.all_reduce(number, call.emitting_axes(_emit_any), op)
    return [call.call(aten._to_copy.default, whole, dtype=call.outputs[0].dtype)]


def _any(call: OpCall) -> list[Layout]:
    return _kept(call) + _over(call, None, _emit_any)


def _correction(call: LocalCall) -> float:
    if "unbiased" in call.globals:
        return 1.0 if call.globals["unbiased"] else 0.0
    correction = call.globals.get("correction")
    return 1.0 if correction is None else float(correction)


def _emit_variance(call: LocalCall) -> list[fx.Node | None]:
    spec = call.spec("self")
    dims = _reduced(call.globals, len(spec.shape))
    keep = bool(call.get("keepdim", False))
    count = math.prod(spec.shape[d] for d in dims)
    axes = call.emitting_axes(_emit_variance)
    wide = call.call(aten._to_copy.default, call["self"], dtype=torch.float64)
    total = call.all_reduce(call.call(aten.sum.dim_IntList, wide, dims, True), axes)
    mean = call.call(aten.div.Tensor, total, count)
    deviation = call.call(aten.sub.Tensor, wide, mean)
    squares = call.call(aten.sum.dim_IntList, call.call(aten.mul.Tensor, deviation, deviation), dims, True)
    variance = call.call(aten.div.Tensor, call.all_reduce(squares, axes), max(count - _correction(call), 0.0))
    name = call.op.overloadpacket.__name__
    if name.startswith("std"):
        variance = call.call(aten.sqrt.default, variance)

    def finish(value: fx.Node) -> fx.Node:
        value = value if keep else call.call(aten.squeeze.dims, value, dims)
        return call.call(aten._to_copy.default, value, dtype=call.outputs[0].dtype)

    return [finish(v) for v in ((variance, mean) if name.endswith("_mean") else (variance,))]


def _variance(call: OpCall) -> list[Layout]:
    return _kept(call) + ([] if call.specs[0].dtype.is_complex else _over(call, None, _emit_variance))


def _emit_norm(call: LocalCall) -> list[fx.Node | None]:
    power = float(call.get("ord", call.get("p", 2)))
    local = call.default()
    axes = call.emitting_axes(_emit_norm)
    if math.isinf(power):
        return [call.all_reduce(local, axes, "max" if power > 0 else "min")]
    return [norm_of_norms(call, local, axes, power)]


def norm_of_norms(call: LocalCall, norms: fx.Node, axes: Sequence[ShardAxis], power: float) -> fx.Node:
    """The norm of what lies on several ranks, from each rank's own. Powers of half precision overflow soon."""
    dtype = norms.meta["val"].dtype
    half = dtype in (torch.float16, torch.bfloat16)
    wide = call.call(aten._to_copy.default, norms, dtype=torch.float32) if half else norms
    if power == 1.0:
        result = call.all_reduce(wide, axes)
    else:
        powers = call.all_reduce(call.call(aten.pow.Tensor_Scalar, wide, power), axes)
        result = call.call(aten.pow.Tensor_Scalar, powers, 1.0 / power)
    return call.call(aten._to_copy.default, result, dtype=dtype) if half else result


def _norm(call: OpCall) -> list[Layout]:
    power = call.get("ord", call.get("p", 2))
    if not isinstance(power, (int, float)) or power == 0:
        return _kept(call)
    found = _over(call, None, _emit_norm)
    return _kept(call) + (_of_something(call, found) if math.isinf(power) else found)


def worked_along(call: OpCall) -> list[Layout]:
    """Operators along ``dim`` (all dimensions where it is a list): the other ones may be split."""
    dims = call["dim"]
    return rowwise(call, [dims] if isinstance(dims, int) else list(dims))


def _renorm(call: OpCall) -> list[Layout]:
    """``dim`` numbers the pieces that are scaled, each as a whole."""
    dim = call["dim"] % len(call.shape)
    return along(call, [dim], [dim])


def _cumulative_sum(call: OpCall) -> list[Layout]:
    return worked_along(call) + linear(call, (0,))


def _softmax_backward(call: OpCall) -> list[Layout]:
    return rowwise(call, [call["dim"]])


def _selecting_backward(call: OpCall) -> list[Layout]:
    """Gradient of ``max(dim)`` and the like: scatters along ``dim`` of a tensor of shape ``sizes``."""
    ndim = len(call.shape)
    worked = call["dim"] % ndim
    found: list[Layout] = []
    for dim in range(ndim):
        if dim != worked:
            source = dim if call["keepdim"] else dim - (dim > worked)
            found += along(call, [source, source], [dim])
    return found


def _sizes(call: LocalCall) -> dict[str, Any]:
    return {"sizes": call.output_shape()}


def _packet(*names: str) -> list[Any]:
    return [getattr(aten, n) for n in names if hasattr(aten, n)]


def _count(call: OpCall) -> list[Layout]:
    return _kept(call) + _over(call, PARTIAL)


RULES: dict[Any, Rule] = {
    aten.sum: _sum,
    aten.nansum: _count,
    aten.mean: _mean,
    aten.count_nonzero: _count,
    **dict.fromkeys(_packet("amax", "max"), _extreme("max")),
    **dict.fromkeys(_packet("amin", "min"), _extreme("min")),
    **dict.fromkeys(_packet("any", "all", "_is_any_true", "_is_all_true"), _any),
    **dict.fromkeys(_packet("var", "std", "var_mean", "std_mean"), _variance),
    **dict.fromkeys(_packet("linalg_vector_norm", "norm"), _norm),
    **dict.fromkeys(_packet("argmax", "argmin", "prod", "aminmax", "median", "nanmedian", "mode", "kthvalue"), _kept),
    aten.logsumexp: _kept,
    aten.cumsum: _cumulative_sum,
    aten.renorm: _renorm,
    **dict.fromkeys(
        _packet(
            "_softmax",
            "topk",
            "sort",
            "argsort",
            "cumprod",
            "cummax",
            "cummin",
            "logcumsumexp",
        ),
        worked_along,
    ),
    **dict.fromkeys(_packet("_softmax_backward_data"), _softmax_backward),
    aten.value_selecting_reduction_backward: _selecting_backward,
    aten._safe_softmax: worked_along,
}
LOCALIZERS: dict[Any, Any] = {aten.value_selecting_reduction_backward: _sizes}
