"""Experts split over ranks with tokens of their own: rows go to the ranks of their experts and come back.

::

    own rows, by expert ──all-to-all──► rows of all neighbours, by expert ──products, activations──► the same
    own rows, by expert ◄──all-to-all────────────────────────────────────────────────────────────────────┘

Neighbours are the data-parallel ranks that together hold all experts once. Each sends as many rows as its router says:
nothing is dropped, nothing is padded on the way. A rank has room for the rows of all neighbours
(``Shard(d, Brought)``), since all may go to its experts; what came lies in front. Numbers of rows by expert are
gathered once for each routing, and read on the host before the first exchange of a layer; its other exchanges, forward
and backward, know them.

Weights are chunks by expert. Their gradients are sums over the rows of all neighbours, and are reduced over the other
ranks with the same experts.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import fx

from lightning_spmd.ir.expert_rows import ROWS_BY_EXPERT, ROWS_BY_RANK, ROWS_BY_SOURCE
from lightning_spmd.ir.node_info import BALANCED, SHARE, Section, info_of, named
from lightning_spmd.ir.placement import BROUGHT, CHUNK, OWN, PARTIAL, Shard, ShardAxis
from lightning_spmd.ir.signature import InputRole, Signature
from lightning_spmd.stages.expand.axis_plan import AxisPlan
from lightning_spmd.stages.expand.call import Emit, Layout, LocalCall, OpCall
from lightning_spmd.stages.expand.collectives.reduce_scatter import rank_dependent_slice
from lightning_spmd.stages.expand.experts.regions import BY_EXPERT, EXPERT_WEIGHTS

aten = torch.ops.aten
_functional = torch.ops._c10d_functional


@dataclass(frozen=True)
class Trip:
    """What the ranks of a neighbourhood know of a routing.

    Args:
        counts: rows by the rank that they come from and by their expert, in the host's memory.
        sent: how many rows this rank sends to each.
        got: how many it gets from each.
        ends: of the rows that came, the ends of those of each expert of this rank.
    """

    counts: fx.Node
    sent: fx.Node
    got: fx.Node
    ends: fx.Node


def layout_of_going(call: OpCall) -> Layout:
    """Own rows, sorted by expert, go to their experts."""
    where = call.current[0]
    if not isinstance(where, Shard):
        raise TypeError(f"rows that lie as {where}")
    return Layout((where, PARTIAL), (Shard(where.dim, BROUGHT),), _emit_going)


def layout_of_coming_back(call: OpCall, home: Shard) -> Layout:
    """Rows come back to the ranks that they are from, where they lay as ``home`` says."""
    where = call.current[0]
    if not isinstance(where, Shard):
        raise TypeError(f"rows that lie as {where}")
    return Layout((where, PARTIAL), (Shard(where.dim, home.outer),), _emit_coming_back)


def layout_of_product(call: OpCall, rows: set[int]) -> Layout:
    """A grouped product of brought rows with this rank's experts, or the gradient of their weights.

    Args:
        call: the product.
        rows: which of its operands are brought.
    """
    inputs = [call.current[i] if i in rows else CHUNK for i in range(len(call.operands))]
    ends = call.index("offs")
    inputs[-1 if ends is None else ends] = PARTIAL
    gives_weights = len(call.shape) == 3
    return Layout(tuple(inputs), (CHUNK if gives_weights else Shard(0, BROUGHT),), _emit_product)


def reads_entries(call: OpCall) -> bool:
    """Whether this reads, or sums up, entries of what has one entry an expert."""
    return call.node.meta.get(BY_EXPERT) == call.axis.name


def layout_of_entries(call: OpCall) -> Layout:
    """``table[ids]`` of brought numbers of experts."""
    where = Shard(0, BROUGHT)
    return Layout((CHUNK, where), (where,), _emit_entries)


def layout_of_sums(call: OpCall) -> Layout:
    """``zeros[ids] += rows`` of brought rows: a gradient by expert."""
    where = Shard(0, BROUGHT)
    return Layout((CHUNK, where, where), (CHUNK,), _emit_sums)


def gathered_experts(graph: fx.Graph, signature: Signature, found: AxisPlan, names: Collection[str]) -> list[str]:
    """A line for each place that reads experts which must be gathered for it.

    Args:
        graph: the global graph.
        signature: its signature.
        found: the placements along the axis.
        names: the parameters that are in chunks by expert.
    """
    lines: list[str] = []
    for node, entry in zip(graph.find_nodes(op="placeholder"), signature.inputs, strict=True):
        if entry.role is not InputRole.PARAMETER or entry.key[0] not in names:
            continue
        seen = [node]
        for value in seen:
            for reader in value.users:
                layout = found.layouts.get(reader)
                if layout is None or info_of(reader).section not in (Section.FORWARD, Section.BACKWARD):
                    continue
                if layout.inputs[found.operands[reader].index(value)] == CHUNK:
                    seen += [reader] if reader.meta.get(EXPERT_WEIGHTS) == found.axis.name else []
                    continue
                lines.append(
                    f"{named(reader)} reads {entry.key[0]!r} where no rows can be brought to their experts: it is "
                    f"gathered over {found.axis.name}, {entry.value.bytes} bytes a step; sort rows by expert, multiply "
                    "them by `torch._grouped_mm` and put them back as Hugging Face's 'grouped_mm' does, or leave the "
                    "module out of expert_parallel_plan"
                )
                break
    return lines


# ---------------------------------------------------------------- local programs
def _asking(call: LocalCall, emit: Emit) -> ShardAxis:
    """The axis whose layout asked for a program."""
    (axis,) = (a for a, layout in zip(call.program.axes, call.layouts, strict=True) if layout.emit is emit)
    return axis


def _trip(call: LocalCall, axis: ShardAxis, argument: str) -> Trip:
    """What is known of the rows with the ends that an argument gives."""
    known = call.program.trips.get((call.globals[argument], axis.name))
    if not isinstance(known, Trip):
        raise TypeError(f"{call.op} before any row went to its expert")
    return known


def _first_trip(call: LocalCall, axis: ShardAxis, rows: int) -> Trip:
    """What is to be known of so many own rows before they go: found out once for each routing."""
    program, ranks, ends = call.program, axis.chunks, call["ends"]
    key, spec = (call.globals["ends"], axis.name), program.spec(ends)
    known = program.trips.get(key)
    if isinstance(known, Trip):
        return known
    (experts,) = spec.shape
    here = experts // ranks.size
    last = call.call(aten.new_full.default, ends, [1], rows)
    starts = call.call(aten.cat.default, [call.call(aten.new_zeros.default, ends, [1]), ends])
    counts = call.call(aten.sub.Tensor, call.call(aten.cat.default, [ends, last]), starts)
    gather, size = _functional.all_gather_into_tensor.default, ranks.size * (experts + 1)
    program.subject = "numbers of rows by expert"
    table = program.collective(gather, counts, (size,), ranks.size, ranks.group)
    table = call.call(aten.view.default, table, [ranks.size, experts + 1])
    totals = call.call(aten.sum.dim_IntList, table, [0], dtype=spec.dtype)
    totals = rank_dependent_slice(program, totals, 0, ranks.rank * here, here)
    ends_here = call.call(aten.cumsum.default, totals, 0, dtype=spec.dtype)
    if spec.device.type != "cpu":
        table = call.call(aten._to_copy.default, table, device=torch.device("cpu"))
    sent, got = (program.number(ROWS_BY_RANK, (table, ranks.rank, way), [0] * ranks.size) for way in (True, False))
    for node in (last, sent, got):
        node.meta["rank_dependent"] = True
    program.trips[key] = trip = Trip(table, sent, got, ends_here)
    return trip


def _emit_going(call: LocalCall) -> list[fx.Node | None]:
    axis, program, dim = _asking(call, _emit_going), call.program, call["dim"]
    rows = call["rows"] if dim == 0 else call.call(aten.transpose.int, call["rows"], 0, dim)
    own, *rest = program.shape(rows)
    trip = _first_trip(call, axis, own)
    got = _moved(call, axis, rows, (own, *rest), trip.got, trip.sent)
    for node in (got, *got.all_input_nodes):
        node.meta[BALANCED] = True
    brought = call.call(ROWS_BY_EXPERT, got, trip.counts, axis.chunks.rank, call.output_shape()[dim])
    brought.meta["rank_dependent"] = True
    return [brought if dim == 0 else call.call(aten.transpose.int, brought, 0, dim)]


def _emit_coming_back(call: LocalCall) -> list[fx.Node | None]:
    axis, program, dim = _asking(call, _emit_coming_back), call.program, call["dim"]
    rows = call["rows"] if dim == 0 else call.call(aten.transpose.int, call["rows"], 0, dim)
    trip, own = _trip(call, axis, "ends"), call.output_shape()[dim]
    sent = call.call(ROWS_BY_SOURCE, rows, trip.counts, axis.chunks.rank, own)
    # dense, whatever its size: no rank needs a copy to send it
    sent.meta.update({BALANCED: True, "rank_dependent": True, "placements": (OWN,) * len(program.axes)})
    back = _moved(call, axis, sent, (own, *program.shape(rows)[1:]), trip.sent, trip.got)
    return [back if dim == 0 else call.call(aten.transpose.int, back, 0, dim)]


def _moved(
    call: LocalCall, axis: ShardAxis, rows: fx.Node, shape: tuple[int, ...], got: fx.Node, sent: fx.Node
) -> fx.Node:
    """What a rank gets of all neighbours' rows, if each sends so many to each."""
    call.program.subject = "rows by expert"
    exchange = _functional.all_to_all_single.default
    return call.program.collective(exchange, rows, shape, got, sent, axis.chunks.group)


