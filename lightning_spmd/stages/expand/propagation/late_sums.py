"""Which partial sums of activations are better reduced later than at their first reader.

Before (experts in a loop, each shared by the ranks; every ``*`` reads a reduced value)::

    out = zeros();  out[rows_0] += share_0 * expert_0(x[rows_0]);  out[rows_1] += share_1 * expert_1(x[rows_1]);  ...

After: the products with shares and their sum are partial too, and ``out`` is reduced. So are gradients of what all
experts read, and the gradients of their shares, one number a row.

What becomes of partial sums by linear operators is one *stretch* with all that it meets. A stretch stays partial to its
ends, where something else reads it, if these have fewer bytes than what would be reduced otherwise. Zeros that partial
sums are added to are created as such.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import fx

from lightning_spmd.ir.aliasing import written_arguments
from lightning_spmd.ir.node_info import Section, TensorSpec, info_of
from lightning_spmd.ir.placement import PARTIAL, Shard
from lightning_spmd.stages.expand.axis_plan import Aliasing, AxisPlan
from lightning_spmd.stages.expand.call import bind_arguments, flatten_values, is_tensor

aten = torch.ops.aten

_OF_ONE = {
    aten.view, aten._unsafe_view, aten.reshape, aten.t, aten.transpose, aten.permute, aten.unsqueeze, aten.squeeze,
    aten.expand, aten.slice, aten.select, aten.clone, aten.alias, aten.detach, aten._to_copy, aten.neg, aten.sum,
    aten.mean,
}  # fmt: skip
"""Linear in their only tensor."""
_IN_THE_FIRST = {aten.index, aten.index_select, aten.div}
_OF_ALL = {aten.add, aten.add_, aten.sub, aten.sub_, aten.cat, aten.stack}
_INTO_ROWS = {
    aten.index_put: "values",
    aten.index_put_: "values",
    aten.index_add: "source",
    aten.index_add_: "source",
}
"""Linear in rows and what these are put into, or added to, together → the argument with the rows."""
_ZEROS = {aten.zeros, aten.zeros_like, aten.new_zeros}
_NEW = _ZEROS | {aten.empty_like, aten.new_empty, aten.new_empty_strided, aten.new_full, aten.new_ones}


@dataclass
class LateSums:
    """What stays partial longer than to its first reader.

    Args:
        passing: operators that pass partial sums on.
        zeros: what they are added to.
    """

    passing: set[fx.Node] = field(default_factory=set[fx.Node])
    zeros: set[fx.Node] = field(default_factory=set[fx.Node])


def late_sums(graph: fx.Graph, plan: AxisPlan, aliasing: Aliasing) -> LateSums:
    """The stretches that are better reduced at their ends.

    Args:
        graph: the global graph.
        plan: the placements where each partial sum is reduced at its first reader.
        aliasing: what is known of the graph's storages.
    """
    search = _Search(plan, aliasing)
    for node in graph.nodes:
        search.visit(node)
    found = LateSums()
    for stretch in {id(s): s for s in search.stretches()}.values():
        if stretch.bytes_at_ends() < stretch.bytes_now(plan):
            found.passing |= stretch.passing
            found.zeros |= stretch.zeros
    return found


@dataclass
class _Stretch:
    """Partial sums that are linear in each other.

    Args:
        values: all of them.
        passing: the operators that made them of others.
        zeros: what they were added to.
        ends: those that something else reads.
    """

    values: set[fx.Node] = field(default_factory=set[fx.Node])
    passing: set[fx.Node] = field(default_factory=set[fx.Node])
    zeros: set[fx.Node] = field(default_factory=set[fx.Node])
    ends: set[fx.Node] = field(default_factory=set[fx.Node])

    def bytes_at_ends(self) -> int:
        return sum(node.meta["val"].bytes for node in self.ends)

    def bytes_now(self, plan: AxisPlan) -> int:
        """Bytes of its values that are reduced as the plan says."""

        def is_reduced(value: fx.Node) -> bool:
            for reader in value.users:
                layout, operands = plan.layouts.get(reader), plan.operands.get(reader, [])
                if layout is not None and value in operands and layout.inputs[operands.index(value)] != PARTIAL:
                    return True
            return False

        partial = (value for value in self.values if plan.outputs.get(value) == (PARTIAL,))
        return sum(value.meta["val"].bytes for value in partial if is_reduced(value))


class _Search:
    """One pass over a graph.

    Args:
        plan: the placements as they are.
        aliasing: what is known of the graph's storages.
    """

    def __init__(self, plan: AxisPlan, aliasing: Aliasing) -> None:
        self.plan = plan
        self.aliasing = aliasing
        self.of: dict[fx.Node, _Stretch] = {}

    def stretches(self) -> list[_Stretch]:
        """All that were found."""
        return list(self.of.values())

    def visit(self, node: fx.Node) -> None:
        """Begin a stretch, pass one on, or end it."""
        partial = [operand for operand in node.all_input_nodes if operand in self.of]
        if partial and looks_at_shapes(node):
            self.of[partial[0]].passing.add(node)
        elif partial and not self._passes_on(node, partial):
            for operand in partial:
                self.of[operand].ends.add(operand)
        elif partial:
            self._pass_on(node, partial)
        elif self._begins(node):
            self.of[node] = _Stretch({node})

    def _begins(self, node: fx.Node) -> bool:
        """Whether this makes an activation a partial sum, by contracting what is split."""
        layout, value = self.plan.layouts.get(node), node.meta.get("val")
        if layout is None or layout.outputs != (PARTIAL,) or not isinstance(value, TensorSpec) or not value.shape:
            return False
        return _in_the_step(node) and any(isinstance(p, Shard) for p in layout.inputs)

    def _passes_on(self, node: fx.Node, partial: list[fx.Node]) -> bool:
        if not hasattr(node.target, "_schema") or not _in_the_step(node) or not is_tensor(node):
            return False
        packet, given = node.target.overloadpacket, bind_arguments(node.target, node.args, node.kwargs)  # type: ignore[union-attr]
        operands = [v for v in flatten_values(list(given.values())) if is_tensor(v)]
        if any(o not in partial and not self._is_fresh(o, node) for o in written_arguments(node)):
            return False
        if packet in _OF_ONE:
            return len(operands) == 1
        if packet is aten.mul:
            return len(partial) == 1 and operands.count(partial[0]) == 1
        if packet in _IN_THE_FIRST:
            return len(partial) == 1 and operands[0] is partial[0] and operands.count(partial[0]) == 1
        if packet in _OF_ALL:
            return len(operands) > 1 and all(o in partial or self._is_fresh(o, node) for o in operands)
        if packet in (aten.masked_fill, aten.masked_fill_):
            return given["value"] == 0 and partial == [given["self"]]
        if packet in _INTO_ROWS:
            values, target = given[_INTO_ROWS[packet]], given["self"]
            rows = [o for o in operands if o is not values and o is not target]
            into = target in partial or self._is_fresh(target, node)
            return values in partial and into and not set(rows) & set(partial)
        return False

    def _is_fresh(self, operand: fx.Node, reader: fx.Node) -> bool:
        """Whether an operand still consists of the zeros that it was created with."""
        if getattr(operand.target, "overloadpacket", None) not in _ZEROS:
            return False
        root, before = self.aliasing.roots[operand], self.aliasing.position[reader]
        names = self.aliasing.groups[root]
        writers = {user for name in names for user in name.users if name in written_arguments(user)}
        return all(self.aliasing.position[writer] >= before for writer in writers)

    def _pass_on(self, node: fx.Node, partial: list[fx.Node]) -> None:
        first, *others = partial
        stretch = self.of[first]
        for other in others:
            stretch = self._joined(stretch, self.of[other])
        fresh = [o for o in node.all_input_nodes if o not in partial and self._is_fresh(o, node)]
        stretch.zeros.update(fresh)
        stretch.passing.add(node)
        written = [o for o in fresh if o in written_arguments(node)]
        for value in (node, *written):
            stretch.values.add(value)
            self.of[value] = stretch

    def _joined(self, one: _Stretch, other: _Stretch) -> _Stretch:
        if one is other:
            return one
        for name in ("values", "passing", "zeros", "ends"):
            getattr(one, name).update(getattr(other, name))
        for value in other.values:
            self.of[value] = one
        return one


def looks_at_shapes(node: fx.Node) -> bool:
    """Whether a node makes something new of which its operands' elements say nothing."""
    return getattr(node.target, "overloadpacket", None) in _NEW


def _in_the_step(node: fx.Node) -> bool:
    return info_of(node).section in (Section.FORWARD, Section.BACKWARD)
