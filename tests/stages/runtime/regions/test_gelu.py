"""GELU as polynomials, and where products and sums may be rounded once."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._decomp import get_decompositions
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from lightning_spmd.stages.runtime.regions.contraction import may_contract
from lightning_spmd.stages.runtime.regions.gelu import fast_gelu, fast_gelu_backward, with_fast_gelu
from lightning_spmd.stages.runtime.regions.partition import runs
from lightning_spmd.stages.runtime.regions.region import Region
from tests.stages.runtime.regions.cases import capture

aten = torch.ops.aten


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_as_exact_as_torch(approximate: str) -> None:
    """Everywhere: at 0, where it bends, where the polynomials end, and far out."""
    ends = [0.0, -0.0, 4.9, 5.2, 5.3, 5.6, 1e3, 1e18, 1e30, 1e-30, 1e-42]
    x = torch.cat([torch.linspace(-9, 9, 200_001), torch.tensor([*ends, *(-one for one in ends)])])
    g = torch.ones_like(x)
    wide, ones = x.double(), g.double()
    difference = (fast_gelu(x, approximate) - F.gelu(wide, approximate=approximate)).abs()
    assert (difference / wide.abs().clamp(min=1.0)).max() < 3e-7
    found, exact = fast_gelu_backward(g, x, approximate), aten.gelu_backward(ones, wide, approximate=approximate)
    known = torch.isfinite(exact)  # torch's own has 0 times infinity far out
    assert torch.isfinite(found).all()
    assert (found - exact).abs()[known].max() < 7e-7


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_what_is_no_number_stays_none(approximate: str) -> None:
    nan = torch.tensor([math.nan])
    assert torch.isnan(fast_gelu(nan, approximate)).all()
    assert torch.isnan(fast_gelu_backward(torch.ones(1), nan, approximate)).all()
    assert torch.isnan(fast_gelu_backward(nan, torch.tensor([9.0]), approximate)).all()


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_infinities_do_not_look_finite(approximate: str) -> None:
    """A run that has diverged shows it, as with torch's own kernels."""
    ends = torch.tensor([math.inf, -math.inf])
    assert torch.isnan(fast_gelu_backward(torch.ones(2), ends, approximate)).all()
    positive, negative = fast_gelu(ends, approximate)
    assert torch.isnan(negative)
    assert torch.isnan(positive) if approximate == "none" else positive == math.inf


@pytest.mark.parametrize(("dtype", "fast"), [(torch.float32, True), (torch.float64, False), (torch.bfloat16, False)])
def test_only_float32_on_the_host(dtype: torch.dtype, fast: bool) -> None:
    table = with_fast_gelu(dict(get_decompositions([aten.gelu.default, aten.gelu_backward.default])))
    x = torch.randn(8, dtype=dtype)

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        return aten.gelu(x), aten.gelu_backward(x, x, approximate="tanh")

    traced = make_fx(both, table, tracing_mode="fake")(x)
    targets = {node.target for node in traced.graph.nodes}
    assert (aten.erf.default in targets) == (aten.tanh.default in targets) == (not fast)


def normalized(p: dict[str, Tensor], x: Tensor) -> tuple[Any, ...]:
    return ((x + F.gelu(F.layer_norm(x, (16,)))).square().mean() + p["w"].sum(),)


def powers(p: dict[str, Tensor], x: Tensor) -> tuple[Any, ...]:
    return ((torch.tanh(x + 0.044715 * x.pow(3)) * 0.5 + x.view(256).square().view(16, 16)).mean() + p["w"].sum(),)


def of_a_square(p: dict[str, Tensor], x: Tensor) -> tuple[Any, ...]:
    return ((torch.tanh(x) - x.square()).mean() + p["w"].sum(),)


def of_views(p: dict[str, Tensor], x: Tensor) -> tuple[Any, ...]:
    return ((torch.tanh(x) - (x * x).view(256).view(16, 16)).mean() + p["w"].sum(),)


def of_negatives(p: dict[str, Tensor], x: Tensor) -> tuple[Any, ...]:
    return ((torch.tanh(x) + (-(x * x)).view(256).neg().view(16, 16)).mean() + p["w"].sum(),)


def of_quotients(p: dict[str, Tensor], x: Tensor) -> tuple[Any, ...]:
    return ((torch.tanh(x) + (x * x) / -1.0).mean() + p["w"].sum(),)


def of_factors(p: dict[str, Tensor], x: Tensor) -> tuple[Any, ...]:
    return ((torch.tanh(x) + x * (x * -1.0)).mean() + p["w"].sum(),)


def at_once(p: dict[str, Tensor], x: Tensor) -> tuple[Any, ...]:
    return (torch.addcmul(torch.tanh(x), x, x, value=-1).mean() + p["w"].sum(),)


def with_a_factor(p: dict[str, Tensor], x: Tensor) -> tuple[Any, ...]:
    return (torch.add(x * x, torch.tanh(x), alpha=-1).mean() + p["w"].sum(),)


def fractional(p: dict[str, Tensor], x: Tensor) -> tuple[Any, ...]:
    return ((torch.tanh(x) + x.square().pow(0.5)).mean() + p["w"].sum(),)


def rooted(p: dict[str, Tensor], x: Tensor) -> tuple[Any, ...]:
    return ((x.square() + x.abs()).sqrt().mean() + p["w"].sum(),)


def quotient(p: dict[str, Tensor], x: Tensor) -> tuple[Any, ...]:
    return ((torch.tanh(x) / (x.square() + 1.0)).mean() + p["w"].sum(),)


def compared(p: dict[str, Tensor], x: Tensor) -> tuple[Any, ...]:
    return (torch.where(x * x + x > 0, torch.tanh(x), x).mean() + p["w"].sum(),)


@pytest.mark.parametrize(
    ("case", "may"),
    [
        (normalized, True),
        (powers, True),
        (of_a_square, False),
        (of_views, False),
        (of_negatives, False),
        (of_quotients, False),
        (of_factors, False),
        (at_once, False),
        (with_a_factor, False),
        (fractional, False),
        (rooted, False),
        (quotient, False),
        (compared, False),
    ],
)
def test_one_rounding_only_where_no_zero_depends_on_two(case: Callable[..., Any], may: bool) -> None:
    """Of the forward pass's regions."""
    step, _ = capture(case, torch.randn(16, 16))
    regions = [Region.of(run) for run in runs(step.graph_module.graph)]
    assert regions
    assert all(may_contract(region) for region in regions) == may
