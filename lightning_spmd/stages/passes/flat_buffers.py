"""Flat buffers of communication: tensors side by side in one piece of memory, each written there once.

Before, every gradient is made, copied into the buffer and copied again by the functional all-reduce::

    g1 = mm(a, b); g2 = sum(c); flat = cat([g1.flat, g2.flat]); r = all_reduce(flat)

After, what can be made in place is, the rest comes in one copy, and the buffer is reduced where it is::

    flat = new_empty(n); p1, rest = split(flat); g1 = mm.out(a, b, out=p1.view(...))
    g2 = sum(c); cat.out([g2.flat], out=rest); r = all_reduce_(flat)

A gradient is made in place if nothing reads it but the collective, it is as dense as the buffer, and the operator that
makes it has a kernel that writes into memory it is given; generated ``out=`` variants that compute and copy do not
count. Casts and clones become a copy into the buffer. Small gradients are copied: a view of the buffer costs as much.

The gradients made in place come first and are multiples of what torch aligns tensors to (64 bytes on the host, 512 on a
GPU), so each of them is aligned as a tensor of its own is: kernels choose instructions, and matrix products algorithms,
by alignment, and the sums would depend on it.

DDP's ``gradient_as_bucket_view`` has the same aim for gradients that autograd accumulates.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from lightning_spmd.ir.aliasing import storage_roots, written_arguments
from lightning_spmd.ir.first import first
from lightning_spmd.ir.layout import row_major
from lightning_spmd.ir.node_info import NodeInfo, TensorSpec, spec_of
from lightning_spmd.ir.verify import starts_collective

aten = torch.ops.aten
SMALLEST_IN_PLACE = 16 * 1024
"""Bytes; below, a copy within the one ``cat`` of a bucket is cheaper than two more operators."""
ALIGNMENT = {"cpu": 64, "cuda": 512}
"""Bytes to which torch aligns tensors, by kind of device; unknown ones count as CUDA devices."""

_OUT: dict[Any, Any] = {
    aten.mm.default: aten.mm.out,
    aten.bmm.default: aten.bmm.out,
    aten.addmm.default: aten.addmm.out,
    aten.baddbmm.default: aten.baddbmm.out,
    aten.sum.dim_IntList: aten.sum.IntList_out,
    aten.add.Tensor: aten.add.out,
    aten.mul.Tensor: aten.mul.out,
}
_COPIES = (aten.clone.default, getattr(aten, "_to_copy").default)  # noqa: B009 - an operator's public name


def alignment(device: torch.device) -> int:
    """Bytes to which torch aligns tensors on a device."""
    return ALIGNMENT.get(device.type, ALIGNMENT["cuda"])


class Memory:
    """Who shares storage with whom, and who touches it when, in the graph as a pass finds it.

    Args:
        graph: its order gives the positions.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.order: list[fx.Node] = list(graph.nodes)
        self.position: dict[fx.Node, int] = {node: i for i, node in enumerate(self.order)}
        self.roots: dict[fx.Node, fx.Node] = storage_roots(graph)
        self._aliases: dict[fx.Node, list[fx.Node]] = {}
        for node, root in self.roots.items():
            self._aliases.setdefault(root, []).append(node)
        self._writes: dict[fx.Node, list[int]] = {}
        for index, node in enumerate(self.order):
            for operand in written_arguments(node):
                self._writes.setdefault(self.roots[operand], []).append(index)

    def last_write(self, node: fx.Node, before: int) -> int:
        """Position of the last write to the node's storage before ``before``, or -1."""
        return max((w for w in self._writes.get(self.roots[node], ()) if w < before), default=-1)

    def next_write(self, node: fx.Node, after: int) -> int:
        """Position of the first write to the node's storage after ``after``, or the number of nodes."""
        return min((w for w in self._writes.get(self.roots[node], ()) if w > after), default=len(self.order))

    def is_private(self, value: fx.Node, start: fx.Node, until: int) -> bool:
        """Whether the graph made the value's storage and nothing but ``start`` touches it after position ``until``."""
        root = self.roots.get(value)
        if root is None or root.op != "call_function" or starts_collective(root):  # None: the pass made it meanwhile
            return False
        readers = {user for alias in self._aliases[root] for user in alias.users} - {start}
        return not any(starts_collective(r) or self.position.get(r, len(self.order)) > until for r in readers)

    def can_be_made_in_place(self, value: fx.Node, start: fx.Node, until: int, dtype: torch.dtype) -> bool:
        """Whether the operator that makes the value can write it into a buffer of ``dtype``: see the module's text."""
        origin = self.roots.get(value)
        spec = None if origin is None else origin_spec(origin)
        return (
            origin is not None
            and spec is not None
            and (origin.target in _OUT or origin.target in _COPIES)
            and (spec.dtype, spec.numel) == (dtype, spec_of(value).numel)
            and spec.bytes >= SMALLEST_IN_PLACE
            and spec.bytes % alignment(spec.device) == 0
            and is_dense(spec)
            and is_dense(spec_of(value))
            and self.is_private(value, start, until)
        )


def origin_spec(node: fx.Node) -> TensorSpec | None:
    """The spec of a node that produces one tensor, else None."""
    value = node.meta.get("val")
    return value if isinstance(value, TensorSpec) else None


