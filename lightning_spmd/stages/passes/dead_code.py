"""Remove operators whose results and writes are never read.

Before::

    a = mul(x, y)                                   nothing reads a
    e = empty(4); e.copy_(b)                        nothing reads e afterwards

After: nothing of it. A write counts only if something may read what it wrote: a later node, the caller (parameters,
buffers, state, outputs), the next iteration. So an in-place chain on a fresh tensor goes as a whole.

What stays whatever its result: random draws and the choice of their stream (they move a generator, and the numbers of
those that follow), collectives and their waits, assertions, and operators that are not torch's own.

Does nothing to a graph in which everything is read. Bitwise.
"""

from __future__ import annotations

from torch import fx

from lightning_spmd.ir.aliasing import storage_roots, written_arguments
from lightning_spmd.ir.effects import is_unnoticed, lasting_storages
from lightning_spmd.ir.steps import ShardedStep
from lightning_spmd.stages.passes.contract import GraphPass, PassState


def remove_dead_code(step: ShardedStep, state: PassState) -> None:
    """Remove dead nodes; see the module docstring for what is dead."""
    graph = step.graph_module.graph
    live = _live_nodes(graph)
    dead = [node for node in graph.nodes if node not in live]
    for node in reversed(dead):
        graph.erase_node(node)
    if dead:
        state.notes["dead_code"] = f"nodes removed: {len(dead)}"


def _live_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Backwards from the output: what is read, and what writes into a storage that is read later or lasts."""
    roots = storage_roots(graph)
    lasting = lasting_storages(graph, roots)
    live: set[fx.Node] = set()
    read_later: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        kept = node in live or not is_unnoticed(node)
        if not kept and not any(roots[o] in lasting or roots[o] in read_later for o in written_arguments(node)):
            continue
        live.add(node)
        live.update(node.all_input_nodes)
        read_later.update(roots[operand] for operand in node.all_input_nodes)
    return live


PASS = GraphPass(
    "dead_code",
    remove_dead_code,
    after=frozenset({"identity_views", "common_subexpressions", "redundant_copies"}),
)
