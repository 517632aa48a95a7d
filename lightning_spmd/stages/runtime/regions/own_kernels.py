"""Operators inside of regions that keep torch's own kernel, because the compiler's code for them is slower.

The gradients of LayerNorm's weight and bias are sums over rows. On the host the compiler walks every column by itself,
and computes what it sums again for each of them: 1.5 ms for 1024 × 1024, where torch's kernel, which walks rows, takes
0.1 ms. So they are an operator that the compiler calls; the gradient of the input stays in its code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from lightning_spmd.stages.runtime.regions.gelu import with_fast_gelu

_aten = torch.ops.aten
_LIBRARY: Any = Library("lightning_spmd", "FRAGMENT")
_LIBRARY.define(
    "layer_norm_sums(Tensor g, Tensor x, int[] shape, Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias) "
    "-> (Tensor, Tensor)"
)


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


_LIBRARY.impl("layer_norm_sums", _sums, "CPU")
_LIBRARY.impl("layer_norm_sums", _shapes, "Meta")


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
        return (of_input, *torch.ops.lightning_spmd.layer_norm_sums.default(g, x, shape, mean, rstd, weight, bias))

    return with_fast_gelu({**table, _aten.native_layer_norm_backward.default: layer_norm_backward})
