"""Experts split over a tensor axis: each rank multiplies the rows of its own experts, one reduction puts them together.

Before (rows sorted by expert, ``w`` with one matrix an expert, ``ends`` of each expert's rows)::

    y = grouped_mm(x, w, ends);  z = act(y) * gate;  out = z[inverse]

After::

    y = grouped_mm(to_experts(x), w, ends);  z = act(y) * to_experts(gate);  out = from_experts(z)[inverse]

Between the two marks (``ir/expert_rows``) lies a *region*: values whose rows are a rank's own first, in order, and mean
nothing from there on (``Own`` on the axis). It begins at a grouped product with a weight that the plan splits by its
first dimension, and goes on through every operator whose sharding rule lets rows pass; all else reads rows that came
back, as a partial sum which is reduced like any other activation. The backward pass is found in the same way: gradients
of weights come out split as the weights are. Biases by expert, ``bias[ids]``, belong to the region where ``ends`` are
counts of the same ``ids``.

No size depends on how many rows an expert gets: nothing is dropped, nothing is padded, Python is asked nothing. What is
saved on a rank is weights, their state, and products; activations between the products keep all rows' size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import fx

from lightning_spmd.ir.aliasing import written_arguments
from lightning_spmd.ir.expert_rows import FROM_EXPERTS, TO_EXPERTS
from lightning_spmd.ir.layout import row_major
from lightning_spmd.ir.node_info import Section, TensorSpec, info_of
from lightning_spmd.ir.placement import OWN, PARTIAL, REPLICATE, Own, Placement, Shard, ShardAxis
from lightning_spmd.ir.signature import InputRole, Signature
from lightning_spmd.parallel.parallel_plan import ParallelPlan, activations_between
from lightning_spmd.stages.expand.axis_plan import Aliasing
from lightning_spmd.stages.expand.call import Emit, Layout, LocalCall, OpCall, bind_arguments
from lightning_spmd.stages.expand.reduce_scatter import rank_dependent_slice
from lightning_spmd.stages.expand.rules import layouts_of

aten = torch.ops.aten

_GROUPED = aten._grouped_mm
_WEIGHT_VIEWS = (aten.transpose, aten.permute, aten._to_copy, aten.clone, aten.alias, aten.detach)
_CASTS = (aten._to_copy, aten.clone, aten.view, aten.alias, aten.detach)
_COUNTS = (aten.histc, aten.bincount)
_NEW = (aten.new_zeros, aten.new_ones, aten.new_full, aten.new_empty, aten.new_empty_strided)
_ROW_BY_ROW = (aten.squeeze, aten.squeeze_copy)
"""Local programs of their own, for a rank with a single row; here every rank has all rows' size."""
_TABLE = "table_by_expert"
"""Key in ``node.meta``: the operator reads, or sums up, rows of a table with one row an expert; the axis' name."""


_Changes: TypeAlias = dict[tuple[fx.Node, fx.Node], tuple[fx.Node, int]]


# ---------------------------------------------------------------- regions in the captured graph
class _Refused(Exception):
    """What is made of some rows by expert would be seen through another name: ``ends`` of those rows."""

    def __init__(self, ends: fx.Node) -> None:
        super().__init__(ends.name)
        self.ends = ends


@dataclass
class _Regions:
    """What is known of a graph's rows by expert.

    Args:
        ends: by value inside a region, the ends of the experts' rows, and the dimension that the rows are.
        entering: (reader, operand) → (ends, dimension): rows to be brought to their experts.
        leaving: the same for rows to be brought back; before they enter another region, where both are wanted.
        tables: readers and gradients of tables with one row an expert.
    """

    ends: dict[fx.Node, tuple[fx.Node, tuple[int, ...]]] = field(
        default_factory=dict[fx.Node, tuple[fx.Node, tuple[int, ...]]]
    )
    entering: _Changes = field(default_factory=dict[tuple[fx.Node, fx.Node], tuple[fx.Node, int]])
    leaving: _Changes = field(default_factory=dict[tuple[fx.Node, fx.Node], tuple[fx.Node, int]])
    tables: set[fx.Node] = field(default_factory=set[fx.Node])


