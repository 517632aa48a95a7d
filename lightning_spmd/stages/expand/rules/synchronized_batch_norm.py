"""Batch normalization over the ranks by CUDA's own kernels for it, those of ``torch.nn.SyncBatchNorm``.

Forward, each rank's mean and inverse deviation are gathered, one kernel merges them (and updates the running
statistics), another one normalizes::

    mean, invstd = batch_norm_stats(x); all = wait(all_gather([mean, invstd]))
    mean, invstd = batch_norm_gather_stats_with_counts(x, all[means], all[invstds], running..., counts)
    y = batch_norm_elemt(x, weight, bias, mean, invstd)

Backward, two sums a channel are reduced. Each is a collective of its own, because a bucket takes them as they are, with
the gradients that are ready::

    sum_g, sum_gx, _, _ = batch_norm_backward_reduce(g, x, mean, invstd); s, sx = wait(all_reduce(sum_g, sum_gx))
    dx = batch_norm_backward_elemt(g, x, mean, invstd, weight, s, sx, count); dw = sx * invstd; db = s

Merging is Welford's in single precision, as torch has it. Not for ranks without rows, whose mean would be NaN, not
over two axes at once, and not where weights or running statistics are in half precision: the kernels want numbers of
values, statistics and weights in one precision. There ``rules.batch_norm`` writes its program of plain operators, as
on the host.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import fx

from lightning_spmd.ir.placement import ShardAxis
from lightning_spmd.stages.expand.call import LocalCall

aten = torch.ops.aten
_GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default


def has_kernels(call: LocalCall, axes: Sequence[ShardAxis]) -> bool:
    """Whether these kernels can be used for a call whose rows these axes split."""
    return (
        call.spec("input").device.type == "cuda"
        and len(axes) == 1
        and all(axes[0].split)
        and call.spec("input").shape[1] > 0
        and _in_one_precision(call)
    )


def _in_one_precision(call: LocalCall) -> bool:
    """Whether what is kept a channel has the precision of sums.

    The merging kernel reads numbers of values in the precision of running statistics (of the input, where there are
    none), the backward one the weight in that of the mean; either raises where they differ.
    """
    sums = torch.float64 if call.spec("input").dtype == torch.float64 else torch.float32
    kept = {
        call.spec(name).dtype for name in ("weight", "bias", "running_mean", "running_var") if _is_given(call, name)
    }
    if not _is_given(call, "running_mean"):
        kept.add(call.spec("input").dtype)
    return kept <= {sums}


def _is_given(call: LocalCall, name: str) -> bool:
    return call.get(name) is not None


def normalized(
    call: LocalCall, axis: ShardAxis, momentum: object, epsilon: object
) -> tuple[fx.Node | None, fx.Node | None, fx.Node | None]:
    """The normalized input, mean and inverse deviation of all ranks' rows; running statistics are updated.

    Args:
        call: of a training form of batch norm.
        axis: over which rows are split.
        momentum: of the running statistics.
        epsilon: added to the variance.
    """
    run, x = call.call, call["input"]
    mean, inverse = call.items(run(aten.batch_norm_stats.default, x, epsilon))
    means, inverses, counts = _gathered(call, axis, mean, inverse)
    merged = run(
        aten.batch_norm_gather_stats_with_counts.default,
        *(x, means, inverses, call.get("running_mean"), call.get("running_var"), momentum, epsilon, counts),
    )
    mean, inverse = call.items(merged)
    weight, bias = call.get("weight"), call.get("bias")
    return run(aten.batch_norm_elemt.default, x, weight, bias, mean, inverse, epsilon), mean, inverse


def _gathered(
    call: LocalCall, axis: ShardAxis, mean: fx.Node | None, inverse: fx.Node | None
) -> tuple[fx.Node, fx.Node, fx.Node]:
    """Every rank's (rank, channel) mean and inverse deviation, and numbers of values a channel by rank."""
    run, program = call.call, call.program
    channels = call.spec("input").shape[1]
    count = math.prod(program.shape(call["input"])) // max(channels, 1)
    if axis.is_even:
        both = run(aten.stack.default, [mean, inverse])
        everyone = program.collective(_GATHER, both, (2 * axis.size, channels), axis.size, axis.group)
        means, inverses = (run(aten.slice.Tensor, everyone, 0, first, 2 * axis.size, 2) for first in range(2))
        return means, inverses, _numbers(call, axis.size, count, program.spec(both).dtype)
    row = run(aten.cat.default, [mean, inverse, run(aten.new_full.default, mean, [1], count)])
    row = run(aten.view.default, row, [1, 2 * channels + 1])
    everyone = program.collective(_GATHER, row, (axis.size, 2 * channels + 1), axis.size, axis.group)
    means, inverses = (run(aten.slice.Tensor, everyone, 1, n * channels, (n + 1) * channels) for n in range(2))
    return means, inverses, run(aten.select.int, everyone, 1, 2 * channels)


def _numbers(call: LocalCall, size: int, value: int, dtype: torch.dtype) -> fx.Node:
    """The same number so often; of no operand, so that layers of one resolution share it."""
    return call.call(aten.full.default, [size], value, dtype=dtype, device=call.spec("input").device)


def gradients(
    call: LocalCall, axis: ShardAxis, gradient: fx.Node, inverse: fx.Node
) -> tuple[fx.Node | None, fx.Node | None, fx.Node | None]:
    """The gradients of input, weight and bias; None for what is not asked for.

    Args:
        call: of a training form of batch norm's backward.
        axis: over which rows are split.
        gradient: of the output.
        inverse: inverse deviation of all ranks' rows.
    """
    run, x, mean, weight = call.call, call["input"], call["save_mean"], call.get("weight")
    shape = call.spec("input").shape
    reduced = run(aten.batch_norm_backward_reduce.default, gradient, x, mean, inverse, weight, True, False, False)
    sum_g, sum_gx = (call.all_reduce(value, [axis]) for value in call.items(reduced)[:2] if value is not None)
    wants_input, wants_weight, wants_bias = (spec is not None for spec in call.outputs)
    of_input = None
    if wants_input:
        count = _numbers(call, 1, math.prod(shape) // max(shape[1], 1), torch.int32)
        of_input = run(aten.batch_norm_backward_elemt.default, gradient, x, mean, inverse, weight, sum_g, sum_gx, count)
    of_weight = run(aten.mul.Tensor, sum_gx, inverse) if wants_weight else None
    return of_input, of_weight, sum_g if wants_bias else None
