"""Pooling, resizing, padding, grid sampling, patches: the batch (and mostly the channel) is passed through."""

from __future__ import annotations

from typing import Any

import torch

from lightning_spmd.stages.expand.call import Layout, LocalCall, Localizer, OpCall, Rule, along, linear, rowwise

aten = torch.ops.aten


def _last(count: int) -> Rule:
    return lambda call: rowwise(call, last=count)


def _constant_pad(call: OpCall) -> list[Layout]:
    ndim, pad = len(call.shape), call["pad"]
    padded = [ndim - 1 - i // 2 for i in range(0, len(pad), 2) if pad[i] or pad[i + 1]]
    return rowwise(call, padded) + (linear(call, (0,)) if call["value"] in (0, None) else [])


def _batch_only(call: OpCall) -> list[Layout]:
    return along(call, [0] * len(call.operands), [None if s is None else 0 for s in call.outputs])


def _input_size(name: str) -> Localizer:
    def localize(call: LocalCall) -> dict[str, Any]:
        return {name: call.output_shape()} if name in call.globals else {}

    return localize


def _named(*patterns: str) -> list[Any]:
    return [getattr(aten, name) for name in patterns if hasattr(aten, name)]


def _both(names: list[str]) -> list[Any]:
    return _named(*names, *[n + "_backward" for n in names])


_POOL = {
    1: ["avg_pool1d", "adaptive_avg_pool1d", "adaptive_max_pool1d", "reflection_pad1d", "replication_pad1d",
        "max_pool1d"],
    2: ["avg_pool2d", "_adaptive_avg_pool2d", "adaptive_max_pool2d", "max_pool2d_with_indices", "reflection_pad2d",
        "replication_pad2d", "fractional_max_pool2d"],
    3: ["avg_pool3d", "_adaptive_avg_pool3d", "adaptive_max_pool3d", "max_pool3d_with_indices", "reflection_pad3d",
        "replication_pad3d"],
}  # fmt: skip
_RESIZE = {
    1: ["upsample_linear1d", "upsample_nearest1d", "_upsample_nearest_exact1d"],
    2: ["upsample_bilinear2d", "upsample_nearest2d", "upsample_bicubic2d", "_upsample_nearest_exact2d",
        "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"],
    3: ["upsample_trilinear3d", "upsample_nearest3d", "_upsample_nearest_exact3d"],
}  # fmt: skip

RULES: dict[Any, Rule] = {
    **{op: _last(n) for n, names in _POOL.items() for op in _both(names)},
    **{op: _last(n) for n, names in _RESIZE.items() for op in _both(names)},
    **dict.fromkeys(_both(["grid_sampler_2d", "grid_sampler_3d"]), _batch_only),
    **dict.fromkeys(_named("im2col", "col2im", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle"), _batch_only),
    **dict.fromkeys(_named("max_pool2d_with_indices_backward"), _last(2)),
    **dict.fromkeys(_named("max_pool3d_with_indices_backward"), _last(3)),
    **dict.fromkeys(_named("mkldnn_max_pool2d"), _batch_only),
    aten.constant_pad_nd: _constant_pad,
}
LOCALIZERS: dict[Any, Localizer] = {
    op: _input_size("input_size") for names in _RESIZE.values() for op in _named(*[n + "_backward" for n in names])
}