def bring_rows_to_experts(
    graph: fx.Graph, signature: Signature, axes: Sequence[ShardAxis], plan: ParallelPlan
) -> fx.Graph:
    """The graph, or a copy of it with marks where rows go to split experts and come back."""
    for axis in axes:
        if activations_between(plan, axis) is None:
            continue
        placeholders = (node for node in graph.nodes if node.op == "placeholder")
        split = {
            node
            for node, entry in zip(placeholders, signature.inputs, strict=True)
            if entry.role is InputRole.PARAMETER and plan.input_placement(axis, entry) == Shard(0)
        }
        regions = _regions(graph, split) if split else _Regions()
        if regions.entering:
            graph = _marked(graph, regions, axis)
    return graph


def _regions(graph: fx.Graph, split: set[fx.Node]) -> _Regions:
    """What can stay with the experts; rows that something writes into from outside are multiplied everywhere."""
    refused: set[fx.Node] = set()
    while True:
        try:
            return _Search(graph, split, refused).run()
        except _Refused as error:
            refused.add(error.ends)


class _Search:
    """One pass over a graph.

    Args:
        graph: the graph.
        split: the parameters that the plan splits by their first dimension.
        refused: ends of rows that must not become a region.
    """

    def __init__(self, graph: fx.Graph, split: set[fx.Node], refused: set[fx.Node]) -> None:
        self.graph = graph
        self.split = split
        self.refused = refused
        self.storage = Aliasing.of(graph)
        self.found = _Regions()
        self.known: set[fx.Node] = set()
        self.one = ShardAxis("experts", 1, 0, "", (1,))

    def run(self) -> _Regions:
        """Follow rows from products with split weights on."""
        for node in self.graph.nodes:
            works = node.op == "call_function" and (self._joins(node) or _looks_at_shapes(node))
            if not works:
                self._leave(node, node.all_input_nodes)
        return self.found

    def _joins(self, node: fx.Node) -> bool:
        """Whether a node works on rows by expert; its operands are noted where they must be brought there."""
        if not hasattr(node.target, "_schema"):
            return self._is_item(node)
        if info_of(node).section not in (Section.FORWARD, Section.BACKWARD):
            return False
        given = bind_arguments(node.target, node.args, node.kwargs)
        packet = node.target.overloadpacket  # type: ignore[union-attr]
        if packet is _GROUPED:
            return self._product(node, given["self"], given["mat2"], given["offs"])
        if packet is aten.index and self._table(node, given["self"], given["indices"]):
            return True
        if packet in (aten.index_put, aten.index_put_) and self._table_gradient(node, given):
            return True
        return self._passes(node)

    def _is_item(self, node: fx.Node) -> bool:
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node) or source not in self.found.ends:
            return False
        ends, dims = self.found.ends[source]
        self.found.ends[node] = (ends, (dims[node.args[1]],))  # type: ignore[index]
        return True

    def _is_split(self, node: object) -> bool:
        """Whether a value is a split parameter, perhaps seen through what leaves its first dimension alone."""
        while isinstance(node, fx.Node) and node not in self.split:
            if getattr(node.target, "overloadpacket", None) not in _WEIGHT_VIEWS:
                return False
            source = node.args[0]
            shapes = [n.meta["val"].shape for n in (node, source)]  # type: ignore[union-attr]
            moves = {d % len(shapes[0]) for d in node.args[1:] if isinstance(d, int)}
            if node.target is aten.permute.default:
                moves = {0} if node.args[1][0] != 0 else set[int]()  # type: ignore[index]
            if 0 in moves and node.target.overloadpacket in (aten.transpose, aten.permute):  # type: ignore[union-attr]
                return False
            node = source
        return isinstance(node, fx.Node)

    def _product(self, node: fx.Node, rows: fx.Node, other: fx.Node, ends: object) -> bool:
        if not isinstance(ends, fx.Node) or ends in self.refused:
            return False
        dims = len(rows.meta["val"].shape), len(other.meta["val"].shape)
        if dims == (2, 3) and self._is_split(other):
            self.known.add(ends)
            self._enter(node, rows, ends, 0)
            self.found.ends[node] = (ends, (0,))
            return True
        if dims == (2, 2) and ends in self.known:
            self._enter(node, rows, ends, 1)
            self._enter(node, other, ends, 0)
            return True
        return False

    def _ends_of(self, ids: object) -> fx.Node | None:
        """The known ends that are running counts of these numbers of experts."""
        return next((ends for ends in self.known if isinstance(ids, fx.Node) and _counted(ends) is ids), None)

    def _upcoming_ends_of(self, ids: object) -> fx.Node | None:
        """As :meth:`_ends_of`, of products that come later."""
        for node in self.graph.find_nodes(op="call_function", target=_GROUPED.default):
            given = bind_arguments(node.target, node.args, node.kwargs)
            ends = given["offs"]
            known = isinstance(ends, fx.Node) and ends not in self.refused and _counted(ends) is ids
            if known and self._is_split(given["mat2"]):
                return ends
        return None

    def _table(self, node: fx.Node, table: fx.Node, indices: list[object]) -> bool:
        if len(indices) != 1 or not isinstance(indices[0], fx.Node) or not self._is_split(table):
            return False
        ends = self._ends_of(indices[0]) or self._upcoming_ends_of(indices[0])
        if ends is None or ends.meta["val"].shape[0] != table.meta["val"].shape[0] or not ends < node:
            return False
        self._enter(node, indices[0], ends, 0)
        self.found.tables.add(node)
        self.found.ends[node] = (ends, (0,))
        return True

    def _table_gradient(self, node: fx.Node, given: dict[str, object]) -> bool:
        indices, values, table = given["indices"], given["values"], given["self"]
        if not isinstance(indices, (list, tuple)) or len(indices) != 1 or not given["accumulate"]:
            return False
        ends = self._ends_of(indices[0])
        if ends is None or not isinstance(values, fx.Node) or not isinstance(table, fx.Node):
            return False
        if table.meta["val"].shape[0] != ends.meta["val"].shape[0] or table in self.found.ends:
            return False
        self._enter(node, indices[0], ends, 0)
        self._enter(node, values, ends, 0)
        self.found.tables.add(node)
        return True

    def _passes(self, node: fx.Node) -> bool:
        """Whether an operator with operands in a region lets their rows pass, whatever is in others'."""
        inside = {o: self.found.ends[o] for o in node.all_input_nodes if o in self.found.ends}
        if len({ends for ends, _ in inside.values()}) != 1 or torch.Tag.nondeterministic_seeded in node.target.tags:  # type: ignore[union-attr]
            return False
        (ends,) = {ends for ends, _ in inside.values()}
        call = OpCall(node, self.one, lambda n: Shard(inside[n][1][0]) if n in inside else REPLICATE)
        written = written_arguments(node)
        for layout in layouts_of(call) or []:
            pairs = list(zip(call.operands, layout.inputs, call.current, strict=True))
            kept = all(want == have for o, want, have in pairs if o in inside)
            rows = [p.dim for p in layout.outputs if isinstance(p, Shard) and p.outer == 1]
            others = [(o, want.dim) for o, want, _ in pairs if o not in inside and isinstance(want, Shard)]
            own_program = layout.emit is not None and call.op.overloadpacket not in _ROW_BY_ROW
            if not kept or len(rows) != len(call.outputs) or own_program or any(o in written for o, _ in others):
                continue
            if any(o in written and o not in inside for o in call.operands):
                continue
            for operand, dim in others:
                self._enter(node, operand, ends, dim)
            self.found.ends[node] = (ends, tuple(rows))
            return True
        return False

    def _enter(self, reader: fx.Node, operand: fx.Node, ends: fx.Node, dim: int) -> None:
        if operand in self.found.ends:
            if self.found.ends[operand][0] is ends:
                return
            self._leave(reader, [operand])
        self.found.entering[reader, operand] = (ends, dim)

    def _leave(self, reader: fx.Node, operands: Sequence[fx.Node]) -> None:
        for operand in operands:
            if operand not in self.found.ends:
                continue
            ends, dims = self.found.ends[operand]
            sees = self.storage.roots[reader] is self.storage.roots[operand]
            if operand in written_arguments(reader) or (sees and self.storage.roots[reader] in self.storage.written):
                raise _Refused(ends)
            self.found.leaving[reader, operand] = (ends, dims[0])


