"""Activations between parallel layers: when a partial sum is reduced, and when a sequence shard is gathered.

On a data-parallel axis a gradient stays a partial sum as long as arithmetic is linear. On a tensor-parallel axis that
would be expensive: the partial sums are activations, each with several readers. There a plan gives the placement of
activations *between* blocks (``parallel_plan.PlansActivations``), and

* a partial sum takes that placement at its first reader; until then only linear operators that are its only reader may
  pass it on (views, the sum with another partial sum, the rest of the loss), and those of which ``late_sums`` says so;
* a sequence shard is gathered where it enters a product with a weight that is split over the axis, before it is
  flattened into rows: the weight itself never moves.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from lightning_spmd.ir.expert_rows import TO_EXPERTS
from lightning_spmd.ir.node_info import Section, TensorSpec, info_of
from lightning_spmd.ir.placement import REPLICATE, Partial, Placement, Shard, ShardAxis
from lightning_spmd.stages.expand.call import bind_arguments, flatten_values, is_tensor
from lightning_spmd.stages.expand.rules.views import map_view

aten = torch.ops.aten

_VIEWS = {
    aten.view, aten._unsafe_view, aten.reshape, aten.t, aten.transpose, aten.permute, aten.unsqueeze, aten.squeeze,
    aten.clone, aten.alias, aten.detach, aten._to_copy,
}  # fmt: skip
_LINEAR = {*_VIEWS, aten.neg, aten.add, aten.sub, aten.mul, aten.div, aten.masked_fill, aten.masked_fill_}
_TO_A_NUMBER = {aten.sum, aten.mean}
_ROWS: dict[object, tuple[str, ...]] = {
    aten.index: ("self",),
    aten.index_put: ("values", "self"),
    aten.index_add: ("source", "self"),
    aten.index_add_: ("source", "self"),
}
"""Rows that are moved or added up → the arguments that may be partial sums; the first one is."""
_PRODUCTS = {
    aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.mv, aten.addmv, aten.linear, aten._addmm_activation,
    aten.convolution, aten.convolution_backward,
}  # fmt: skip
_DEPTH = 6
"""Views between a value and the product that reads it, at most."""


@dataclass(frozen=True)
class ActivationRules:
    """Rules for activations on one axis.

    Args:
        axis: the axis.
        between: their placement between blocks.
        weights: the parameters of the graph and their placements.
        passing: operators that pass partial sums on to where they are reduced later (``late_sums``).
    """

    axis: ShardAxis
    between: Placement
    weights: Mapping[fx.Node, Placement]
    passing: Collection[fx.Node] = ()

    def settled(self, spec: TensorSpec) -> Placement:
        """The placement of a reduced activation with this spec."""
        where = self.between
        if isinstance(where, Shard) and len(spec.shape) > 2 and self.axis.divides(spec.shape[where.dim]):
            return where
        return REPLICATE

    def operand_changes(
        self, node: fx.Node, current: Callable[[fx.Node], Placement]
    ) -> tuple[dict[fx.Node, Placement], dict[fx.Node, Placement]]:
        """The changes of an operator's operands before it reads them.

        Returns:
            operands that are reduced from here on for all readers, and operands that this reader sees differently.
        """
        if info_of(node).section not in (Section.FORWARD, Section.BACKWARD):
            return {}, {}
        values = bind_arguments(node.target, node.args, node.kwargs).values()
        operands = list(dict.fromkeys(v for v in flatten_values(list(values)) if is_tensor(v)))
        partial = [o for o in operands if current(o) == Partial()]
        reduced: dict[fx.Node, Placement] = {}
        if partial and node not in self.passing and not _passes_on(node, operands, partial):
            reduced = {o: self.settled(o.meta["val"]) for o in partial}
        gathered: dict[fx.Node, Placement] = {}
        if isinstance(self.between, Shard):
            sequences = [o for o in operands if reduced.get(o, current(o)) == self.between]
            flat = [o for o in sequences if self._loses_sequence(node, o, self.between)]
            gathered = dict.fromkeys(flat, REPLICATE) if flat and self._enters_product(node) else {}
        return reduced, gathered

    def origin(self, node: fx.Node) -> fx.Node | None:
        """The split parameter that a node is a view or a copy of, if it is one."""
        while node.op == "call_function" and len(node.all_input_nodes) == 1:
            node = node.all_input_nodes[0]
        return node if isinstance(self.weights.get(node), Shard) else None

    def _loses_sequence(self, node: fx.Node, operand: fx.Node, sequence: Shard) -> bool:
        """Whether the operator turns (batch, sequence, features) into rows, or multiplies them as rows."""
        shape, packet = operand.meta["val"].shape, _packet(node)
        if packet is aten.linear:
            return len(shape) > 2
        if packet not in (aten.view, aten._unsafe_view, aten.reshape):
            return False
        mapped = map_view(shape, node.meta["val"].shape, sequence, self.axis)
        return mapped is None or (mapped.dim == 0 and mapped.outer != 1)

    def _enters_product(self, node: fx.Node) -> bool:
        """Whether the node is a product with a split weight, or a view that such a product or split experts read."""
        level = [node]
        for _ in range(_DEPTH):
            if any(n.target is TO_EXPERTS for n in level):
                return True
            if any(_packet(n) in _PRODUCTS and any(map(self.origin, n.all_input_nodes)) for n in level):
                return True
            level = [user for n in level if _packet(n) in (*_VIEWS, aten.index) for user in n.users]
        return False


def split_table_gradients(graph: fx.Graph, weights: Mapping[fx.Node, Placement]) -> dict[fx.Node, Placement]:
    """Gradients of embedding tables whose rows are split: each rank makes its own rows' alone."""
    tables = {
        (n.args[1], n.args[0].meta["val"].shape[0])  # type: ignore[union-attr]
        for n in graph.nodes
        if _packet(n) is aten.embedding and weights.get(n.args[0]) == Shard(0)  # type: ignore[arg-type]
    }
    gradients = [n for n in graph.nodes if _packet(n) is aten.embedding_dense_backward]
    return {n: Shard(0) for n in gradients if (n.args[1], n.args[2]) in tables}


