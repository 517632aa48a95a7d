"""Where in a captured graph experts that are split over a tensor axis work, marked for expansion.

Before (rows sorted by expert, ``w`` with one matrix an expert, ``ends`` of each expert's rows)::

    y = grouped_mm(x, w, ends);  z = act(y) * gate;  out = z[inverse]

After::

    y = grouped_mm(to_experts(x), w, ends);  z = act(y) * to_experts(gate);  out = from_experts(z)[inverse]

Between the marks (``ir/expert_rows``) lies a *region*: values that mean something on the rank of an expert alone. There
are two kinds.

* Rows sorted by expert: a rank's own rows come first, and nothing is said of those behind them. It begins at a grouped
  product with a weight that the plan splits by its first dimension. Biases by expert, ``bias[ids]``, belong to it where
  ``ends`` are counts of the same ``ids``.
* What is made of chosen experts' weights: ``w[ids]``, ``w[e]``. Nothing is moved to it; rows of other ranks' experts
  (or all, where ``e`` is another rank's) are multiplied with something else and left out where values come back. So
  weights and their state are a rank's share, and work is not.

A region goes on through every operator whose sharding rule lets its rows pass; all else reads what came back, as a
partial sum which is reduced like any other activation. The backward pass is found in the same way: gradients of weights
come out split as the weights are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import fx

from lightning_spmd.ir.aliasing import written_arguments
from lightning_spmd.ir.expert_rows import FROM_CHOSEN, FROM_EXPERT, FROM_EXPERTS, TO_EXPERTS
from lightning_spmd.ir.first import first
from lightning_spmd.ir.layout import row_major
from lightning_spmd.ir.node_info import Section, TensorSpec, info_of
from lightning_spmd.ir.placement import REPLICATE, Placement, Shard, ShardAxis
from lightning_spmd.ir.signature import InputRole, Signature
from lightning_spmd.parallel.parallel_plan import ParallelPlan, activations_between, experts_over, own_batches
from lightning_spmd.stages.expand.axis_plan import Aliasing
from lightning_spmd.stages.expand.call import OpCall, bind_arguments
from lightning_spmd.stages.expand.rules import layouts_of

aten = torch.ops.aten

BY_EXPERT = "by_expert"
"""Key in ``node.meta``: the operator reads, or sums up, entries of what has one entry an expert; the axis' name."""

EXPERT_WEIGHTS = "expert_weights"
"""Key in ``node.meta``: a view or a cast of weights by expert, which lies as these do; the name of the axis."""