def is_dense(spec: TensorSpec) -> bool:
    """Whether the elements fill their memory without gaps or overlaps, in any order of dimensions."""
    expected = 1
    sizes = sorted((stride, size) for size, stride in zip(spec.shape, spec.stride, strict=True) if size != 1)
    for stride, size in sizes:
        if stride != expected:
            return False
        expected *= size
    return spec.numel > 0


def is_contiguous(spec: TensorSpec) -> bool:
    """Whether the elements lie row by row, without gaps."""
    return spec.stride == contiguous(spec.shape, spec).stride


def contiguous(shape: Sequence[int], like: TensorSpec, dtype: torch.dtype | None = None) -> TensorSpec:
    """The spec of a contiguous tensor."""
    return TensorSpec(tuple(shape), row_major(shape), like.dtype if dtype is None else dtype, like.device)


def call(graph: fx.Graph, info: NodeInfo, value: Any, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A new node at the graph's insertion point that produces ``value``."""
    node = graph.call_function(target, args, kwargs)
    node.meta.update(val=value, info=info)
    return node


def flattened(graph: fx.Graph, info: NodeInfo, value: fx.Node) -> fx.Node:
    """The value's elements in one dimension: in memory order without a copy where memory is dense, else row by row."""
    spec = spec_of(value)
    one = contiguous((spec.numel,), spec)
    if spec.shape == one.shape and spec.stride == one.stride:
        return value
    if is_dense(spec):
        return call(graph, info, one, aten.as_strided.default, value, [spec.numel], [1])
    return call(graph, info, one, aten.reshape.default, value, [-1])


def shaped(graph: fx.Graph, info: NodeInfo, part: fx.Node, spec: TensorSpec) -> fx.Node:
    """The inverse of :func:`flattened` for a value of this spec."""
    rows = contiguous(spec.shape, spec_of(part))
    if is_dense(spec) and spec.stride != rows.stride:
        dense = TensorSpec(spec.shape, spec.stride, rows.dtype, rows.device)
        return call(graph, info, dense, aten.as_strided.default, part, list(spec.shape), list(spec.stride))
    return call(graph, info, rows, aten.view.default, part, list(spec.shape))


def split(graph: fx.Graph, info: NodeInfo, flat: fx.Node, sizes: Sequence[int]) -> list[fx.Node]:
    """Views of ``flat``'s last dimension."""
    whole = spec_of(flat)
    specs = [TensorSpec((*whole.shape[:-1], n), whole.stride, whole.dtype, whole.device) for n in sizes]
    dim = () if len(whole.shape) == 1 else (len(whole.shape) - 1,)
    parts = call(graph, info, specs, aten.split_with_sizes.default, flat, list(sizes), *dim)
    return [call(graph, info, spec, operator.getitem, parts, i) for i, spec in enumerate(specs)]


def make_in_place(graph: fx.Graph, info: NodeInfo, origin: fx.Node, piece: fx.Node) -> None:
    """Let ``origin`` write its result into ``piece`` of a flat buffer; its readers read it there."""
    spec = spec_of(origin)
    with graph.inserting_before(origin):
        view = shaped(graph, info, piece, spec)
    if origin.target in _COPIES:
        origin.args, origin.kwargs, origin.target = (view, origin.args[0]), {}, aten.copy_.default
    else:
        origin.target = _OUT[origin.target]
        origin.kwargs = {**origin.kwargs, "out": view}


def filled(
    graph: fx.Graph, info: NodeInfo, origins: Sequence[fx.Node], others: Sequence[fx.Node], dtype: torch.dtype
) -> fx.Node:
    """A flat buffer with the values of ``origins``, made in place, then those of ``others``, copied.

    Args:
        graph: its insertion point is where all values exist.
        info: of the new nodes.
        origins: operators that :meth:`Memory.can_be_made_in_place` allows, in order of position.
        others: values of any layout.
        dtype: of the buffer; ``others`` are cast.
    """
    rest = [flattened(graph, info, value) for value in others]
    tail = sum(spec_of(value).numel for value in rest)
    same = all(spec_of(value).dtype == dtype for value in rest)
    if not origins and same:
        return call(graph, info, contiguous((tail,), spec_of(rest[0])), aten.cat.default, rest)
    sizes = [spec_of(origin).numel for origin in origins] + ([tail] if rest else [])
    like = first((n for n in (origins[0].all_input_nodes if origins else rest) if origin_spec(n) is not None), "origin")
    spec = contiguous((sum(sizes),), spec_of(like), dtype)
    kwargs = {} if spec_of(like).dtype == dtype else {"dtype": dtype}
    if not origins:
        flat = call(graph, info, spec, aten.new_empty.default, like, [tail], **kwargs)
        call(graph, info, spec, aten.cat.out, rest, 0, out=flat)
        return flat
    with graph.inserting_before(origins[0]):
        flat = call(graph, info, spec, aten.new_empty.default, like, list(spec.shape), **kwargs)
        pieces = split(graph, info, flat, sizes)
    for origin, piece in zip(origins, pieces, strict=False):
        make_in_place(graph, info, origin, piece)
    if rest:
        call(graph, info, spec_of(pieces[-1]), aten.cat.out, rest, 0, out=pieces[-1])
    return flat
