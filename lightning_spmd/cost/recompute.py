"""The cost of recomputing a value, in bytes of memory traffic that take as long.

Operators that move memory cost what they read and write, normalizations and other reductions half as much again;
products cost their arithmetic, attention twice that, for its kernels reach less of a device's peak. Operators that
are not listed here cost ``None``: their cost is unknown, and so they are never recomputed.

Nothing is measured: the choice of what is computed again must be the same on every rank and in every run.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from lightning_spmd._private_api import OpOverload
from lightning_spmd.cost.collectives import kind_of
from lightning_spmd.ir.aliasing import aliased_argument, written_arguments
from lightning_spmd.ir.node_info import TensorSpec

FLOPS_PER_BYTE = {"cpu": 10}
"""Arithmetic that a device does while it moves a byte, by kind of device; unknown ones count as GPUs."""
_GPU_FLOPS_PER_BYTE = 100
CALL = 16 * 1024
"""Bytes that could be moved while an operator is called."""

# By name, for not every torch has all of them. Left out is what may give other bits when it runs again: sums in the
# order of atomic additions (`index_add`, `cumsum` on a GPU), order among equals (`sort`, `topk`).
_MOVING = frozenset(
    {
        "_to_copy", "clone", "copy_", "cat", "stack", "embedding", "index_select", "gather", "index",
        "constant_pad_nd",
        "roll", "flip", "arange", "zeros", "ones", "full", "empty", "zeros_like", "ones_like", "full_like",
        "empty_like", "new_zeros", "new_ones", "new_full", "new_empty", "scalar_tensor", "tril", "triu", "repeat",
        "zero_", "fill_",
        "relu_", "where", "masked_fill", "masked_fill_", "batch_norm_elemt", "glu", "lift_fresh", "empty_strided",
        "_prelu_kernel", "polar", "upsample_nearest2d", "upsample_bilinear2d", "upsample_bicubic2d",
    }
)  # fmt: skip
_REDUCING = frozenset(
    {
        "native_layer_norm", "native_group_norm", "_fused_rms_norm", "native_batch_norm", "cudnn_batch_norm",
        "_softmax", "_safe_softmax", "_log_softmax", "sum", "mean", "amax", "amin", "var", "var_mean", "std",
        "linalg_vector_norm", "logsumexp", "max_pool2d_with_indices", "avg_pool2d", "_adaptive_avg_pool2d", "any",
        "all",
    }
)  # fmt: skip
_ATTENTION = "_scaled_dot_product_"


def recompute_cost(node: fx.Node, numel: Callable[[fx.Node], int]) -> int | None:
    """The cost of running a node once more; None if it must not run again.

    Args:
        node: a call.
        numel: number of elements of what a node produces, the same on all ranks.
    """
    target: Any = node.target
    if target is operator.getitem:
        return 0
    if not isinstance(target, OpOverload) or target.namespace not in ("aten", "prims"):
        return None
    if aliased_argument(node) is not None and not written_arguments(node):
        return 0
    name = target._schema.name.partition("::")[2]  # noqa: SLF001 - how operators are described everywhere in torch
    if name.startswith(_ATTENTION):
        return None if "backward" in name else CALL + 2 * _attention(node, numel) // _flops_per_byte(node)
    product = _PRODUCTS.get(name)
    if product is not None:
        return CALL + product(node, numel) // _flops_per_byte(node)
    moved = sum(numel(n) * _itemsize(n) for n in (node, *node.all_input_nodes))
    if name in _REDUCING:
        return CALL + moved + moved // 2
    if name in _MOVING or torch.Tag.pointwise in target.tags:
        return CALL + moved
    return None


# ---------------------------------------------------------------- pieces
def _flops_per_byte(node: fx.Node) -> int:
    spec = next(_specs(node.meta.get("val")), None)
    return _GPU_FLOPS_PER_BYTE if spec is None else FLOPS_PER_BYTE.get(kind_of(spec.device), _GPU_FLOPS_PER_BYTE)


def _itemsize(node: fx.Node) -> int:
    spec = next(_specs(node.meta.get("val")), None)
    return 0 if spec is None else spec.dtype.itemsize


def _specs(value: Any) -> Iterator[TensorSpec]:
    if isinstance(value, TensorSpec):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:  # pyright: ignore[reportUnknownVariableType]
            yield from _specs(item)


def _operand(node: fx.Node, index: int) -> TensorSpec:
    operand: Any = node.args[index]
    return operand.meta["val"]


def _product(left: int) -> Callable[[fx.Node, Callable[[fx.Node], int]], int]:
    """Arithmetic of a matrix product whose operand at this position has the contracted dimension last."""
    return lambda node, numel: 2 * numel(node) * _operand(node, left).shape[-1]


def _convolution(node: fx.Node, numel: Callable[[fx.Node], int]) -> int:
    weight, transposed = _operand(node, 1), node.args[6]
    made: Any = node.args[0] if transposed else node
    return 2 * numel(made) * math.prod(weight.shape[1:])


def _attention(node: fx.Node, numel: Callable[[fx.Node], int]) -> int:
    query: Any = node.args[0]
    return 4 * numel(query) * _operand(node, 1).shape[-2]


_PRODUCTS: dict[str, Callable[[fx.Node, Callable[[fx.Node], int]], int]] = {
    **dict.fromkeys(("mm", "bmm", "mv", "_grouped_mm"), _product(0)),
    **dict.fromkeys(("addmm", "baddbmm", "addmv"), _product(1)),
    "convolution": _convolution,
}