_GROUPED = aten._grouped_mm
_WEIGHT_VIEWS = (aten.transpose, aten.permute, aten._to_copy, aten.clone, aten.alias, aten.detach)
_CASTS = (aten._to_copy, aten.clone, aten.view, aten.alias, aten.detach)
_COUNTS = (aten.histc, aten.bincount)
_ROW_BY_ROW = (aten.squeeze, aten.squeeze_copy)
"""Local programs of their own, for a rank with a single row; here every rank has all rows' size."""
_ADDING = (aten.index_add, aten.index_add_, aten.index_put, aten.index_put_, aten.scatter_add, aten.scatter_add_)
_SUMS = (aten.add, aten.add_, aten.sub, aten.sub_)
_NEW = (aten.new_zeros, aten.new_ones, aten.new_full, aten.new_empty, aten.new_empty_strided)
_EMPTY = (aten.new_empty, aten.new_empty_strided)
_UNFIT = (torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


@dataclass(frozen=True)
class _Owner:
    """Whose the values of a region are.

    Args:
        experts: number of experts.
        ends: of rows sorted by expert, the ends of each expert's.
        chosen: else the number of each row's expert, or of the one expert that all is made of.
    """

    experts: int
    ends: fx.Node | None = None
    chosen: fx.Node | int | None = None


_Dims: TypeAlias = "tuple[int | None, ...]"
"""By output of a node the dimension that is rows; None: all of it is one expert's."""
_Changes: TypeAlias = "dict[tuple[fx.Node, fx.Node], tuple[_Owner, int | None]]"


@dataclass
class _Regions:
    """What is known of a graph's values by expert.

    Args:
        owners: by value inside a region, whose it is, and its rows.
        entering: (reader, operand) → (owner, dimension): rows to be brought to their experts.
        leaving: the same for values to be brought back; before they enter another region, where both are wanted.
        by_expert: readers and gradients of what has one entry an expert.
        weights: through which views and casts of weights they are read.
    """

    owners: dict[fx.Node, tuple[_Owner, _Dims]] = field(default_factory=dict[fx.Node, tuple[_Owner, _Dims]])
    entering: _Changes = field(default_factory=dict[tuple[fx.Node, fx.Node], tuple[_Owner, "int | None"]])
    leaving: _Changes = field(default_factory=dict[tuple[fx.Node, fx.Node], tuple[_Owner, "int | None"]])
    by_expert: set[fx.Node] = field(default_factory=set[fx.Node])
    weights: set[fx.Node] = field(default_factory=set[fx.Node])


def mark_experts(graph: fx.Graph, signature: Signature, axes: Sequence[ShardAxis], plan: ParallelPlan) -> fx.Graph:
    """The graph, or a copy of it with marks where rows go to split experts and values come back."""
    for axis in axes:
        shares_tokens = activations_between(plan, axis) is not None
        exchanged = () if own_batches(plan, axis) else experts_over(plan, axis)
        if not shares_tokens and not exchanged:
            continue
        placeholders = (node for node in graph.nodes if node.op == "placeholder")
        split = {
            node
            for node, entry in zip(placeholders, signature.inputs, strict=True)
            if entry.role is InputRole.PARAMETER
            and (plan.input_placement(axis, entry) == Shard(0) if shares_tokens else entry.key[0] in exchanged)
        }
        regions = _regions(graph, split, rows_go=not shares_tokens) if split else _Regions()
        if regions.by_expert or regions.entering:
            graph = _marked(graph, regions, axis)
    return graph


class _Refused(Exception):
    """What is made of values by expert would be seen through another name."""

    def __init__(self, owner: _Owner) -> None:
        super().__init__(str(owner))
        self.owner = owner


def _regions(graph: fx.Graph, split: set[fx.Node], *, rows_go: bool) -> _Regions:
    """What can stay with the experts; where something writes into it from outside, weights are gathered instead."""
    refused: set[_Owner] = set()
    while True:
        try:
            return _Search(graph, split, refused, rows_go).run()
        except _Refused as error:
            refused.add(error.owner)


class _Search:
    """One pass over a graph.

    Args:
        graph: the graph.
        split: the parameters that the plan splits by their first dimension.
        refused: of whose values no region must be made.
        rows_go: only regions of sorted rows, for ranks that have rows of their own.
    """

    def __init__(self, graph: fx.Graph, split: set[fx.Node], refused: set[_Owner], rows_go: bool) -> None:
        self.graph = graph
        self.rows_go = rows_go
        self.split = split
        self.refused = refused
        self.storage = Aliasing.of(graph)
        self.found = _Regions()
        self.sorted = self._sorted_rows()
        self.sums: set[fx.Node] = set()
        """of what several ranks give: the next of their terms is added to it before they are reduced"""
        self.one = ShardAxis("experts", 1, 0, "", (1,))

    def _sorted_rows(self) -> dict[fx.Node, _Owner]:
        """By ends of rows, whose these are, from all grouped products with split weights."""
        found: dict[fx.Node, _Owner] = {}
        for node in self.graph.find_nodes(op="call_function", target=_GROUPED.default):
            given = bind_arguments(node.target, node.args, node.kwargs)
            if isinstance(given["offs"], fx.Node) and self._is_split(given["mat2"]):
                owner = _Owner(given["offs"].meta["val"].shape[0], ends=given["offs"])
                if owner not in self.refused:
                    found[given["offs"]] = owner
        return found

    def run(self) -> _Regions:
        """Follow values from products with split weights on."""
        for node in self.graph.nodes:
            works = node.op == "call_function" and (self._joins(node) or looks_at_shapes(node))
            if works:
                continue
            self._leave(node, node.all_input_nodes)
            if any(o in self.found.owners or o in self.sums for o in node.all_input_nodes) and _adds(node):
                self.sums.add(node)
        return self.found

    def _joins(self, node: fx.Node) -> bool:
        """Whether a node works on values by expert; its operands are noted where they must be brought there."""
        if not hasattr(node.target, "_schema"):
            return self._is_item(node)
        if info_of(node).section not in (Section.FORWARD, Section.BACKWARD):
            return False
        given = bind_arguments(node.target, node.args, node.kwargs)
        packet = node.target.overloadpacket  # type: ignore[union-attr]
        if packet is _GROUPED:
            return self._product(node, given["self"], given["mat2"], given["offs"])
        if (
            packet is aten.index
            and len(given["indices"]) == 1
            and self._entries(node, given["self"], given["indices"][0])
        ):
            return True
        if packet is aten.select and given["dim"] == 0 and self._entries(node, given["self"], given["index"]):
            return True
        if packet in (aten.index_put, aten.index_put_) and len(given["indices"]) == 1 and given["accumulate"]:
            size = given["self"].meta["val"].shape[0]
            if given["self"] not in self.found.owners and self._sums(node, given["values"], given["indices"][0], size):
                return True
        if packet in _EMPTY and self._room_for_values(node, given["self"]):
            return True
        if packet is aten.select_backward and given["dim"] == 0:
            return self._sums(node, given["grad_output"], given["index"], given["input_sizes"][0])
        return not looks_at_shapes(node) and self._passes(node)

    def _is_item(self, node: fx.Node) -> bool:
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node) or source not in self.found.owners:
            return False
        owner, dims = self.found.owners[source]
        self.found.owners[node] = (owner, (dims[node.args[1]],))  # type: ignore[index]
        return True

    def _is_split(self, node: object) -> bool:
        """Whether a value is a split parameter, perhaps seen through what leaves its first dimension alone."""
        while isinstance(node, fx.Node) and node not in self.split:
            packet = getattr(node.target, "overloadpacket", None)
            if packet not in _WEIGHT_VIEWS or (packet in (aten.transpose, aten.permute) and _moves_the_first(node)):
                return False
            node = node.args[0]
        return isinstance(node, fx.Node)

    def _note_weights(self, node: fx.Node) -> None:
        while node not in self.split:
            self.found.weights.add(node)
            node = node.args[0]  # type: ignore[assignment]

    # ------------------------------------------------------------------ where regions begin and end
    def _product(self, node: fx.Node, rows: fx.Node, other: fx.Node, ends: object) -> bool:
        owner = self.sorted.get(ends) if isinstance(ends, fx.Node) else None
        dims = len(rows.meta["val"].shape), len(other.meta["val"].shape)
        if owner is None or dims not in ((2, 3), (2, 2)) or (dims == (2, 3) and not self._is_split(other)):
            return False
        self._enter(node, rows, owner, 0 if dims == (2, 3) else 1)
        if dims == (2, 3):
            self._note_weights(other)
            self.found.owners[node] = (owner, (0,))
        else:
            self._enter(node, other, owner, 0)
        self.found.by_expert.add(node)
        return True

    def _entries(self, node: fx.Node, table: fx.Node, chosen: Any) -> bool:
        """``table[chosen]`` of a split parameter."""
        if not self._is_split(table):
            return False
        experts = table.meta["val"].shape[0]
        owner = self._sorted_by(chosen, experts, node) or self._chosen(chosen, experts)
        if owner is None:
            return False
        if owner.ends is not None:
            self._enter(node, chosen, owner, 0)
        self.found.by_expert.add(node)
        self._note_weights(table)
        by_row = isinstance(chosen, fx.Node) and isinstance(chosen.meta["val"], TensorSpec) and chosen.meta["val"].shape
        self.found.owners[node] = (owner, (0 if by_row else None,))
        return True

    def _sums(self, node: fx.Node, values: fx.Node, chosen: Any, experts: int) -> bool:
        """The gradient of ``table[chosen]``: values added up by expert."""
        owner = self._sorted_by(chosen, experts, node) or self._chosen(chosen, experts)
        inside = values in self.found.owners
        if owner is None or (not inside and owner.ends is None):
            return False
        if owner.ends is not None:
            self._enter(node, chosen, owner, 0)
        elif self.found.owners[values][0] != owner:
            return False
        self._enter(node, values, owner, 0)
        self.found.by_expert.add(node)
        return True

    def _room_for_values(self, node: fx.Node, like: fx.Node) -> bool:
        """What is about to be written, of the shape of values in a region: the copy of a gradient."""
        if like not in self.found.owners or like.meta["val"].shape != node.meta["val"].shape:
            return False
        self.found.owners[node] = self.found.owners[like]
        self.found.by_expert.add(node)
        return True

    def _sorted_by(self, ids: object, experts: int, reader: fx.Node) -> _Owner | None:
        """Whose the rows are that these sorted numbers of experts were counted for."""
        for ends, owner in self.sorted.items():
            if isinstance(ids, fx.Node) and owner.experts == experts and ends < reader and _counted(ends) is ids:
                return owner
        return None

    def _chosen(self, chosen: Any, experts: int) -> _Owner | None:
        """Whose the values of these experts are: one expert, or one a row."""
        if self.rows_go:
            return None
        if isinstance(chosen, int):
            owner = _Owner(experts, chosen=chosen % experts)
        elif isinstance(chosen, fx.Node) and isinstance(chosen.meta["val"], TensorSpec):
            spec = chosen.meta["val"]
            if spec.dtype not in (torch.int64, torch.int32) or len(spec.shape) > 1:
                return None
            owner = _Owner(experts, chosen=chosen)
        elif isinstance(chosen, fx.Node) and isinstance(chosen.meta["val"], int):  # a number that Python gives
            owner = _Owner(experts, chosen=chosen)
        else:
            return None
        return None if owner in self.refused else owner

    def _passes(self, node: fx.Node) -> bool:
        """Whether an operator with operands in a region lets their rows pass, whatever is in others'."""
        inside = {o: self.found.owners[o] for o in node.all_input_nodes if o in self.found.owners}
        if len({owner for owner, _ in inside.values()}) != 1 or not set(_UNFIT).isdisjoint(node.target.tags):  # type: ignore[union-attr]
            return False
        (owner,) = {owner for owner, _ in inside.values()}
        dims = {node: rows[0] for node, (_, rows) in inside.items()}
        if None in dims.values():
            return set(dims.values()) == {None} and self._passes_whole(node, owner, dims)
        call = OpCall(node, self.one, lambda n: _split(dims.get(n)))
        if any(operand not in inside for operand in written_arguments(node)):
            return False
        counts = {n.meta["val"].shape[d] for n, d in dims.items()}
        if len(counts) != 1:
            return False
        (count,) = counts
        for layout in layouts_of(call) or []:
            pairs = list(zip(call.operands, layout.inputs, call.current, strict=True))
            kept = all(want == have for o, want, have in pairs if o in inside)
            outputs = zip(call.outputs, layout.outputs, strict=False)
            # a view may divide rows into groups: what a group is, no mark knows
            rows = [p.dim for v, p in outputs if isinstance(p, Shard) and p.outer == 1 and v.shape[p.dim] == count]
            own_program = layout.emit is not None and call.op.overloadpacket not in _ROW_BY_ROW
            if not kept or len(rows) != len(call.outputs) or own_program:
                continue
            for operand, want, _ in pairs:
                if operand not in inside and isinstance(want, Shard):
                    self._enter(node, operand, owner, want.dim)
            self.found.owners[node] = (owner, tuple(rows))
            return True
        return False

    def _passes_whole(self, node: fx.Node, owner: _Owner, inside: dict[fx.Node, int | None]) -> bool:
        """As :meth:`_passes` where all is one expert's: anything may be made of it but what adds it to others'."""
        outputs = node.meta["val"] if isinstance(node.meta["val"], (tuple, list)) else [node.meta["val"]]
        packet = node.target.overloadpacket  # type: ignore[union-attr]
        adds = packet in _ADDING or (packet in _SUMS and not self.sums.isdisjoint(node.all_input_nodes))
        if adds or not all(isinstance(v, TensorSpec) for v in outputs):
            return False
        if any(operand not in inside for operand in written_arguments(node)):
            return False
        self.found.owners[node] = (owner, (None,) * len(outputs))
        return True

    def _enter(self, reader: fx.Node, operand: fx.Node, owner: _Owner, dim: int) -> None:
        if operand in self.found.owners:
            if self.found.owners[operand][0] == owner:
                return
            self._leave(reader, [operand])
        if owner.ends is not None:  # to chosen experts nothing is brought: rows are where they are
            self.found.entering[reader, operand] = (owner, dim)

    def _leave(self, reader: fx.Node, operands: Sequence[fx.Node]) -> None:
        for operand in operands:
            if operand not in self.found.owners:
                continue
            owner, dims = self.found.owners[operand]
            sees = self.storage.roots[reader] is self.storage.roots[operand]
            if operand in written_arguments(reader) or (sees and self.storage.roots[reader] in self.storage.written):
                raise _Refused(owner)
            self.found.leaving[reader, operand] = (owner, dims[0])