def _looks_at_shapes(node: fx.Node) -> bool:
    """Whether a node makes something new of which its operands' elements say nothing."""
    return getattr(node.target, "overloadpacket", None) in _NEW


def _counted(ends: fx.Node) -> fx.Node | None:
    """The numbers of experts that ends of rows were counted from."""
    if ends.target is not aten.cumsum.default:
        return None
    node = ends.args[0]
    while isinstance(node, fx.Node) and getattr(node.target, "overloadpacket", None) in _CASTS:
        node = node.args[0]
    if not isinstance(node, fx.Node) or getattr(node.target, "overloadpacket", None) not in _COUNTS:
        return None
    if node.target is aten.histc.default and list(node.args[1:]) not in (
        [ends.meta["val"].shape[0], 0, ends.meta["val"].shape[0] - 1],
    ):
        return None
    node = node.args[0]
    while isinstance(node, fx.Node) and getattr(node.target, "overloadpacket", None) in _CASTS:
        node = node.args[0]
    return node if isinstance(node, fx.Node) else None


def _marked(graph: fx.Graph, regions: _Regions, axis: ShardAxis) -> fx.Graph:
    """A copy of the graph with the marks."""
    copies: dict[fx.Node, fx.Node] = {}
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, copies))
    copies[graph.output_node()] = copy.output_node()
    now = {(reader, operand): copies[operand] for reader, operand in [*regions.leaving, *regions.entering]}
    for target, changes in ((FROM_EXPERTS, regions.leaving), (TO_EXPERTS, regions.entering)):
        for (reader, operand), (ends, dim) in changes.items():
            source, spec = now[reader, operand], operand.meta["val"]
            with copy.inserting_before(copies[reader]):
                mark = copy.call_function(target, (source, copies[ends], dim, axis.name))
            value = TensorSpec(spec.shape, row_major(spec.shape), spec.dtype, spec.device)
            mark.meta.update(info=info_of(operand if target is FROM_EXPERTS else reader), val=value)
            copies[reader].replace_input_with(source, mark)
            now[reader, operand] = mark
    for node in regions.tables:
        copies[node].meta[_TABLE] = axis.name
    return copy


