"""Remove copies that nothing needs.

Before::

    c = clone(x); y = mul(c, w)                     nothing writes into c, nor into x before c was last read
    c = clone(x); relu_(c); use(c)                  x is not read afterwards
    x.copy_(x)                                      (or two views that are the same bytes)
    s.copy_(y)                                      s was made here and is not read again

After::

    y = mul(x, w)
    relu_(x); use(x)

``clone`` and ``_to_copy`` are copies if dtype, device, shape and strides stay as they are. The source must be a whole
storage: a small copy of a piece would otherwise keep the rest of it alive, and a piece may be aligned differently. A
copy stays if it leaves the graph (the caller may keep it while live state moves on), if a collective works on it, if
something addresses it by its offset, or if it conjugates, which torch does only when something reads.

Does nothing to a graph without such copies, and with uneven rows not to sharded values, whose layouts may differ from
rank to rank. Bitwise.

The last case is what ``torch.distributed._spmd`` removed after functionalised optimizers
(``remove_copy_from_optimizer``).
"""

from __future__ import annotations

import torch
from torch import fx

from lightning_spmd.ir.aliasing import storage_regions, written_arguments
from lightning_spmd.ir.effects import (
    counts_of,
    is_same_on_all_ranks,
    lasting_storages,
    leaving_storages,
    replace_reads,
    set_counts,
)
from lightning_spmd.ir.geometry import geometries
from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.ir.steps import ShardedStep
from lightning_spmd.ir.verify import stamp_writes, starts_collective
from lightning_spmd.stages.passes.contract import GraphPass, PassState

_aten = torch.ops.aten
_COPIES = {_aten.clone.default, _aten._to_copy.default}  # noqa: SLF001 - an operator's public name
# Views that leave the work to whoever reads them: a copy does it.
_LAZY = {_aten._conj.default, _aten._neg_view.default}  # noqa: SLF001
_ALL_REDUCE = torch.ops._c10d_functional.all_reduce.default  # noqa: SLF001


def remove_redundant_copies(step: ShardedStep, state: PassState) -> None:
    """Remove copies; see the module docstring for which."""
    graph = step.graph_module.graph
    stamp_writes(graph)
    removed = _remove_self_copies(graph) + _remove_orphans(graph)
    uses = _Uses(graph)
    for node in list(graph.nodes):
        if node.target not in _COPIES or not is_same_on_all_ranks(step, node):
            continue
        source = node.all_input_nodes[0]
        if is_same_on_all_ranks(step, source) and uses.can_share(node, source):
            _share(graph, node, source)
            uses = _Uses(graph)
            removed += 1
    if removed:
        state.notes["redundant_copies"] = f"copies removed: {removed}"


class _Uses:
    """Who reads and writes which storage, by position."""

    def __init__(self, graph: fx.Graph) -> None:
        order: list[fx.Node] = list(graph.nodes)
        self.position = {node: i for i, node in enumerate(order)}
        self.regions = storage_regions(graph)
        self.roots = {node: region[0] for node, region in self.regions.items()}
        self.lasting = lasting_storages(graph, self.roots)
        self.leaving = leaving_storages(graph, self.roots)
        self.members: dict[fx.Node, list[fx.Node]] = {}
        for node in order:
            self.members.setdefault(self.roots[node], []).append(node)
        self.readers: dict[fx.Node, list[fx.Node]] = {}
        self.writers: dict[fx.Node, list[fx.Node]] = {}
        self.written_in_pieces: set[fx.Node] = set()
        for node in order:
            for root in dict.fromkeys(self.roots[o] for o in node.all_input_nodes):
                self.readers.setdefault(root, []).append(node)
            for operand in written_arguments(node):
                root, piece = self.regions[operand]
                self.writers.setdefault(root, []).append(node)
                if piece is not None:
                    self.written_in_pieces.add(root)

    def can_share(self, copy: fx.Node, source: fx.Node) -> bool:
        """Whether everybody who uses ``copy`` may use ``source``."""
        if not self._is_whole_and_alike(copy, source) or copy in self.leaving:
            return False
        users = self.readers.get(copy, [])
        if any(_needs_its_own(n) for n in (*users, *self.members[copy])):
            return False
        root, made = self.roots[source], self.position[copy]
        if any(member.target in _LAZY for member in self.members[root]):
            return False
        if root in self.written_in_pieces:
            return False  # readers of the copy's pieces would have seen some of the writes and not others
        if not self.writers.get(copy):
            until = max((self.position[n] for n in users), default=made)
            return not any(made < self.position[n] <= until for n in self.writers.get(root, ()))
        touched_later = any(self.position[n] > made for n in self.readers.get(root, ()))
        return root not in self.lasting and not touched_later

    def _is_whole_and_alike(self, copy: fx.Node, source: fx.Node) -> bool:
        spec, whole = copy.meta["val"], self.roots[source].meta.get("val")
        if not isinstance(whole, TensorSpec) or spec != source.meta["val"] or copy.kwargs.get("pin_memory"):
            return False
        return spec.numel == whole.numel and spec.dtype == whole.dtype and self.regions[source][1] is None


def _needs_its_own(node: fx.Node) -> bool:
    """Whether a user of a copy would notice other memory: collectives under way, offsets from a storage's start."""
    if starts_collective(node):
        return node.target is not _ALL_REDUCE
    offset = len(node.args) > 3 or "storage_offset" in node.kwargs
    return node.target is _aten.as_strided.default and offset


def _share(graph: fx.Graph, copy: fx.Node, source: fx.Node) -> None:
    """Put ``source`` in the place of ``copy``; views of the copy become views of the source."""
    replace_reads(copy, source, counts_of(copy)[source])
    graph.erase_node(copy)


def _remove_self_copies(graph: fx.Graph) -> int:
    """``x.copy_(x)``: a write that changes nothing, which later readers no longer see."""
    found = [n for n in graph.nodes if n.target is _aten.copy_.default]
    if not found:
        return 0
    where, regions = geometries(graph), storage_regions(graph)
    removed = 0
    for node in found:
        target, value = node.all_input_nodes[0], node.all_input_nodes[-1]
        if target not in where or where.get(value) != where[target] or regions[target] != regions[value]:
            continue
        _forget_write(graph, node, regions)
        replace_reads(node, target, counts_of(node)[target])
        graph.erase_node(node)
        removed += 1
    return removed


def _forget_write(graph: fx.Graph, write: fx.Node, regions: dict[fx.Node, tuple[fx.Node, fx.Node | None]]) -> None:
    """Whoever reads after ``write`` what was there before it has seen one write less."""
    root, piece = regions[write]
    earlier: set[fx.Node] = set()
    later = False
    for node in graph.nodes:
        if later:
            counts = counts_of(node)
            for operand in counts.keys() & earlier:
                same, part = regions[operand]
                if same is root and (part is piece or part is None or piece is None):
                    counts[operand] -= 1
            set_counts(node, counts)
        elif node is write:
            later = True
        else:
            earlier.add(node)


def _remove_orphans(graph: fx.Graph) -> int:
    """Copies into a tensor that was made here and is not touched afterwards."""
    uses = _Uses(graph)
    removed = 0
    for node in list(graph.nodes):
        if node.target is not _aten.copy_.default or node.users or uses.roots[node] in uses.lasting:
            continue
        if all(uses.position[n] <= uses.position[node] for n in uses.readers[uses.roots[node]]):
            graph.erase_node(node)
            removed += 1
    return removed


PASS = GraphPass(
    "redundant_copies", remove_redundant_copies, after=frozenset({"identity_views", "common_subexpressions"})
)