def looks_at_shapes(node: fx.Node) -> bool:
    """Whether a node makes something new of which its operands' elements say nothing."""
    return getattr(node.target, "overloadpacket", None) in _NEW


def _adds(node: fx.Node) -> bool:
    return getattr(node.target, "overloadpacket", None) in (*_SUMS, *_ADDING)


def _split(dim: int | None) -> Placement:
    return REPLICATE if dim is None else Shard(dim)


def _moves_the_first(node: fx.Node) -> bool:
    """Whether a transposition or permutation moves dimension 0."""
    if node.target is aten.permute.default:
        return node.args[1][0] != 0  # type: ignore[index]
    ndim = len(node.meta["val"].shape)
    moved = {dim % ndim for dim in node.args[1:] if isinstance(dim, int)}
    return 0 in moved and len(moved) > 1


def _counted(ends: fx.Node) -> fx.Node | None:
    """The numbers of experts that ends of rows were counted from."""
    experts = ends.meta["val"].shape[0]
    if ends.target is not aten.cumsum.default:
        return None
    counts = _uncast(ends.args[0])
    if counts is None or getattr(counts.target, "overloadpacket", None) not in _COUNTS:
        return None
    if counts.target is aten.histc.default and list(counts.args[1:]) != [experts, 0, experts - 1]:
        return None
    return _uncast(counts.args[0])