# ---------------------------------------------------------------- layouts and local programs
def layout_by_expert(call: OpCall) -> Layout | None:
    """The layout of a mark on the axis that it is for, and of an operator inside a region; None for any other."""
    if call.op in (TO_EXPERTS, FROM_EXPERTS):
        if call["axis"] != call.axis.name:
            return None
        if call.op is TO_EXPERTS:
            return Layout((REPLICATE, REPLICATE), (OWN,), _emit_to)
        return Layout((OWN, REPLICATE), (PARTIAL,), _emit_from)
    own = [isinstance(placement, Own) for placement in call.current]
    if not any(own):
        return None
    inputs: list[Placement] = [OWN if mine else REPLICATE for mine in own]
    if call.op.overloadpacket is _GROUPED:
        weights = call.index("mat2")
        if weights is not None and not own[weights]:
            inputs[weights] = Shard(0)
            return Layout(tuple(inputs), (OWN,), _emit_product)
        return Layout(tuple(inputs), (Shard(0),), _emit_product)
    if call.node.meta.get(_TABLE) == call.axis.name:
        inputs[0] = Shard(0)
        if call.op.overloadpacket is aten.index:
            return Layout(tuple(inputs), (OWN,), _emit_table)
        return Layout(tuple(inputs), (Shard(0),), _emit_table_gradient)
    if _looks_at_shapes(call.node):
        return Layout(tuple(inputs), (REPLICATE,))
    return Layout(tuple(inputs), (OWN,) * max(len(call.outputs), 1))


