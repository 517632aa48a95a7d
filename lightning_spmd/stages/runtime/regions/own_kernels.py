"""Operators inside of regions that are taken apart otherwise than the compiler does, because that is slower.

The gradients of LayerNorm's weight and bias are sums over rows. On the host the compiler walks every column by itself,
and computes what it sums again for each of them: 1.5 ms for 1024 × 1024, where torch's kernel, which walks rows, takes
0.1 ms. So they are an operator that the compiler calls; the gradient of the input stays in its code.

The gradient of the loss of classes would be zeros in memory, into which one number a row is written: with 50,304
classes and 16,384 rows 3.3 GB, and 4 ms of a step of 38 on an H100. Here it is a comparison with each column's number,
which comes into the code that reads the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_spmd.ir.operators.library import define_operator
from lightning_spmd.stages.runtime.regions.gelu import with_fast_gelu

_aten = torch.ops.aten


def _sums(
    g: Tensor,
    x: Tensor,
    shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    found = _aten.native_layer_norm_backward.default(g, x, shape, mean, rstd, weight, bias, [False, True, True])
    return found[1], found[2]


def _shapes(g: Tensor, _: Tensor, shape: Sequence[int], *__: Any) -> tuple[Tensor, Tensor]:
    return g.new_empty(shape), g.new_empty(shape)


_MEAN = 1
"""How operators call the mean over rows."""

_LAYER_NORM_SUMS = define_operator(
    "layer_norm_sums(Tensor g, Tensor x, int[] shape, Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias) "
    "-> (Tensor, Tensor)",
    {"CPU": _sums, "Meta": _shapes},
)


def with_own_kernels(table: dict[Any, Any]) -> dict[Any, Any]:
    """Decompositions of the compiler, but for what keeps its kernel."""
    whole = table[_aten.native_layer_norm_backward.default]

    def layer_norm_backward(
        g: Tensor, x: Tensor, shape: Sequence[int], mean: Tensor, rstd: Tensor, weight: Any, bias: Any, mask: Any
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        alike = all(isinstance(one, Tensor) and one.dtype == g.dtype for one in (x, weight, bias))
        if x.device.type != "cpu" or not (mask[1] and mask[2] and alike):
            return whole(g, x, shape, mean, rstd, weight, bias, mask)
        of_input = whole(g, x, shape, mean, rstd, weight, bias, [mask[0], False, False])[0] if mask[0] else None
        return (of_input, *_LAYER_NORM_SUMS(g, x, shape, mean, rstd, weight, bias))

    scattered = table.get(_aten.nll_loss_backward.default)

    def nll_loss_backward(
        g: Tensor, x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignored: int, total: Tensor
    ) -> Tensor:
        if x.dim() != 2 and scattered is not None:
            return scattered(g, x, target, weight, reduction, ignored, total)
        g = g / total if reduction == _MEAN else g
        of_row = (g.unsqueeze(1) if g.dim() else g) * (1.0 if weight is None else weight)
        classes = torch.arange(x.shape[1], device=x.device)
        is_target = (classes == target.unsqueeze(1)) & (target != ignored).unsqueeze(1)
        return torch.where(is_target, -of_row, 0.0).to(x.dtype)

    own = {
        _aten.native_layer_norm_backward.default: layer_norm_backward,
        _aten.nll_loss_backward.default: nll_loss_backward,
    }
    return with_fast_gelu({**table, **own})
