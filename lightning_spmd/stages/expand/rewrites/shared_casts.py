"""One cast for all its readers, so that its result is gathered once.

Before (autocast, sequence parallel; each cast is gathered for itself)::

    q = linear(x.to(bfloat16), w_q); k = linear(x.to(bfloat16), w_k)

After::

    y = x.to(bfloat16); q = linear(y, w_q); k = linear(y, w_k)

Only forward, and only on axes whose plan places activations. Does nothing to casts of what is written into. Bitwise.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from lightning_spmd.ir.aliasing import storage_roots, written_arguments
from lightning_spmd.ir.node_info import Section, info_of
from lightning_spmd.ir.placement import ShardAxis
from lightning_spmd.parallel.parallel_plan import ParallelPlan, activations_between

_cast = torch.ops.aten._to_copy.default


def share_casts(graph: fx.Graph, axes: Sequence[ShardAxis], plan: ParallelPlan) -> fx.Graph:
    """The graph, or a copy of it in which equal casts are one."""
    if all(activations_between(plan, axis) is None for axis in axes):
        return graph
    first = _equal_casts(graph)
    if not first:
        return graph
    copies: dict[fx.Node, fx.Node] = {}
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, copies))
    for node, earlier in first.items():
        copies[node].replace_all_uses_with(copies[earlier])
        copy.erase_node(copies[node])
    return copy


def _equal_casts(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Cast → the first one that gives the same."""
    roots = storage_roots(graph)
    written = {roots[operand] for node in graph.nodes for operand in written_arguments(node)}
    known: dict[object, fx.Node] = {}
    found: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.target is not _cast or info_of(node).section is not Section.FORWARD:
            continue
        if roots[node] in written or roots[node.args[0]] in written:
            continue
        earlier = known.setdefault((node.args[0], tuple(sorted(node.kwargs.items()))), node)
        if earlier is not node:
            found[node] = earlier
    return found