def _packet(node: fx.Node) -> object:
    return getattr(node.target, "overloadpacket", None)


def _passes_on(node: fx.Node, operands: list[fx.Node], partial: list[fx.Node]) -> bool:
    """Whether a reader leaves partial sums what they are, and nothing else reads them."""
    if any(len(o.users) > 1 for o in partial):
        return False
    packet, value = _packet(node), node.meta.get("val")
    if packet in _TO_A_NUMBER and isinstance(value, TensorSpec) and not value.shape:
        return True
    if packet in _ROWS or packet is aten.sum:
        return _keeps_few(node, partial)
    if packet not in _LINEAR:
        return False
    others = [o.meta["val"] for o in operands if o not in partial]
    if packet in (aten.add, aten.sub):
        return len(operands) > 1 and not others
    if packet in (aten.masked_fill, aten.masked_fill_):
        return bind_arguments(node.target, node.args, node.kwargs)["value"] == 0
    return all(spec.numel == 1 for spec in others)


def _keeps_few(node: fx.Node, partial: list[fx.Node]) -> bool:
    """Whether rows that are moved or added up are no more than before: then the reduction moves less behind it."""
    value, packet = node.meta.get("val"), _packet(node)
    if not isinstance(value, TensorSpec):
        return False
    if packet is aten.sum:
        return value.numel <= partial[0].meta["val"].numel
    given = bind_arguments(node.target, node.args, node.kwargs)
    first, *others = [given[name] for name in _ROWS[packet]]
    adds = packet is not aten.index_put or bool(given["accumulate"])
    known = first in partial and all(o is first or o in others for o in partial)
    return adds and known and (len(partial) > 1 or value.numel <= first.meta["val"].numel)
