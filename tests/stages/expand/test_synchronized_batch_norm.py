"""Batch norm with CUDA's kernels for it equals one device. The kernels are written out here: the host has none."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_spmd.stages.expand.rules import batch_norm, synchronized_batch_norm
from tests.helpers.simulate import RankInterpreter, assert_equals_one_device
from tests.helpers.tiny_capture import capture_function

aten = torch.ops.aten
CHANNELS = 3


def _by_channel(value: Tensor, like: Tensor) -> Tensor:
    return value.view(1, -1, *[1] * (like.ndim - 2))


def _others(x: Tensor) -> list[int]:
    return [d for d in range(x.ndim) if d != 1]


def stats(x: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    variance, mean = torch.var_mean(x, _others(x), correction=0)
    return mean, (variance + epsilon).rsqrt()


def merge(
    x: Tensor,
    means: Tensor,
    inverses: Tensor,
    running_mean: Any,
    running_var: Any,
    momentum: float,
    eps: float,
    n: Tensor,
) -> tuple[Tensor, Tensor]:
    assert means.shape == inverses.shape == (len(n), x.shape[1])
    total, weight = n.sum(), (n / n.sum())[:, None]
    mean = (means * weight).sum(0)
    variance = ((inverses**-2 - eps + (means - mean) ** 2) * weight).sum(0)
    if running_mean is not None:
        running_mean.lerp_(mean, momentum)
        running_var.lerp_(variance * total / (total - 1), momentum)
    return mean, (variance + eps).rsqrt()


def normalize(x: Tensor, weight: Any, bias: Any, mean: Tensor, inverse: Tensor, eps: float) -> Tensor:
    y = (x - _by_channel(mean, x)) * _by_channel(inverse, x)
    y = y if weight is None else y * _by_channel(weight, x)
    return y if bias is None else y + _by_channel(bias, x)


def reduce(
    g: Tensor, x: Tensor, mean: Tensor, inverse: Tensor, weight: Any, *wanted: bool
) -> tuple[Tensor, Tensor, None, None]:
    assert wanted == (True, False, False)
    return g.sum(_others(x)), (g * (x - _by_channel(mean, x))).sum(_others(x)), None, None


def of_input(
    g: Tensor, x: Tensor, mean: Tensor, inverse: Tensor, weight: Any, sum_g: Tensor, sum_gx: Tensor, n: Tensor
) -> Tensor:
    assert n.dtype == torch.int32
    slope = _by_channel(sum_gx / n.sum() * inverse**2, x)
    scale = _by_channel(inverse if weight is None else inverse * weight, x)
    return (g - _by_channel(sum_g / n.sum(), x) - (x - _by_channel(mean, x)) * slope) * scale


KERNELS: dict[Any, Callable[..., Any]] = {
    aten.batch_norm_stats.default: stats,
    aten.batch_norm_gather_stats_with_counts.default: merge,
    aten.batch_norm_elemt.default: normalize,
    aten.batch_norm_backward_reduce.default: reduce,
    aten.batch_norm_backward_elemt.default: of_input,
}


@pytest.fixture
def kernels() -> Iterator[None]:
    """As if the host had them."""
    plain = RankInterpreter.call_function

    def call_function(self: RankInterpreter, target: Any, args: Any, kwargs: Any) -> Any:
        return KERNELS[target](*args, **kwargs) if target in KERNELS else plain(self, target, args, kwargs)

    def has_kernels(call: Any, axes: Any) -> bool:
        plain, gpu = type(call).spec, torch.device("cuda")
        with mock.patch.object(type(call), "spec", lambda c, name: dataclasses.replace(plain(c, name), device=gpu)):
            return synchronized_batch_norm.has_kernels(call, axes)

    with (
        mock.patch.object(RankInterpreter, "call_function", call_function),
        mock.patch.object(batch_norm, "has_kernels", has_kernels),
    ):
        yield


def _steps(split: Any, shape: tuple[int, ...], *, affine: bool = True, running: bool = True, last: bool = False) -> Any:
    def step(p: dict[str, Tensor], b: dict[str, Tensor], x: Tensor) -> Any:
        kept = (b["mean"], b["var"]) if running else (None, None)
        scaled = x * _by_channel(p["scale"], x)
        y = F.batch_norm(scaled, *kept, p.get("weight"), p.get("bias"), True, 0.3, 1e-5)
        return (y * y.roll(1, 1)).tanh().mean(), y

    torch.manual_seed(0)
    names = ("scale", "weight", "bias") if affine else ("scale",)
    double = {"dtype": torch.float64}  # the gradient of what batch norm undoes is rounding
    parameters = {name: torch.rand(CHANNELS, **double, requires_grad=True) for name in names}
    buffers = {name: torch.rand(CHANNELS, **double) for name in ("mean", "var")} if running else {}
    x = torch.randn(shape, **double) + 3
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    captured, live = capture_function(step, parameters, buffers, [x])
    return assert_equals_one_device(captured, live, split)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("split", [(3, 3), (1, 3, 2)], ids=str)
@pytest.mark.parametrize("options", [{}, {"affine": False}, {"running": False}, {"last": True}], ids=str)
def test_the_kernels_make_what_one_device_makes(split: tuple[int, ...], options: dict[str, bool]) -> None:
    for step in _steps(split, (6, CHANNELS, 4, 2), **options):
        targets = [n.target for n in step.graph_module.graph.nodes]
        assert [targets.count(op) for op in KERNELS] == [1] * len(KERNELS)
        assert aten.stack.default not in targets[targets.index(aten.batch_norm_backward_reduce.default) :]


@pytest.mark.usefixtures("kernels")
def test_features_without_further_dimensions_take_the_kernels_too() -> None:
    _steps((4, 2), (6, CHANNELS))


@pytest.mark.usefixtures("kernels")
def test_a_rank_without_rows_takes_plain_operators() -> None:
    for step in _steps((3, 0, 3), (6, CHANNELS, 4)):
        assert not any(n.target in KERNELS for n in step.graph_module.graph.nodes)