def _own_experts(call: LocalCall, emit: Emit, count: int) -> tuple[int, int]:
    """The first of this rank's experts and the one behind its last."""
    (axis,) = call.emitting_axes(emit)
    ((start, length),) = axis.pieces(count)
    return start, start + length


def _bounds(call: LocalCall, emit: Emit, ends: fx.Node) -> fx.Node:
    """Where the first of this rank's experts' rows begins, and the ends of each of them."""
    (experts,) = call.program.shape(ends)
    start, end = _own_experts(call, emit, experts)
    zero = call.call(aten.new_zeros.default, ends, [1])
    starts = call.call(aten.cat.default, [zero, ends])
    return rank_dependent_slice(call.program, starts, 0, start, end + 1 - start)


def _places(call: LocalCall, bounds: fx.Node, rows: int) -> tuple[fx.Node, fx.Node]:
    """(the number of each row, where the rank's first is)."""
    device = call.program.spec(bounds).device
    numbers = call.call(aten.arange.default, rows, device=device)
    return numbers, call.call(aten.select.int, bounds, 0, 0)


def _emit_to(call: LocalCall) -> list[fx.Node | None]:
    """All rows, beginning with those of this rank's experts."""
    rows, dim = call["rows"], call["dim"]
    count = call.program.shape(rows)[dim]
    numbers, first = _places(call, _bounds(call, _emit_to, call["ends"]), count)
    order = call.call(aten.remainder.Scalar, call.call(aten.add.Tensor, numbers, first), max(count, 1))
    return [call.call(aten.index_select.default, rows, dim, order)]


def _emit_from(call: LocalCall) -> list[fx.Node | None]:
    """The rank's own rows where they were, zeros elsewhere."""
    rows, dim = call["rows"], call["dim"]
    shape = call.program.shape(rows)
    count = shape[dim]
    bounds = _bounds(call, _emit_from, call["ends"])
    numbers, first = _places(call, bounds, count)
    place = call.call(aten.sub.Tensor, numbers, first)
    order = call.call(aten.remainder.Scalar, place, max(count, 1))
    chosen = call.call(aten.index_select.default, rows, dim, order)
    last = call.call(aten.select.int, bounds, 0, -1)
    others = call.call(
        aten.logical_or.default,
        call.call(aten.lt.Tensor, numbers, first),
        call.call(aten.ge.Tensor, numbers, last),
    )
    others = call.call(aten.view.default, others, [count if d == dim else 1 for d in range(len(shape))])
    return [call.call(aten.masked_fill.Scalar, chosen, others, 0)]


def _emit_product(call: LocalCall) -> list[fx.Node | None]:
    """The product with this rank's experts alone; its rows come first."""
    bounds = _bounds(call, _emit_product, call["offs"])
    first = call.call(aten.select.int, bounds, 0, 0)
    ends = call.call(aten.slice.Tensor, bounds, 0, 1, 2**63 - 1)
    return [call.default(offs=call.call(aten.sub.Tensor, ends, first))]


def _entries(call: LocalCall, emit: Emit) -> tuple[fx.Node, fx.Node]:
    """(of each row, the number of its expert among this rank's, or some other; whether it is none of them)."""
    (ids,) = call["indices"]
    start, end = _own_experts(call, emit, call.spec("self").shape[0])
    place = call.call(aten.sub.Tensor, ids, start)
    place.meta["rank_dependent"] = True
    entry = call.call(aten.clamp.default, place, 0, end - start - 1)
    return entry, call.call(aten.ne.Tensor, entry, place)


def _emit_table(call: LocalCall) -> list[fx.Node | None]:
    """Each row's entry in this rank's part of a table."""
    entries, _ = _entries(call, _emit_table)
    return [call.default(indices=[entries])]


def _emit_table_gradient(call: LocalCall) -> list[fx.Node | None]:
    """Each row added to its entry in this rank's part of a table."""
    entries, others = _entries(call, _emit_table_gradient)
    shape = call.program.shape(call["values"])
    others = call.call(aten.view.default, others, [shape[0], *[1] * (len(shape) - 1)])
    values = call.call(aten.masked_fill.Scalar, call["values"], others, 0)
    return [call.default(indices=[entries], values=values)]
