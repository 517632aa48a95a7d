"""The geometry of views: which views are the same bytes, without a table of operators that cancel.

Every view operator runs on meta tensors, starting from its base value. Shape, strides and offset relative to the base
describe a view completely. Two values of one base with the same geometry are the same tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from lightning_spmd.ir.aliasing import storage_roots
from lightning_spmd.ir.layout import is_dense
from lightning_spmd.ir.node_info import TensorSpec

_aten = torch.ops.aten

# Operators that never copy. `reshape` and `contiguous` may, and then their result only looks like the view.
_VIEWS = frozenset(
    {
        _aten.view.default, _aten._unsafe_view.default, _aten.expand.default, _aten.permute.default,  # noqa: SLF001
        _aten.transpose.int, _aten.t.default, _aten.alias.default, _aten.detach.default, _aten.unsqueeze.default,
        _aten.squeeze.default, _aten.squeeze.dim, _aten.squeeze.dims, _aten.slice.Tensor, _aten.select.int,
        _aten.diagonal.default, _aten.unfold.default,
    }
)  # fmt: skip


@dataclass(frozen=True)
class Geometry:
    """A tensor in the storage of ``base``.

    Args:
        base: the value that the view operators start from; an in-place result is a new base.
        shape, stride, dtype: of the tensor.
        offset: in elements, relative to ``base``.
    """

    base: fx.Node
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


def is_view(node: fx.Node) -> bool:
    """Whether the node only looks at its operand in another way."""
    return node.op == "call_function" and (node.target in _VIEWS or node.target is _aten.as_strided.default)


def geometries(graph: fx.Graph) -> dict[fx.Node, Geometry]:
    """The geometry of every node that produces one tensor.

    A view whose arguments are not plain numbers, or differ between ranks, is a base of its own.
    """
    roots = storage_roots(graph)
    found: dict[fx.Node, Geometry] = {}
    metas: dict[fx.Node, Tensor] = {}
    for node in graph.nodes:
        spec = node.meta.get("val")
        if not isinstance(spec, TensorSpec):
            continue
        source = node.args[0] if is_view(node) and not node.meta.get("rank_dependent") else None
        if isinstance(source, fx.Node) and source in found and len(node.all_input_nodes) == 1:
            viewed = _viewed(node, found[source], metas[source], roots)
            if viewed is not None and (tuple(viewed.shape), tuple(viewed.stride())) == (spec.shape, spec.stride):
                metas[node] = viewed
                offset = int(viewed.storage_offset())
                found[node] = Geometry(found[source].base, spec.shape, spec.stride, offset, viewed.dtype)
                continue
        metas[node] = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta")
        found[node] = Geometry(node, spec.shape, spec.stride, 0, spec.dtype)
    return found


def _viewed(node: fx.Node, source: Geometry, meta: Tensor, roots: Mapping[fx.Node, fx.Node]) -> Tensor | None:
    """The view of the meta tensor, or None where it cannot be known."""
    operator: Any = node.target
    if node.target is _aten.as_strided.default:
        # Its offset counts from the start of the storage, and it may reach beyond what the base covers: known only
        # where the base is a whole storage.
        base = source.base
        spec: TensorSpec = base.meta["val"]
        whole = roots[base] is base and base.op == "call_function" and spec.numel > 0 and is_dense(spec)
        if not whole:
            return None
    with torch.no_grad():
        return operator(meta, *node.args[1:], **node.kwargs)
