"""One cast of a weight a step, however often the step reads it.

Before (autocast as Lightning enters it, without a cache; a layer used twice, then again by activation checkpointing)::

    a = w.to(bfloat16); y = x @ a; b = w.to(bfloat16); z = y @ b; ...; c = w.to(bfloat16); y = x @ c

After::

    a = w.to(bfloat16); y = x @ a; z = y @ a; ...; y = x @ a

The weight's gradients are cast and added as before: bitwise. torch's own cache would add them in half precision. Does
nothing to weights that something but the update writes into, to casts with an update between them, and to casts that
are written or returned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable

import torch
from torch import fx

from lightning_spmd.ir.aliasing import storage_roots, written_arguments
from lightning_spmd.ir.effects import leaving_storages
from lightning_spmd.ir.geometry import is_view
from lightning_spmd.ir.node_info import Section, info_of

_CAST = torch.ops.aten._to_copy.default  # noqa: SLF001 - an operator's public name
_UPDATE = (Section.CLIP, Section.OPTIMIZER)


def share_weight_casts(graph: fx.Graph, weights: Collection[fx.Node]) -> None:
    """Let equal casts of a weight be its first one.

    Args:
        graph: complete.
        weights: its parameters.
    """
    roots = storage_roots(graph)
    casts = [n for n in graph.nodes if n.target is _CAST and roots[n.args[0]] in weights]
    casts = [n for n in casts if info_of(n).section not in _UPDATE]
    if len(casts) < 2:
        return
    writers = [(node, operand) for node in graph.nodes for operand in written_arguments(node)]
    kept_apart = {roots[o] for node, o in writers if info_of(node).section not in _UPDATE}
    kept_apart |= {roots[o] for _, o in writers} - set(weights) | (leaving_storages(graph, roots) - set(weights))
    writes = _writes_before(graph, roots)
    known: dict[Hashable, fx.Node] = {}
    for cast in casts:
        source = cast.all_input_nodes[0]
        if roots[source] in kept_apart or cast in kept_apart:
            continue
        origin = (_origin(source), writes[cast])  # training_step itself may update weights, and go on with them
        first = known.setdefault((origin, cast.args[1:], tuple(sorted(cast.kwargs.items()))), cast)
        if first is not cast:
            cast.replace_all_uses_with(first)
            graph.erase_node(cast)


def _writes_before(graph: fx.Graph, roots: dict[fx.Node, fx.Node]) -> dict[fx.Node, int]:
    """For every cast, how often its weight has been written."""
    counts, found = Counter[fx.Node](), dict[fx.Node, int]()
    for node in graph.nodes:
        if node.target is _CAST:
            found[node] = counts[roots[node.all_input_nodes[0]]]
        counts.update(roots[operand] for operand in written_arguments(node))
    return found


def _origin(node: fx.Node) -> Hashable:
    """Equal for nodes that look at a weight in the same way."""
    if not is_view(node):
        return node
    rest = tuple(tuple(a) if isinstance(a, list) else a for a in node.args[1:])
    return (node.target, _origin(node.all_input_nodes[0]), rest, tuple(sorted(node.kwargs.items())))
