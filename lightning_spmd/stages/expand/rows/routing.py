"""Mixture-of-experts routing: rows are sorted, worked on and put back by every rank on its own.

::

    ids, order = sort(expert of each row)          each rank sorts its own rows
    x = rows[order]                                "bag": this rank's rows in an order of its own
    counts = histc(ids);  ends = counts.cumsum()   partial sums: each rank's own counts
    y = grouped_mm(x, weights, ends)               a bag again; the weights' gradient is a partial sum
    inverse[order] = arange(n)                     where each row went
    out = y[inverse]                               rows in their own order: an ordinary split tensor

A bag's global order differs from the one-device program's, which nothing can see as long as bags meet only bags of the
same sort, replicated values, and the operations above. Propagation follows every value that depends on the order; one
use outside this list, and the sort is done on gathered rows as any other.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import fx

from lightning_spmd.ir.expert_rows import FROM_EXPERTS, TO_EXPERTS
from lightning_spmd.ir.first import first
from lightning_spmd.ir.placement import BROUGHT, PARTIAL, REPLICATE, Placement, Shard
from lightning_spmd.stages.expand.call import Layout, LocalCall, OpCall
from lightning_spmd.stages.expand.experts.exchanged_experts import (
    layout_of_coming_back,
    layout_of_entries,
    layout_of_going,
    layout_of_product,
    layout_of_sums,
    reads_entries,
)
from lightning_spmd.stages.expand.rules import layouts_of
from lightning_spmd.stages.expand.rules.indexing import is_row_numbers

aten = torch.ops.aten
_SORTS = (aten.sort, aten.argsort)
# local programs of their own, for a rank with a single row, that do not look at the rows' order
_ROW_BY_ROW = (aten.squeeze, aten.squeeze_copy)
_COPIES = (aten.clone, aten._to_copy, aten.empty_like)


class Order(enum.Enum):
    """How a value depends on the order of the sorted rows."""

    BAG = enum.auto()
    """its rows are in sorted order"""
    POSITIONS = enum.auto()
    """in sorted order, holds which row each came from"""
    INVERSE = enum.auto()
    """in the rows' own order, holds where each went"""
    OPAQUE = enum.auto()
    """must not be read"""
    FOUND = enum.auto()
    """of rows that values choose, has a column of positions"""


@dataclass(frozen=True)
class Routed:
    """A value inside a routed region.

    Args:
        order: how it depends on the order of the rows.
        sort: the sort it stems from.
        rows: how many rows it points into.
        where: how the rows lie: split over the axis, perhaps in blocks (positions of sequences, by sequence).
        into: how that lies which positions of chosen rows point into, as its first dimension.
        column: which column has these positions.
        home: of rows that are with their experts, how they lie when they are back.
    """

    order: Order
    sort: fx.Node
    rows: int
    where: Shard
    into: Shard | None = None
    column: int = 0
    home: Shard | None = None


@dataclass(frozen=True)
class Route:
    """How one operator of a region runs: its layout, and what its outputs are (None: an ordinary value)."""

    layout: Layout
    outputs: tuple[Routed | None, ...]


def begins_routing(call: OpCall) -> bool:
    """Whether this sorts integers along the one split dimension."""
    if call.op.overloadpacket not in _SORTS or not call.current:
        return False
    spec = call.specs[0]
    return _splits_rows(call.current[0]) and len(spec.shape) == 1 and not spec.dtype.is_floating_point


def _splits_rows(placement: Placement) -> bool:
    return isinstance(placement, Shard) and placement.dim == 0


def begin(call: OpCall) -> Route:
    """Sort the rank's own rows."""
    rows, where = call.specs[0].shape[0], call.current[0]
    if not isinstance(where, Shard):
        raise TypeError(f"rows that lie as {where}")
    bag, positions = (Routed(order, call.node, rows, where) for order in (Order.BAG, Order.POSITIONS))
    outputs = (bag, positions) if len(call.outputs) == 2 else (positions,)
    return Route(Layout((where,), (where,) * len(outputs)), outputs)


