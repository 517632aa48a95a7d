"""Batch normalization with the statistics of the global batch.

Training, batch split: each rank computes mean and squared deviation of its rows, one all-reduce of two numbers a
channel in double precision combines them (Chan et al.), and the normalization itself is the kernel's own evaluation
form with these statistics. Running statistics get the global mean and the global unbiased variance. Backward needs two
sums a channel, one all-reduce. On GPUs torch has kernels for both (``synchronized_batch_norm``). Evaluation mode, and a
split of the channels (instance norm puts the batch there), are row-wise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lightning_spmd.ir.placement import PARTIAL, ShardAxis
from lightning_spmd.stages.expand.call import Layout, LocalCall, OpCall, Rule, Where, along
from lightning_spmd.stages.expand.rules.synchronized_batch_norm import gradients, has_kernels, normalized

aten = torch.ops.aten


@dataclass(frozen=True)
class _Names:
    """How the variants call the same arguments."""

    training: str | None
    momentum: str
    epsilon: str
    gradient: str = "grad_out"
    deviation: str = "save_invstd"


_NATIVE = _Names("training", "momentum", "eps")
_UPDATE = _Names(None, "momentum", "eps")
_CUDNN = _Names("training", "exponential_average_factor", "epsilon")
_NATIVE_BACKWARD = _Names("train", "", "eps")
_UNIFIED_BACKWARD = _Names("update", "", "eps", deviation="save_var")
_CUDNN_BACKWARD = _Names(None, "", "epsilon", gradient="grad_output", deviation="save_var")


def _reduced(ndim: int) -> list[int]:
    return [d for d in range(ndim) if d != 1]


def _channel_layouts(call: OpCall, outputs: list[Where]) -> list[Layout]:
    inputs: list[Where] = [
        1 if len(s.shape) > 1 else (0 if s.shape == call.specs[0].shape[1:2] else None) for s in call.specs
    ]
    return along(call, inputs, [None if spec is None else o for o, spec in zip(outputs, call.outputs, strict=True)])


def _row_inputs(call: OpCall, dim: int) -> list[Where]:
    return [dim if len(s.shape) > 1 else None for s in call.specs]


def _forward(names: _Names) -> Rule:
    def emit(call: LocalCall) -> list[fx.Node | None]:
        return _emit_training(call, names, call.emitting_axes(emit))

    def rule(call: OpCall) -> list[Layout]:
        count = len(call.outputs)
        extra: list[Where] = [None] * (count - 3)
        found = _channel_layouts(call, [1, 0, 0, *extra]) if count == 3 else []
        training = names.training is None or call[names.training]
        for dim in _reduced(len(call.specs[0].shape)):
            outputs: list[Where] = [dim, *[None] * (count - 1)]
            found += along(call, _row_inputs(call, dim), outputs, emit if training else None)
        return found

    return rule


def _emit_training(call: LocalCall, names: _Names, axes: list[ShardAxis]) -> list[fx.Node | None]:
    outputs: list[fx.Node | None] = []
    if has_kernels(call, axes):
        outputs.extend(normalized(call, axes[0], call[names.momentum], call[names.epsilon]))
    else:
        outputs.extend(_normalized(call, names, axes))
    if len(call.outputs) == 4:  # what cuDNN would keep for its own backward
        spec = call.outputs[3]
        outputs.append(call.call(aten.empty.memory_format, list(spec.shape), dtype=spec.dtype, device=spec.device))
    return outputs


def _normalized(call: LocalCall, names: _Names, axes: list[ShardAxis]) -> list[fx.Node | None]:
    run, x, spec = call.call, call["input"], call.spec("input")
    dims = _reduced(len(spec.shape))
    count = math.prod(spec.shape[d] for d in dims)
    local = call.program.shape(x)
    rows = math.prod(local[d] for d in dims)
    wide = x if spec.dtype in (torch.float32, torch.float64) else run(aten._to_copy.default, x, dtype=torch.float32)
    # var_mean's kernel for CPUs is not vectorized over such dimensions and takes five times as long
    mean, variance = call.items(run(aten.batch_norm_update_stats.default, wide, None, None, 0.0))
    mean64 = run(aten._to_copy.default, mean, dtype=torch.float64)
    variance64 = run(aten._to_copy.default, variance, dtype=torch.float64)
    square = run(aten.add.Tensor, variance64, run(aten.mul.Tensor, mean64, mean64))
    moments = run(aten.mul.Tensor, run(aten.stack.default, [mean64, square]), rows)
    moments = run(aten.div.Tensor, call.all_reduce(moments, axes), count)
    mean64, square = run(aten.select.int, moments, 0, 0), run(aten.select.int, moments, 0, 1)
    variance64 = run(aten.sub.Tensor, square, run(aten.mul.Tensor, mean64, mean64))
    variance64 = run(aten.clamp_min.default, variance64, 0.0)
    stats = _precision_of_statistics(call)
    mean = run(aten._to_copy.default, mean64, dtype=stats)
    variance = run(aten._to_copy.default, variance64, dtype=stats)
    inverse = run(aten.rsqrt.default, run(aten.add.Tensor, variance64, call[names.epsilon]))
    inverse = run(aten._to_copy.default, inverse, dtype=stats)
    _update_running(call, names, mean, variance64, count)
    weight, bias = call.get("weight"), call.get("bias")
    whole = run(aten.native_batch_norm.default, x, weight, bias, mean, variance, False, 0.0, call[names.epsilon])
    return [call.items(whole)[0], mean, inverse]


def _precision_of_statistics(call: LocalCall) -> torch.dtype:
    """As the kernel has it: float32 where the values alone are in half precision (autocast).

    On the host torch's shape function says the values' precision there; the kernel gives float32, and takes no other.
    """
    kept = [call.spec(name).dtype for name in ("weight", "running_mean") if call.get(name) is not None]
    if not len(call.outputs[1].shape) or (kept and kept[0] == torch.float32):
        return torch.float32
    return call.outputs[1].dtype


def _update_running(call: LocalCall, names: _Names, mean: fx.Node, variance: fx.Node, count: int) -> None:
    running_mean, running_var = call.get("running_mean"), call.get("running_var")
    if running_mean is None or running_var is None:
        return
    momentum = call[names.momentum]
    run = call.call
    unbiased = run(aten.mul.Tensor, variance, count / max(count - 1, 1))
    for running, value in ((running_mean, mean), (running_var, unbiased)):
        value = run(aten._to_copy.default, value, dtype=running.meta["val"].dtype)
        run(aten.lerp_.Scalar, running, value, momentum)


def _backward(names: _Names) -> Rule:
    def emit(call: LocalCall) -> list[fx.Node | None]:
        return _emit_training_backward(call, names, call.emitting_axes(emit))

    def rule(call: OpCall) -> list[Layout]:
        found = _channel_layouts(call, [1, 0, 0]) if names.training == "train" else []
        training = names.training is None or call[names.training]
        for dim in _reduced(len(call["input"].meta["val"].shape)):
            if training:
                found += along(call, _row_inputs(call, dim), [dim, None, None], emit)
            else:
                outputs: list[Where] = [dim, PARTIAL, PARTIAL]
                outputs = [None if s is None else o for o, s in zip(outputs, call.outputs, strict=True)]
                found += along(call, _row_inputs(call, dim), outputs)
        return found

    return rule


def _emit_training_backward(call: LocalCall, names: _Names, axes: list[ShardAxis]) -> list[fx.Node | None]:
    if has_kernels(call, axes):
        results = gradients(call, axes[0], call[names.gradient], call[names.deviation])
    else:
        results = _gradients(call, names, axes)
    return [
        value
        if s is None or value is None or value.meta["val"].dtype == s.dtype
        else call.call(aten._to_copy.default, value, dtype=s.dtype)
        for value, s in zip(results, call.outputs, strict=True)
    ]


def _gradients(call: LocalCall, names: _Names, axes: list[ShardAxis]) -> tuple[fx.Node | None, ...]:
    run, x, gradient = call.call, call["input"], call[names.gradient]
    spec = call.spec("input")
    dims = _reduced(len(spec.shape))
    count = math.prod(spec.shape[d] for d in dims)
    shape = [1, -1, *[1] * (len(spec.shape) - 2)]
    mean, inverse, weight = call["save_mean"], call[names.deviation], call.get("weight")
    work = mean.meta["val"].dtype

    def channels(value: fx.Node) -> fx.Node:
        return run(aten.view.default, value, shape)

    def wide(value: fx.Node) -> fx.Node:
        return value if value.meta["val"].dtype == work else run(aten._to_copy.default, value, dtype=work)

    g = wide(gradient)
    centred = run(aten.sub.Tensor, wide(x), channels(mean))
    sum_g = run(aten.sum.dim_IntList, g, dims, dtype=torch.float64)
    sum_gx = run(aten.sum.dim_IntList, run(aten.mul.Tensor, g, centred), dims, dtype=torch.float64)
    sums = call.all_reduce(run(aten.stack.default, [sum_g, sum_gx]), axes)
    sum_g, sum_gx = run(aten.select.int, sums, 0, 0), run(aten.select.int, sums, 0, 1)
    inverse64 = run(aten._to_copy.default, inverse, dtype=torch.float64)
    mean_g = run(aten._to_copy.default, run(aten.div.Tensor, sum_g, count), dtype=work)
    slope = run(aten.div.Tensor, run(aten.mul.Tensor, run(aten.mul.Tensor, inverse64, inverse64), sum_gx), count)
    slope = run(aten._to_copy.default, slope, dtype=work)
    scale = inverse if weight is None else run(aten.mul.Tensor, inverse, wide(weight))
    inner = run(aten.sub.Tensor, g, channels(mean_g))
    inner = run(aten.sub.Tensor, inner, run(aten.mul.Tensor, centred, channels(slope)))
    grad_input = run(aten.mul.Tensor, inner, channels(scale))
    results = (grad_input, run(aten.mul.Tensor, sum_gx, inverse64), sum_g)
    return tuple(None if s is None else value for value, s in zip(results, call.outputs, strict=True))


def _variants() -> dict[Any, Rule]:
    table = {
        "native_batch_norm": _forward(_NATIVE),
        "_native_batch_norm_legit": _forward(_NATIVE),
        "cudnn_batch_norm": _forward(_CUDNN),
        "miopen_batch_norm": _forward(_CUDNN),
        "_batch_norm_with_update": _forward(_UPDATE),
        "native_batch_norm_backward": _backward(_NATIVE_BACKWARD),
        "cudnn_batch_norm_backward": _backward(_CUDNN_BACKWARD),
        "miopen_batch_norm_backward": _backward(_CUDNN_BACKWARD),
        "batch_norm_backward": _backward(_UNIFIED_BACKWARD),
    }
    return {getattr(aten, name): rule for name, rule in table.items() if hasattr(aten, name)}


RULES: dict[Any, Rule] = _variants()