def _emit_product(call: LocalCall) -> list[fx.Node | None]:
    axis = _asking(call, _emit_product)
    product = call.default(offs=_trip(call, axis, "offs").ends)
    product.meta[SHARE] = 1 / axis.chunks.size
    return [_summed(call, axis, product) if len(call.outputs[0].shape) == 3 else product]


def _summed(call: LocalCall, axis: ShardAxis, gradient: fx.Node) -> fx.Node:
    """A gradient by expert, over all ranks that have these experts."""
    call.program.subject = "gradients of experts"
    return gradient if axis.across is None else call.program.all_reduce(gradient, axis.across)


def _emit_entries(call: LocalCall) -> list[fx.Node | None]:
    axis = _asking(call, _emit_entries)
    (ids,) = call["indices"]
    return [call.default(indices=[_places(call, axis, ids)[0]])]


def _emit_sums(call: LocalCall) -> list[fx.Node | None]:
    axis = _asking(call, _emit_sums)
    (ids,), values = call["indices"], call["values"]
    entries, nowhere = _places(call, axis, ids)
    column = call.call(aten.view.default, nowhere, [-1] + [1] * (len(call.program.shape(values)) - 1))
    values = call.call(aten.masked_fill.Scalar, values, column, 0)
    return [_summed(call, axis, call.default(indices=[entries], values=values))]


def _places(call: LocalCall, axis: ShardAxis, ids: fx.Node) -> tuple[fx.Node, fx.Node]:
    """(the place of each row's expert among this rank's, any for room that is empty; whether it is empty)."""
    here = call.spec("self").shape[0] // axis.chunks.size
    place = call.call(aten.sub.Tensor, ids, axis.chunks.rank * here)
    place.meta["rank_dependent"] = True
    entry = call.call(aten.clamp.default, place, 0, here - 1)
    return entry, call.call(aten.ne.Tensor, entry, place)
