"""Simplify one detour of autograd that hides which dimension is the batch.

``adaptive_avg_pool2d`` to one pixel restrides its result when the input is channels-last, and the backward of that
``as_strided`` writes the gradient into a flat buffer and reads it back::

    z = new_zeros([n]); a = as_strided(z, [6, 32], ...); copy_(a, g); b = as_strided(z, [6, 32, 1, 1], ...)

``b`` is a view of ``g``. As written, a flat buffer of global size stands between two tensors that are split over the
ranks, and expansion would have to gather. Does nothing where the two readings of the buffer differ in more than
dimensions of size one. Only moves values: bitwise.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from lightning_spmd.ir.node_info import spec_of

_aten = torch.ops.aten


def simplify_strided_gradients(graph: fx.Graph) -> None:
    """Replace the detour above by a view, wherever it occurs."""
    for buffer in graph.find_nodes(op="call_function", target=_aten.new_zeros.default):
        readings = list(buffer.users)
        if len(readings) != 2 or any(r.target is not _aten.as_strided.default for r in readings):
            continue
        written, read = readings
        copies = list(written.users)
        if len(copies) != 1 or copies[0].target is not _aten.copy_.default or copies[0].users:
            continue
        gradient = copies[0].args[1]
        if copies[0].args[0] is not written or not isinstance(gradient, fx.Node):
            continue
        if spec_of(gradient).shape != spec_of(written).shape or not _same_elements(buffer, written, read):
            continue
        with graph.inserting_before(read):
            view = graph.call_function(_aten.view.default, (gradient, list(spec_of(read).shape)))
        view.meta.update(read.meta)
        read.replace_all_uses_with(view)
        for node in (read, copies[0], written, buffer):
            graph.erase_node(node)


def _same_elements(buffer: fx.Node, first: fx.Node, second: fx.Node) -> bool:
    """Whether both readings are the whole buffer in the same order, up to dimensions of size one."""
    a, b = _geometry(first), _geometry(second)
    return a == b and spec_of(first).numel == spec_of(buffer).numel


def _geometry(node: fx.Node) -> tuple[Any, ...]:
    size, stride, *offset = node.args[1:]
    if not isinstance(size, (list, tuple)) or not isinstance(stride, (list, tuple)):
        return (node,)
    large = tuple((n, s) for n, s in zip(size, stride, strict=True) if n != 1)
    return (large, (offset or [None])[0] or 0)