def route(call: OpCall, known: Mapping[int, Routed]) -> Route | None:
    """How an operator with routed operands runs on the rank's own rows, or None if the order could be seen.

    Args:
        call: the call; its current placements are those of the operands.
        known: the routed operands, by position.
    """
    (sort, *others) = {r.sort for r in known.values()}
    if others or any(r.order is Order.OPAQUE for r in known.values()):
        return None
    packet = call.op.overloadpacket
    name = packet.__name__
    if name == "index" and call.index("indices") in known:
        return _read(call, known)
    if name in ("index_put", "index_put_") and call.index("indices") in known:
        return _write(call, known, sort)
    if name in ("histc", "bincount") and known[0].order is Order.BAG:
        return Route(Layout((known[0].where,), (PARTIAL,)), (None,))
    if "grouped_mm" in name:
        return _grouped(call, known)
    if call.op in (TO_EXPERTS, FROM_EXPERTS):
        mine = call["axis"] == call.axis.name
        return _to_experts_and_back(call, known) if mine else _to_other_ranks(call, known)
    first = known.get(0)
    if first is not None and first.order is Order.POSITIONS:
        return _positions(call, first)
    return _inside(call, known)


def _positions(call: OpCall, first: Routed) -> Route | None:
    packet, one = call.op.overloadpacket, Layout((first.where,), (first.where,))
    if packet in _COPIES and len(call.operands) == 1:
        return Route(one, (replace(first, order=Order.BAG) if packet is aten.empty_like else first,))
    if packet is aten.floor_divide and isinstance(call["other"], int) and len(call.operands) == 1:
        per_row = call["other"]
        if per_row > 0 and first.rows % per_row == 0 and call.axis.splits(first.rows // per_row, first.where.outer):
            return Route(one, (replace(first, rows=first.rows // per_row),))
    if packet in _SORTS and len(call.outputs[0].shape) == 1:
        opaque, inverse = replace(first, order=Order.OPAQUE), replace(first, order=Order.INVERSE)
        outputs = (opaque, inverse) if len(call.outputs) == 2 else (inverse,)
        return Route(Layout(one.inputs, one.outputs * len(outputs)), outputs)
    return None


def _read(call: OpCall, known: Mapping[int, Routed]) -> Route | None:
    """``rows[positions]`` gives a bag, ``bag[inverse]`` rows, ``table[bag]`` a bag."""
    at = call.index("indices")
    if at is None or len(call.operands) != 2 or len(call.specs[at].shape) != 1 or len(call["indices"]) != 1:
        return None
    index, source = known[at], known.get(0)
    bag, where = replace(index, order=Order.BAG, rows=call.specs[at].shape[0]), index.where
    own = call.specs[0].shape[0] == index.rows
    if index.order is Order.POSITIONS and source is None and own and call.current[0] == where:
        return Route(Layout((where, where), (where,)), (bag,))
    if index.order is Order.INVERSE and source is not None and source.order is Order.BAG and own:
        return Route(Layout((where, where), (where,)), (None,))
    if index.home is not None:
        fits = index.order is Order.BAG and source is None and reads_entries(call)
        return Route(layout_of_entries(call), (bag,)) if fits else None
    if index.order is Order.BAG and source is None and call.current[0] == REPLICATE:
        return Route(Layout((REPLICATE, where), (where,)), (bag,))
    return None


def _emit_own_positions(call: LocalCall) -> list[fx.Node | None]:
    """``inverse[positions] = arange(n)`` with the rank's own row numbers."""
    value = call["values"].meta["val"]
    own = call.call(aten.arange.default, value.shape[0], dtype=value.dtype, device=value.device)
    own.meta["rank_dependent"] = any(not axis.is_even for axis in call.program.axes)
    return [call.default(values=own)]


def _write(call: OpCall, known: Mapping[int, Routed], sort: fx.Node) -> Route | None:
    """``zeros[positions] += bag``: rows; ``zeros[inverse] += rows``: a bag; ``x[positions] = arange``: the inverse."""
    at, source = call.index("indices"), call.index("values")
    if at is None or source is None or len(call.operands) != 3 or len(call["indices"]) != 1:
        return None
    index, values, target = known[at], known.get(source), known.get(0)
    count, where = call.specs[at].shape[0], index.where
    if index.order is Order.BAG:  # the gradient of a table that each row reads at its own entry
        both = values is not None and values.order is Order.BAG and target is None and call["accumulate"]
        if index.home is not None:
            return Route(layout_of_sums(call), (None,)) if both and reads_entries(call) else None
        return Route(Layout((PARTIAL, where, where), (PARTIAL,)), (None,)) if both else None
    if call.specs[0].shape[0] != index.rows or call.specs[source].shape[:1] != (count,):
        return None
    plain = Layout((where,) * 3, (where,))
    fresh = target is None and call.op.overloadpacket.__name__ == "index_put"
    if index.order is Order.POSITIONS and values is not None and values.order is Order.BAG and fresh:
        return (
            Route(plain, (None,)) if isinstance(call.current[0], type(REPLICATE)) or call.current[0] == where else None
        )
    if index.order is Order.INVERSE and values is None and call.current[source] == where and fresh:
        return Route(plain, (Routed(Order.BAG, sort, count, where),))
    numbers = values is None and isinstance(call["values"], fx.Node) and is_row_numbers(call["values"], count)
    if index.order is Order.POSITIONS and numbers and index.rows == count and call.current[0] == where:
        layout = Layout((where,) * 3, (where,), _emit_own_positions)
        return Route(layout, (Routed(Order.INVERSE, sort, count, where),))
    return None


def _grouped(call: OpCall, known: Mapping[int, Routed]) -> Route | None:
    """Products of a bag with one matrix a group, the groups' ends being this rank's own (a partial sum)."""
    ends = call.index("offs")
    bags = all(r.order is Order.BAG for r in known.values())
    if ends is None or call.current[ends] != PARTIAL or not bags:
        return None
    bag = first(known.values(), "bag of rows")
    if bag.home is not None:
        gives_weights = len(call.shape) == 3
        fits = call.op.overloadpacket is aten._grouped_mm and set(known) == ({0, 1} if gives_weights else {0})
        return Route(layout_of_product(call, set(known)), (None if gives_weights else bag,)) if fits else None
    inputs: list[Placement] = [REPLICATE] * len(call.operands)
    inputs[ends] = PARTIAL
    for i in known:
        inputs[i] = call.current[i]
    outputs: list[Placement] = []
    for spec in call.outputs:
        grouped = len(spec.shape) == 3  # a gradient of the weights: one matrix a group, summed over the rows
        outputs.append(PARTIAL if grouped else bag.where)
    both_bags = call.op.overloadpacket.__name__ == "_grouped_mm" and {0, 1} <= set(known)
    weights_whole = (
        call.op.overloadpacket.__name__ == "_grouped_mm" and set(known) == {0} and call.current[0] == bag.where
    )
    if call.op.overloadpacket.__name__ == "_grouped_mm" and not (both_bags or weights_whole):
        return None
    routed = tuple(bag if p == bag.where else None for p in outputs)
    return Route(Layout(tuple(inputs), tuple(outputs)), routed)


def _to_other_ranks(call: OpCall, known: Mapping[int, Routed]) -> Route | None:
    """A bag whose rows go to the experts of another axis, as many as this rank's own counts say."""
    bag = known.get(0)
    known_rows = bag is not None and set(known) == {0} and bag.order is Order.BAG
    if not known_rows or call.current[1] != PARTIAL:
        return None
    return Route(Layout((call.current[0], PARTIAL), (call.current[0],)), (bag,))


def _to_experts_and_back(call: OpCall, known: Mapping[int, Routed]) -> Route | None:
    """A bag of this axis' ranks goes to the ranks that have its experts, and what becomes of it comes back."""
    bag = known.get(0)
    if bag is None or set(known) != {0} or bag.order is not Order.BAG or call.current[1] != PARTIAL:
        return None
    if call.op is TO_EXPERTS:
        if bag.home is not None:
            return None
        return Route(layout_of_going(call), (replace(bag, where=Shard(0, BROUGHT), home=bag.where),))
    if bag.home is None:
        return None
    return Route(layout_of_coming_back(call, bag.home), (replace(bag, where=bag.home, home=None),))


def _inside(call: OpCall, known: Mapping[int, Routed]) -> Route | None:
    """Any operator whose rule lets the bags' split dimension pass and takes nothing else split along with it."""
    if any(r.order is not Order.BAG for r in known.values()):
        return None
    for layout in layouts_of(call) or []:
        fits = all(
            p == call.current[i] if i in known else not isinstance(p, Shard) and p == call.current[i]
            for i, p in enumerate(layout.inputs)
        )
        if fits and (layout.emit is None or call.op.overloadpacket in _ROW_BY_ROW):
            bag = first(known.values(), "bag of rows")
            return Route(layout, tuple(bag if isinstance(p, Shard) else None for p in layout.outputs))
    return None
