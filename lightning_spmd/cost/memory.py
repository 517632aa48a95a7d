"""Bytes alive while a graph runs, counted from the sizes of its values: what is made in it and used up in it.

Inputs (parameters, state, the batch) are somebody else's, what leaves the graph (gradients, outputs) stays anyway:
neither is counted. A storage lives from the node that makes it to the last node that reads it under any name.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from lightning_spmd.ir.aliasing import storage_roots
from lightning_spmd.ir.effects import leaving_storages
from lightning_spmd.ir.node_info import TensorSpec


def peak_bytes(graph: fx.Graph) -> int:
    """The most bytes that are alive at once."""
    return max((alive for _, alive in alive_bytes(graph)), default=0)


def alive_bytes(graph: fx.Graph) -> Iterator[tuple[fx.Node, int]]:
    """Every node, and the bytes that are alive while it runs: its operands, its result, and what later nodes read."""
    roots = storage_roots(graph)
    ignored = leaving_storages(graph, roots) | {n for n in graph.nodes if n.op in ("placeholder", "get_attr")}
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        for value in (node, *node.all_input_nodes):
            last[roots[value]] = node
    ending: dict[fx.Node, list[fx.Node]] = {}
    for root, node in last.items():
        ending.setdefault(node, []).append(root)
    alive = 0
    for node in graph.nodes:
        if roots[node] is node and node not in ignored and node.op == "call_function":
            alive += _bytes(node)
        yield node, alive
        alive -= sum(
            _bytes(root) for root in ending.get(node, ()) if root not in ignored and root.op == "call_function"
        )


def _bytes(node: fx.Node) -> int:
    """Bytes that a node allocates: of several results, those of the nodes that pick them are counted there."""
    value = node.meta.get("val")
    return value.bytes if isinstance(value, TensorSpec) else 0
