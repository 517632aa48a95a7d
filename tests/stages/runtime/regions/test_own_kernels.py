"""What regions leave to torch's own kernels."""

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
