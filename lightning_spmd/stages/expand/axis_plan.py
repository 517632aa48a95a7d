"""The result of propagation along one axis, and the facts about the graph's storages that it needs."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import fx

from lightning_spmd.ir.aliasing import overlapping, storage_regions, written_arguments
from lightning_spmd.ir.placement import Placement, ShardAxis
from lightning_spmd.stages.expand.call import Layout, OpCall


@dataclass
class AxisPlan:
    """Placements along one axis.

    Args:
        axis: the mesh axis.
        layouts: the chosen layout of every operator node.
        operands: the tensor operands that a layout's ``inputs`` refer to.
        outputs: placement of each output of a node.
        results: placement of each graph output.
        replicated: operators for which no rule was found, and the bytes gathered for that.
        failures: errors in the rules of some of them.
        gathered: operators that cannot work on activations with their placement, and the bytes gathered for them.
        remedy: advice for these: how to avoid the gather, or why it cannot be avoided.
        chosen: (hand-over, position among its values) of the numbers of rows of which each rank holds its own.
    """

    axis: ShardAxis
    layouts: dict[fx.Node, Layout] = field(default_factory=dict)
    operands: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    outputs: dict[fx.Node, tuple[Placement, ...]] = field(default_factory=dict)
    results: list[Placement] = field(default_factory=list)
    replicated: dict[fx.Node, int] = field(default_factory=dict)
    failures: dict[fx.Node, str] = field(default_factory=dict)
    gathered: dict[fx.Node, int] = field(default_factory=dict)
    remedy: str = ""
    chosen: set[tuple[fx.Node, int]] = field(default_factory=set)


@dataclass(frozen=True)
class Aliasing:
    """The relevant facts about the global graph's storages, which are the same for all axes."""

    roots: dict[fx.Node, fx.Node]
    pieces: dict[fx.Node, fx.Node | None]
    groups: dict[fx.Node, list[fx.Node]]
    position: dict[fx.Node, int]
    last_use: dict[fx.Node, int]
    written: set[fx.Node]

    @classmethod
    def of(cls, graph: fx.Graph) -> Aliasing:
        """The facts about a graph."""
        regions = storage_regions(graph)
        roots = {node: root for node, (root, _) in regions.items()}
        pieces = {node: piece for node, (_, piece) in regions.items()}
        groups: dict[fx.Node, list[fx.Node]] = {}
        for node, root in roots.items():
            groups.setdefault(root, []).append(node)
        position = {node: i for i, node in enumerate(graph.nodes)}
        last = {node: max((position[u] for u in node.users), default=-1) for node in graph.nodes}
        written = {roots[o] for node in graph.nodes for o in written_arguments(node)}
        return cls(roots, pieces, groups, position, last, written)

    def others_read_later(self, operand: fx.Node, writer: fx.Node) -> list[fx.Node]:
        """Other names of ``operand``'s storage that are read after ``writer``."""
        now = self.position[writer]
        piece = self.pieces[operand]
        group = [o for o in self.groups[self.roots[operand]] if overlapping(piece, self.pieces[o])]
        return [a for a in group if a is not operand and a is not writer and self.position[a] < now < self.last_use[a]]


def result_is_the_operand(call: OpCall, layout: Layout, written: list[fx.Node]) -> bool:
    """Whether a layout leaves the tensor that an in-place operator returns placed as it took it.

    ``transpose_`` and the like change the tensor's shape and none of its elements.
    """
    if torch.Tag.inplace_view in call.op.tags:
        return True
    returns = call.op._schema.returns
    in_place = len(returns) == 1 and returns[0].alias_info is not None and returns[0].alias_info.is_write
    return not in_place or all(
        layout.inputs[i] == layout.outputs[0] for i, operand in enumerate(call.operands) if operand in written
    )
