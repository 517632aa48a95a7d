"""Experts split over a tensor axis: how marked operators (``regions``) lie, and what they are on a rank.

Values in a region are the rank's ``Own`` on the axis, of all rows' size. Of rows sorted by expert a rank has its own in
front, so that a grouped product with its experts' weights reads these alone; what is behind them means nothing, may be
no number at all, and is zero once the rows are back. No size depends on how many rows an expert gets: nothing is
dropped, nothing is padded, Python is asked nothing.
"""

from __future__ import annotations

import torch
from torch import fx

from lightning_spmd.ir.expert_rows import FROM_CHOSEN, FROM_EXPERT, FROM_EXPERTS, TO_EXPERTS
from lightning_spmd.ir.node_info import SHARE
from lightning_spmd.ir.placement import OWN, PARTIAL, REPLICATE, Own, Placement, Shard
from lightning_spmd.stages.expand.call import Emit, Layout, LocalCall, OpCall
from lightning_spmd.stages.expand.collectives.redistribute import zero_unless
from lightning_spmd.stages.expand.collectives.reduce_scatter import rank_dependent_slice
from lightning_spmd.stages.expand.experts.regions import BY_EXPERT, looks_at_shapes

aten = torch.ops.aten


def layout_by_expert(call: OpCall) -> Layout | None:
    """The layout of a mark on the axis that it is for, and of an operator inside a region; None for any other."""
    if call.op in _MARKS:
        return _layout_of_mark(call) if call["axis"] == call.axis.name else None
    own = [isinstance(placement, Own) for placement in call.current]
    inputs: list[Placement] = [OWN if mine else REPLICATE for mine in own]
    if call.node.meta.get(BY_EXPERT) == call.axis.name:
        return _layout_with_entries(call, inputs)
    if not any(own):
        return None
    if looks_at_shapes(call.node):
        return Layout(tuple(inputs), (REPLICATE,))
    return Layout(tuple(inputs), (OWN,) * max(len(call.outputs), 1))


def _layout_of_mark(call: OpCall) -> Layout:
    others = (REPLICATE,) * (len(call.operands) - 1)
    if call.op is TO_EXPERTS:
        return Layout((REPLICATE, *others), (OWN,), _emit_to)
    return Layout((OWN, *others), (PARTIAL,), _MARKS[call.op])


def _layout_with_entries(call: OpCall, inputs: list[Placement]) -> Layout:
    """Of what has one entry an expert each rank reads, or makes, its own."""
    packet = call.op.overloadpacket
    if packet is aten._grouped_mm:
        weight = call.index("mat2")
        if weight is not None and inputs[weight] != OWN:
            inputs[weight] = Shard(0)
            return Layout(tuple(inputs), (OWN,), _emit_product)
        return Layout(tuple(inputs), (Shard(0),), _emit_product)
    if looks_at_shapes(call.node):
        return Layout(tuple(inputs), (OWN,))
    if packet is aten.select_backward:
        return Layout(tuple(inputs), (Shard(0),), _emit_selected_gradient)
    inputs[0] = Shard(0)
    if packet is aten.select:
        return Layout(tuple(inputs), (OWN,), _emit_selected)
    if packet is aten.index:
        return Layout(tuple(inputs), (OWN,), _emit_entries)
    return Layout(tuple(inputs), (Shard(0),), _emit_sums)


# ---------------------------------------------------------------- rows sorted by expert
def _own_experts(call: LocalCall, emit: Emit, experts: int) -> tuple[int, int]:
    """The first of this rank's experts and the one behind its last."""
    (axis,) = call.emitting_axes(emit)
    ((start, length),) = axis.pieces(experts)
    return start, start + length


def _bounds(call: LocalCall, emit: Emit, ends: fx.Node) -> fx.Node:
    """Where the first of this rank's experts' rows begins, and the ends of each of them."""
    (experts,) = call.program.shape(ends)
    start, end = _own_experts(call, emit, experts)
    zero = call.call(aten.new_zeros.default, ends, [1])
    starts = call.call(aten.cat.default, [zero, ends])
    return rank_dependent_slice(call.program, starts, 0, start, end + 1 - start)


def _emit_to(call: LocalCall) -> list[fx.Node | None]:
    """All rows, beginning with those of this rank's experts."""
    rows, dim = call["rows"], call["dim"]
    count = call.program.shape(rows)[dim]
    first = call.call(aten.select.int, _bounds(call, _emit_to, call["ends"]), 0, 0)
    numbers = call.call(aten.arange.default, count, device=call.program.spec(rows).device)
    order = call.call(aten.remainder.Scalar, call.call(aten.add.Tensor, numbers, first), max(count, 1))
    return [call.call(aten.index_select.default, rows, dim, order)]


def _emit_from(call: LocalCall) -> list[fx.Node | None]:
    """The rank's own rows where they were, zeros elsewhere."""
    rows, dim = call["rows"], call["dim"]
    shape = call.program.shape(rows)
    bounds = _bounds(call, _emit_from, call["ends"])
    first, last = call.call(aten.select.int, bounds, 0, 0), call.call(aten.select.int, bounds, 0, -1)
    numbers = call.call(aten.arange.default, shape[dim], device=call.program.spec(rows).device)
    order = call.call(aten.remainder.Scalar, call.call(aten.sub.Tensor, numbers, first), max(shape[dim], 1))
    back = call.call(aten.index_select.default, rows, dim, order)
    before, behind = call.call(aten.lt.Tensor, numbers, first), call.call(aten.ge.Tensor, numbers, last)
    return [_zeros_where(call, back, call.call(aten.logical_or.default, before, behind), dim)]


