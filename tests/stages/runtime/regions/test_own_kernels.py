"""What regions take apart otherwise than the compiler."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._decomp import get_decompositions
from torch.fx.experimental.proxy_tensor import make_fx

from lightning_spmd.stages.runtime.regions.own_kernels import with_own_kernels

aten = torch.ops.aten
BACKWARD = aten.native_layer_norm_backward.default
SUMS = torch.ops.lightning_spmd.layer_norm_sums.default


@pytest.mark.parametrize(
    ("mask", "affine", "dtype", "keeps"),
    [
        ([True, True, True], True, torch.float32, True),
        ([False, True, True], True, torch.float32, True),
        ([True, False, False], True, torch.float32, False),
        ([True, True, False], True, torch.float32, False),
        ([True, False, False], False, torch.float32, False),
        ([True, True, True], True, torch.bfloat16, True),
    ],
)
def test_sums_over_rows_keep_their_kernel(mask: list[bool], affine: bool, dtype: torch.dtype, keeps: bool) -> None:
    torch.manual_seed(0)
    g, x = torch.randn(2, 5, 8, 4), torch.randn(2, 5, 8, 4)
    weight, bias = (torch.randn(8, 4).to(dtype), torch.randn(8, 4).to(dtype)) if affine else (None, None)
    g, x = g.to(dtype), x.to(dtype)
    _, mean, rstd = aten.native_layer_norm.default(x, [8, 4], weight, bias, 1e-5)
    given: list[Any] = [g, x, mean, rstd, *([weight, bias] if affine else [])]

    def function(g: Any, x: Any, mean: Any, rstd: Any, *scale_and_shift: Any) -> list[Any]:
        found = BACKWARD(g, x, [8, 4], mean, rstd, *(scale_and_shift or (None, None)), mask)
        return [one for one in found if one is not None]

    table = dict(get_decompositions([BACKWARD, aten.gelu.default, aten.gelu_backward.default]))
    traced = make_fx(function, with_own_kernels(table), tracing_mode="fake")(*given)
    targets = [node.target for node in traced.graph.nodes]
    assert (SUMS in targets) == keeps
    assert BACKWARD not in targets
    for ours, theirs in zip(traced(*given), function(*given), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1.6e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-2)


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_gradient_of_the_loss_of_classes_is_no_scatter(reduction: int, weighted: bool) -> None:
    torch.manual_seed(0)
    x, target = torch.randn(6, 5).log_softmax(1), torch.tensor([0, 4, -100, 2, 2, 1])
    weight = torch.rand(5) if weighted else None
    total = aten.nll_loss_forward.default(x, target, weight, reduction, -100)[1]
    g = torch.randn(6) if reduction == 0 else torch.tensor(0.7)
    operator = aten.nll_loss_backward.default

    def function(g: Any, x: Any, target: Any, total: Any, *weight: Any) -> Any:
        return operator(g, x, target, *(weight or (None,)), reduction, -100, total)

    given = [g, x, target, total, *([weight] if weighted else [])]
    table = dict(get_decompositions([BACKWARD, operator, aten.gelu.default, aten.gelu_backward.default]))
    traced = make_fx(function, with_own_kernels(table), tracing_mode="fake")(*given)
    assert not any("scatter" in str(node.target) or node.target is operator for node in traced.graph.nodes)
    torch.testing.assert_close(traced(*given), function(*given), rtol=1e-6, atol=0)
