"""Ring attention: each rank works on one rank's keys and values while the next ones travel.

Ring attention (arXiv:2310.01889). Rank r begins with its own keys and hands on what it holds to rank r + 1; after N - 1
hops it has seen all. Results are merged as they come; backward the gradients of keys travel with them, one hop behind,
and come home with the N-th::

    start hop of keys ─ kernel on the keys at hand ─ merge ─ wait for the hop ─ ...

On a folded axis causal attention of a rank's own pieces is causal attention, for they lie in order. Of an earlier
rank's keys all queries see the first half and none sees the second; of a later rank's only the second half of the
queries sees any, and it sees all: the same work on every rank in every hop, with cuts that differ from rank to rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import fx

from lightning_spmd.ir.placement import ShardAxis
from lightning_spmd.stages.expand.attention.gathered_attention import (
    SEQUENCE,
    joined,
    ranks_own_slice,
    results_of_backward,
)
from lightning_spmd.stages.expand.attention.kernels import MASKS, Kernel, Rows, cast, merged
from lightning_spmd.stages.expand.call import LocalCall
from lightning_spmd.stages.expand.collectives.exchange import reshaped

aten = torch.ops.aten
_all_to_all = torch.ops._c10d_functional.all_to_all_single.default


def emit_ring(call: LocalCall) -> list[fx.Node | None]:
    """The forward kernel."""
    (axis,) = call.emitting_axes(emit_ring)
    kernel, program = Kernel(call), call.program
    ring = _Ring(call, axis)
    causal = bool(call.globals["is_causal"])
    held = ring.pack([call["key"], call["value"]])
    total: Rows | None = None
    for hop in range(axis.size):
        moving = ring.send(held) if hop < axis.size - 1 else None
        key, value = ring.unpack(held)
        seen = ring.seen(hop, causal=causal)
        rows = kernel.forward(
            seen.queries(call["query"]), seen.keys(key), seen.keys(value), causal=causal and hop == 0, mask=seen.mask()
        )
        rows = Rows(rows.output, seen.dead_rows(rows.logarithms), rows.outputs)
        total = rows if total is None else _added(ring, seen, total, rows)
        if moving is not None:
            held = program.wait(moving)
    if total is None:
        raise ValueError(f"an axis of {axis.size} ranks")
    logarithms = total.logarithms
    if kernel.mask is not None:  # what kernels say of a row that sees no key
        nothing = program.call(aten.eq.Scalar, logarithms, -math.inf)
        logarithms = program.call(aten.masked_fill.Scalar, logarithms, nothing, 0.0)
    return kernel.results(cast(program, total.output, call.outputs[0].dtype), logarithms, total)


def _added(ring: _Ring, seen: _Seen, total: Rows, rows: Rows) -> Rows:
    """The result for the keys so far and these; where only some queries see these, theirs change in place."""
    program, run = ring.call.program, ring.call.call
    dead = ring.mask is not None
    if seen.rows_from is None:
        output, logarithms = merged(program, total, rows, dead=dead)
        return Rows(output, logarithms, rows.outputs)
    output = cast(program, total.output, program.spec(total.logarithms).dtype)
    mine = Rows(seen.queries(output), seen.queries(total.logarithms), rows.outputs)
    new_output, new_logarithms = merged(program, mine, rows, dead=dead)
    run(aten.copy_.default, mine.output, new_output)
    run(aten.copy_.default, mine.logarithms, new_logarithms)
    return Rows(output, total.logarithms, rows.outputs)


def emit_ring_backward(call: LocalCall) -> list[fx.Node | None]:
    """The backward kernel."""
    (axis,) = call.emitting_axes(emit_ring_backward)
    kernel, program, run = Kernel(call), call.program, call.call
    ring = _Ring(call, axis)
    causal = bool(call.globals["is_causal"])
    gradient = call["grad_out_" if "grad_out_" in call.globals else "grad_out"]
    whole = (gradient, call["query"], call["out"], kernel.logarithms)
    held = ring.pack([call["key"], call["value"]])
    query: fx.Node | None = None
    coming: fx.Node | None = None
    for hop in range(axis.size):
        moving = ring.send(held) if hop < axis.size - 1 else None
        key, value = ring.unpack(held)
        seen = ring.seen(hop, causal=causal)
        rows = [seen.queries(node) for node in whole]
        first, *others = kernel.backward(
            rows, seen.keys(key), seen.keys(value), causal=causal and hop == 0, mask=seen.mask()
        )
        query = first if query is None else seen.add(query, first)
        if coming is None:
            gradients = ring.pack(others)
        else:
            gradients = program.wait(coming)
            for total, part in zip(ring.unpack(gradients), others, strict=True):
                run(aten.add_.Tensor, seen.keys(total), part)
        coming = ring.send(gradients)
        if moving is not None:
            held = program.wait(moving)
    if query is None or coming is None:
        raise ValueError(f"an axis of {axis.size} ranks")
    return results_of_backward(call, query, ring.unpack(program.wait(coming)))


class _Ring:
    """The ranks of an axis, each of which sends to the next.

    Args:
        call: the attention operator.
        axis: the ranks.
    """

    def __init__(self, call: LocalCall, axis: ShardAxis) -> None:
        self.call, self.axis = call, axis
        self.mask: fx.Node | None = next((call[name] for name in MASKS if call.get(name) is not None), None)
        self.shapes = [call.program.shape(call[name]) for name in ("key", "value")]

    def pack(self, parts: list[fx.Node]) -> fx.Node:
        """Both in one piece of memory."""
        if self.shapes[0] == self.shapes[1]:
            return self.call.call(aten.stack.default, parts)
        sizes = [math.prod(shape) for shape in self.shapes]
        flat = [reshaped(self.call.program, part, (size,)) for part, size in zip(parts, sizes, strict=True)]
        return self.call.call(aten.cat.default, flat)

    def unpack(self, packed: fx.Node) -> list[fx.Node]:
        """Views of both."""
        run = self.call.call
        if self.shapes[0] == self.shapes[1]:
            return [run(aten.select.int, packed, 0, i) for i in range(2)]
        sizes = [math.prod(shape) for shape in self.shapes]
        parts = [
            run(aten.slice.Tensor, packed, 0, 0, sizes[0]),
            run(aten.slice.Tensor, packed, 0, sizes[0], sum(sizes)),
        ]
        return [run(aten.view.default, part, list(s)) for part, s in zip(parts, self.shapes, strict=True)]

    def send(self, packed: fx.Node) -> fx.Node:
        """Start sending to the next rank, and return what the previous rank sends."""
        size, rank, program = self.axis.size, self.axis.rank, self.call.program
        rows = program.shape(packed)[0]
        to = [rows if r == (rank + 1) % size else 0 for r in range(size)]
        source = [rows if r == (rank - 1) % size else 0 for r in range(size)]
        started = program.start(_all_to_all, packed, program.shape(packed), source, to, self.axis.group)
        started.meta["rank_dependent"] = True
        return started

    def seen(self, hop: int, *, causal: bool) -> _Seen:
        """What is seen of what at this hop."""
        holder = (self.axis.rank - hop) % self.axis.size
        own = self.shapes[0][SEQUENCE]
        if not causal or hop == 0:
            return _Seen(self, holder, None, own)
        return _Seen(self, holder, 0, own // 2) if holder < self.axis.rank else _Seen(self, holder, own // 2, own)


@dataclass(frozen=True)
class _Seen:
    """Which queries see which keys at one hop.

    Args:
        ring: where.
        holder: whose keys they are.
        rows_from: the queries from this row on; None: all of them, on every rank.
        keys_upto: the keys up to this one.
    """

    ring: _Ring
    holder: int
    rows_from: int | None
    keys_upto: int

    def queries(self, node: fx.Node) -> fx.Node:
        """The queries' rows of something that is split like them."""
        if self.rows_from is None:
            return node
        return ranks_own_slice(self.ring.call, node, self.rows_from, self.ring.call.program.shape(node)[SEQUENCE])

    def keys(self, node: fx.Node) -> fx.Node:
        """The keys' part of something of their shape."""
        return node if self.rows_from is None else ranks_own_slice(self.ring.call, node, 0, self.keys_upto)

    def add(self, total: fx.Node, part: fx.Node) -> fx.Node:
        """``total`` with ``part`` added to the rows of these queries."""
        run = self.ring.call.call
        if self.rows_from is None:
            return run(aten.add.Tensor, total, part)
        run(aten.add_.Tensor, self.queries(total), part)
        return total

    def mask(self) -> fx.Node | None:
        """The columns of the mask for these keys."""
        call, axis, mask = self.ring.call, self.ring.axis, self.ring.mask
        if mask is None:
            return None
        columns = call.program.shape(mask)[-1]
        if columns == 1:
            return mask
        last = len(call.program.shape(mask)) - 1
        parts: list[fx.Node] = []
        for start, length in axis.pieces(columns, self.holder):
            parts.append(call.call(aten.slice.Tensor, mask, last, start, start + length))
            parts[-1].meta["rank_dependent"] = True
        return joined(call, parts, last)

    def dead_rows(self, logarithms: fx.Node) -> fx.Node:
        """Logarithms of rows that see none of these keys: minus infinity, where kernels say 0."""
        mask, run = self.mask(), self.ring.call.call
        if mask is None:
            return logarithms
        most = run(aten.amax.default, mask, [-1], True)
        return run(aten.masked_fill.Scalar, logarithms, run(aten.eq.Scalar, most, -math.inf), -math.inf)