def _uncast(node: object) -> fx.Node | None:
    while isinstance(node, fx.Node) and getattr(node.target, "overloadpacket", None) in _CASTS:
        node = node.args[0]
    return node if isinstance(node, fx.Node) else None


def _marked(graph: fx.Graph, regions: _Regions, axis: ShardAxis) -> fx.Graph:
    """A copy of the graph with the marks."""
    copies: dict[fx.Node, fx.Node] = {}
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, copies))
    copies[graph.output_node()] = copy.output_node()
    marks = _Marks(copies, Aliasing.of(graph), axis)
    now = {(reader, operand): copies[operand] for reader, operand in [*regions.leaving, *regions.entering]}
    for comes_back, changes in ((True, regions.leaving), (False, regions.entering)):
        for (reader, operand), (owner, dim) in changes.items():
            source = now[reader, operand]
            with copy.inserting_before(copies[reader]):
                mark = marks.of(source, operand, owner, dim, reader, comes_back=comes_back)
            copies[reader].replace_input_with(source, mark)
            now[reader, operand] = mark
    for key, nodes in ((BY_EXPERT, regions.by_expert), (EXPERT_WEIGHTS, regions.weights)):
        for node in nodes:
            copies[node].meta[key] = axis.name
    return copy


@dataclass
class _Marks:
    """The marks of a graph. What goes to the same experts again, or follows from what is there, does not go twice.

    Args:
        copies: the nodes of the copied graph by those of the first.
        storage: what is known of the first graph's storages.
        axis: for which the marks are.
    """

    copies: dict[fx.Node, fx.Node]
    storage: Aliasing
    axis: ShardAxis
    made: dict[tuple[fx.Node, _Owner, int | None, bool], fx.Node] = field(
        default_factory=dict[tuple[fx.Node, _Owner, "int | None", bool], fx.Node]
    )

    def of(
        self, source: fx.Node, operand: fx.Node, owner: _Owner, dim: int | None, reader: fx.Node, *, comes_back: bool
    ) -> fx.Node:
        """The mark of ``source``, which is ``operand`` in the first graph or was made of it."""
        lasts = source is self.copies[operand] and self.storage.roots[operand] not in self.storage.written
        known = self._known(operand, owner, dim, comes_back=comes_back) if lasts else None
        if known is None:
            target, arguments = _mark(owner, dim, operand, self.copies, comes_back=comes_back)
            known = source.graph.call_function(target, (source, *arguments, self.axis.name))
            spec = operand.meta["val"]
            value = TensorSpec(spec.shape, row_major(spec.shape), spec.dtype, spec.device)
            known.meta.update(info=info_of(operand if comes_back else reader), val=value)
            if lasts:
                self.made[operand, owner, dim, comes_back] = known
        return known

    def _known(self, operand: fx.Node, owner: _Owner, dim: int | None, *, comes_back: bool) -> fx.Node | None:
        known = self.made.get((operand, owner, dim, comes_back))
        if known is not None or comes_back or dim is None or owner.ends is None:
            return known
        if operand.target is aten.transpose.int and len(operand.meta["val"].shape) == 2:
            other = self._known(operand.args[0], owner, 1 - dim, comes_back=False)  # type: ignore[arg-type]
            return None if other is None else self._made_again(operand, owner, dim, {operand.args[0]: other})  # type: ignore[dict-item]
        tags = set(getattr(operand.target, "tags", ()))
        if torch.Tag.pointwise not in tags or not tags.isdisjoint(_UNFIT) or written_arguments(operand):
            return None
        rows = len(operand.meta["val"].shape), operand.meta["val"].shape[dim]
        there: dict[fx.Node, fx.Node] = {}
        for given in operand.all_input_nodes:
            spec = given.meta["val"]
            is_rows = isinstance(spec, TensorSpec) and len(spec.shape) == rows[0] and spec.shape[dim] == rows[1]
            other = self._known(given, owner, dim, comes_back=False) if is_rows else None
            if other is None or self.storage.roots[given] in self.storage.written:
                return None
            there[given] = other
        return self._made_again(operand, owner, dim, there) if there else None

    def _made_again(self, operand: fx.Node, owner: _Owner, dim: int, there: dict[fx.Node, fx.Node]) -> fx.Node:
        """The same operator on what is with the experts."""
        again = first(there.values(), "value with the experts").graph.node_copy(operand, there.__getitem__)
        again.meta = dict(operand.meta)
        self.made[operand, owner, dim, False] = again
        return again


def _mark(
    owner: _Owner, dim: int | None, operand: fx.Node, copies: dict[fx.Node, fx.Node], *, comes_back: bool
) -> tuple[Any, tuple[Any, ...]]:
    """The operator of a mark and its arguments behind the first; a number that Python gives is made a tensor."""
    if owner.ends is not None:
        return FROM_EXPERTS if comes_back else TO_EXPERTS, (copies[owner.ends], dim)
    if isinstance(owner.chosen, fx.Node):
        chosen = copies[owner.chosen]
        if not isinstance(owner.chosen.meta["val"], TensorSpec):
            device = operand.meta["val"].device
            number = chosen.graph.call_function(
                aten.scalar_tensor.default, (chosen,), {"dtype": torch.int64, "device": device}
            )
            number.meta.update(info=info_of(operand), val=TensorSpec((), (), torch.int64, device))
            chosen = number
        return FROM_CHOSEN, (chosen, dim, owner.experts)
    return FROM_EXPERT, (owner.chosen, owner.experts)