def _zeros_where(call: LocalCall, rows: fx.Node, others: fx.Node, dim: int) -> fx.Node:
    shape = call.program.shape(rows)
    column = call.call(aten.view.default, others, [size if d == dim else 1 for d, size in enumerate(shape)])
    return call.call(aten.masked_fill.Scalar, rows, column, 0)


def _emit_product(call: LocalCall) -> list[fx.Node | None]:
    """The product with this rank's experts alone; its rows come first."""
    bounds = _bounds(call, _emit_product, call["offs"])
    first = call.call(aten.select.int, bounds, 0, 0)
    ends = call.call(aten.slice.Tensor, bounds, 0, 1, 2**63 - 1)
    product = call.default(offs=call.call(aten.sub.Tensor, ends, first))
    product.meta[SHARE] = call.program.shape(ends)[0] / call.spec("offs").shape[0]
    return [product]


# ---------------------------------------------------------------- chosen experts
def _places(call: LocalCall, emit: Emit, ids: fx.Node, experts: int) -> tuple[fx.Node, fx.Node]:
    """(the place of each expert among this rank's, or some other place; whether it is none of them)."""
    start, end = _own_experts(call, emit, experts)
    numbers = call.call(aten.remainder.Scalar, ids, experts)  # from the end, as in `w[-1]`
    place = call.call(aten.sub.Tensor, numbers, start)
    place.meta["rank_dependent"] = True
    entry = call.call(aten.clamp.default, place, 0, end - start - 1)
    return entry, call.call(aten.ne.Tensor, entry, place)


def _emit_chosen(call: LocalCall) -> list[fx.Node | None]:
    """What is made of this rank's experts, zeros elsewhere."""
    rows, dim = call["rows"], call["dim"]
    _, others = _places(call, _emit_chosen, call["ids"], call["experts"])
    if dim is None:
        return [call.call(aten.masked_fill.Scalar, rows, others, 0)]
    return [_zeros_where(call, rows, others, dim)]


def _emit_of_one(call: LocalCall) -> list[fx.Node | None]:
    """What is made of one expert on its rank, zeros on the others."""
    start, end = _own_experts(call, _emit_of_one, call["experts"])
    return [zero_unless(call.program, call["rows"], start <= call["expert"] < end)]


def _emit_entries(call: LocalCall) -> list[fx.Node | None]:
    """``table[ids]`` of this rank's part of the table."""
    (ids,) = call["indices"]
    entries, _ = _places(call, _emit_entries, ids, call.spec("self").shape[0])
    return [call.default(indices=[entries])]


def _emit_sums(call: LocalCall) -> list[fx.Node | None]:
    """Rows added to their entries in this rank's part of the table."""
    (ids,) = call["indices"]
    entries, others = _places(call, _emit_sums, ids, call.spec("self").shape[0])
    values = call["values"]
    if call.program.shape(ids):
        values = _zeros_where(call, values, others, 0)
    else:
        values = call.call(aten.masked_fill.Scalar, values, others, 0)
    return [call.default(indices=[entries], values=values)]


def _emit_selected(call: LocalCall) -> list[fx.Node | None]:
    """``table[e]``, or some other entry where ``e`` is another rank's."""
    experts = call.spec("self").shape[0]
    if isinstance(call["index"], fx.Node):
        entry, _ = _places_of_number(call, _emit_selected, experts)
        return [call.call(aten.squeeze.dim, call.call(aten.index_select.default, call["self"], 0, entry), 0)]
    start, end = _own_experts(call, _emit_selected, experts)
    selected = call.default(index=min(max(call["index"] % experts - start, 0), end - start - 1))
    selected.meta["rank_dependent"] = True
    return [selected]


def _emit_selected_gradient(call: LocalCall) -> list[fx.Node | None]:
    """One entry among zeros, and zeros alone where it is another rank's."""
    experts, *rest = call["input_sizes"]
    start, end = _own_experts(call, _emit_selected_gradient, experts)
    gradient = call["grad_output"]
    if isinstance(call["index"], fx.Node):
        entry, others = _places_of_number(call, _emit_selected_gradient, experts)
        gradient = call.call(aten.unsqueeze.default, gradient, 0)
        gradient = _zeros_where(call, gradient, others, 0)
        return [
            call.call(
                aten.index_put.default,
                call.call(aten.new_zeros.default, gradient, [end - start, *rest]),
                [entry],
                gradient,
            )
        ]
    place = call["index"] % experts - start
    gradient = zero_unless(call.program, gradient, 0 <= place < end - start)
    whole = call.default(
        grad_output=gradient, input_sizes=[end - start, *rest], index=min(max(place, 0), end - start - 1)
    )
    whole.meta["rank_dependent"] = True
    return [whole]


def _places_of_number(call: LocalCall, emit: Emit, experts: int) -> tuple[fx.Node, fx.Node]:
    """As :func:`_places`, of a number that Python gives, as a tensor of one element."""
    device = call.outputs[0].device
    number = call.call(aten.scalar_tensor.default, call["index"], dtype=torch.int64, device=device)
    return _places(call, emit, call.call(aten.view.default, number, [1]), experts)


_MARKS = {TO_EXPERTS: _emit_to, FROM_EXPERTS: _emit_from, FROM_CHOSEN: _emit_chosen, FROM_EXPERT: _emit_of_one}
