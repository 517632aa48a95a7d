"""Remove views that change nothing.

Before, as linear layers on ``(rows, length, width)`` leave it::

    flat = view(x, [96, 64]); y = addmm(b, flat, w); z = view(y, [8, 12, 64]); flat2 = view(z, [96, 64]); use(flat2)
    a = t(w); b = t(a); use(b)

After::

    flat = view(x, [96, 64]); y = addmm(b, flat, w); z = view(y, [8, 12, 64]); use(y)
    use(w)

A view is replaced by the earliest value that is the same piece of the same storage: same shape, strides, offset and
dtype (``ir/geometry.py``). Two equal views of one value are the same case. What leaves the graph stays: the caller gets
a tensor of its own, never a live parameter. A view of an in-place result is never taken back before the write.

Saves no kernel on any device, but an operator call each, which on small models is what a step costs. Does nothing to a
graph without such views, and with uneven rows not to sharded values, whose shapes differ from rank to rank. Bitwise.
"""

from __future__ import annotations

from torch import fx

from lightning_spmd.ir.aliasing import storage_regions
from lightning_spmd.ir.effects import is_same_on_all_ranks, replace_reads, writes_before
from lightning_spmd.ir.geometry import Geometry, geometries, is_view
from lightning_spmd.ir.steps import ShardedStep
from lightning_spmd.stages.passes.contract import GraphPass, PassState


def remove_identity_views(step: ShardedStep, state: PassState) -> None:
    """Replace views that are an earlier value; see the module docstring."""
    graph = step.graph_module.graph
    found = geometries(graph)
    regions = storage_regions(graph)
    seen = writes_before(graph, regions)
    earliest: dict[Geometry, fx.Node] = {}
    removed = 0
    for node in list(graph.nodes):
        geometry = found.get(node)
        if geometry is None:
            continue
        same = earliest.setdefault(geometry, node)
        if same is node or not is_view(node) or regions[same] != regions[node]:
            continue
        if not _placed_alike(same, node) or not all(is_same_on_all_ranks(step, n) for n in (same, node)):
            continue
        replace_reads(node, same, seen[node] - seen[same], keep_output=True)
        if not node.users:
            graph.erase_node(node)
            removed += 1
    if removed:
        state.notes["identity_views"] = f"views removed: {removed}"


def _placed_alike(first: fx.Node, second: fx.Node) -> bool:
    """Whether the two stand for the same piece of a global tensor; redistribution leaves some nodes without a word."""
    ours, theirs = first.meta.get("placements"), second.meta.get("placements")
    return not ours or not theirs or ours == theirs


PASS = GraphPass("identity_views", remove_identity_views)
