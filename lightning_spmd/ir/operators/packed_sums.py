"""Gradients of a packed layer's weights are added to what other uses of the weights gave, step by step.

Before (an L2 term over the weights, or the layer called twice)::

    g = packed_rnn_backward(...); total = add(other, g[2])                      g[2] is the sum over the steps of time

After::

    g = packed_rnn_backward(..., sums=[None, None, other, ...]); total = g[2]   ((other + step 9) + step 8) + ...

In eager training each step of time is a use of its own, and autograd adds them up one by one behind whatever it had
before: other bits. Only additions of autograd's are meant, which have the place of the backward operator; nothing is
done to gradients that came after it, to those that a step adds itself, or where memory lies in another order. Bitwise
eager's, and so for one device alone: on several, gradients are parts.
"""

from __future__ import annotations

import operator
from typing import Any, cast

import torch
from torch import fx

from lightning_spmd.ir.node_info import Section, info_of
from lightning_spmd.ir.operators.packed_rnn import PACKED_RNN_BACKWARD

_ADD = torch.ops.aten.add.Tensor
_HX, _WANTED = 3, 6
"""Operands of the backward operator."""


def sum_as_eager(graph: fx.Graph) -> None:
    """Let gradients of packed layers' weights be added as autograd adds them.

    Args:
        graph: of one device.
    """
    places = {node: place for place, node in enumerate(graph.nodes)}
    for node in [n for n in graph.nodes if n.target is PACKED_RNN_BACKWARD]:
        wanted, others = cast("list[bool]", node.args[_WANTED]), 1 + len(cast("list[Any]", node.args[_HX]))
        sums: list[fx.Node | None] = [None] * sum(wanted)
        for item in list(node.users):
            index = cast("int", item.args[1])
            before = (
                _added_to(node, item) if item.target is operator.getitem and index >= sum(wanted[:others]) else None
            )
            if before is not None and places[before] < places[node]:
                (total,) = item.users
                total.replace_all_uses_with(item)
                graph.erase_node(total)
                sums[index] = before
        if any(sums):
            node.args = (*node.args[:-1], sums)


def _added_to(node: fx.Node, item: fx.Node) -> fx.Node | None:
    """What autograd adds a gradient to."""
    if len(item.users) != 1 or info_of(node).section is not Section.BACKWARD or not info_of(node).source:
        return None
    (total,) = item.users
    same = info_of(total) == info_of(node) and total.meta["val"] == item.meta["val"]
    if total.target is not _ADD or len(total.args) != 2 or total.kwargs or not same or total.args[1] is not item:
        return None
    return total.args[0] if isinstance(total.args[0], fx.Node) else None
