"""Attention of a rank's queries to all keys, which are gathered: one gather forward, one gather and one scatter back.

Queries, keys and values are split along the sequence. Without causality a rank's kernel gets its queries and all keys.
With it, every piece of the rank's queries (two on a folded axis) is a part on the diagonal, a causal kernel, and a
part below it, a kernel on all earlier keys; the results are merged. The number of nodes does not depend on the number
of ranks. Keys are gathered again in the backward pass, so nothing of their size stays in between.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import fx

from lightning_spmd.ir.layout import row_major
from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.ir.placement import PARTIAL, REPLICATE, Chunk, Placement, Shard, ShardAxis
from lightning_spmd.stages.expand.attention.kernels import Kernel, Rows, cast, merged
from lightning_spmd.stages.expand.call import LocalCall, is_tensor
from lightning_spmd.stages.expand.collectives.redistribute import redistribute

aten = torch.ops.aten

SEQUENCE = 2
"""The dimension of queries, keys and values that is the sequence: (batch, heads, sequence, size)."""


def emit_gathered(call: LocalCall) -> list[fx.Node | None]:
    """The forward kernel."""
    (axis,) = call.emitting_axes(emit_gathered)
    kernel = Kernel(call)
    key, value = _gathered(call, axis)
    if not call.globals["is_causal"]:
        mask = call.get(kernel.mask) if kernel.mask else None
        rows = kernel.forward(call["query"], key, value, causal=False, mask=mask)
        return kernel.results(rows.output, rows.logarithms, rows)
    found: list[Rows] = []
    for piece in _pieces(call, axis):
        query, on, below = piece.rows(call["query"]), piece.on_diagonal, piece.below
        own = kernel.forward(query, on(key), on(value), causal=True, mask=None)
        others = kernel.forward(query, below(key), below(value), causal=False, mask=None)
        logarithms = piece.none_below(others.logarithms, -math.inf)
        output, total = merged(call.program, own, Rows(others.output, logarithms, others.outputs))
        found.append(Rows(cast(call.program, output, call.outputs[0].dtype), total, own.outputs))
    output = joined(call, [rows.output for rows in found], SEQUENCE)
    return kernel.results(output, joined(call, [rows.logarithms for rows in found], SEQUENCE), found[-1])


def emit_gathered_backward(call: LocalCall) -> list[fx.Node | None]:
    """The backward kernel."""
    (axis,) = call.emitting_axes(emit_gathered_backward)
    kernel, run = Kernel(call), call.call
    key, value = _gathered(call, axis)
    gradient = call["grad_out_" if "grad_out_" in call.globals else "grad_out"]
    whole = (gradient, call["query"], call["out"], kernel.logarithms)
    if not call.globals["is_causal"]:
        mask = call.get(kernel.mask) if kernel.mask else None
        query, *others = kernel.backward(whole, key, value, causal=False, mask=mask)
        return results_of_backward(call, query, _scattered(call, axis, others))
    totals = [run(aten.zeros_like.default, node) for node in (key, value)]
    queries: list[fx.Node] = []
    for piece in _pieces(call, axis):
        rows = [piece.rows(node) for node in whole]
        on, below = piece.on_diagonal, piece.below
        first = kernel.backward(rows, on(key), on(value), causal=True, mask=None)
        # where no key is below the diagonal, a kernel that sees one all the same must give nothing: exp(score - inf)
        rows = [*rows[:3], piece.none_below(rows[3], math.inf)]
        second = kernel.backward(rows, below(key), below(value), causal=False, mask=None)
        queries.append(run(aten.add.Tensor, first[0], second[0]))
        for total, one, other in zip(totals, first[1:], second[1:], strict=True):
            run(aten.add_.Tensor, on(total), one)
            run(aten.add_.Tensor, below(total), other)
    return results_of_backward(call, joined(call, queries, SEQUENCE), _scattered(call, axis, totals))


class _Piece:
    """One piece of this rank's queries: consecutive positions.

    Args:
        call: where it is worked on.
        start: its first position in the sequence.
        length: how many there are.
        row: where they begin among the rank's own rows.
    """

    def __init__(self, call: LocalCall, start: int, length: int, row: int) -> None:
        self.call, self.start, self.length, self.row = call, start, length, row

    def rows(self, node: fx.Node) -> fx.Node:
        """These rows of something that is split like the queries."""
        if self.call.program.shape(node)[SEQUENCE] == self.length:
            return node
        return self.call.call(aten.slice.Tensor, node, SEQUENCE, self.row, self.row + self.length)

    def on_diagonal(self, keys: fx.Node) -> fx.Node:
        """The same positions of something whole."""
        return ranks_own_slice(self.call, keys, self.start, self.start + self.length)

    def below(self, keys: fx.Node) -> fx.Node:
        """All earlier positions; where there are none, one that does not count: kernels want at least one key."""
        return ranks_own_slice(self.call, keys, 0, max(self.start, 1))

    def none_below(self, logarithms: fx.Node, instead: float) -> fx.Node:
        """Logarithms for the earlier positions, ``instead`` of them where there are none."""
        if self.row:  # the second piece of a fold is in the second half of the sequence
            return logarithms
        value = logarithms.meta["val"]
        nothing = self.call.call(aten.full.default, [], self.start == 0, dtype=torch.bool, device=value.device)
        nothing.meta["rank_dependent"] = True
        return self.call.call(aten.masked_fill.Scalar, logarithms, nothing, instead)


def _pieces(call: LocalCall, axis: ShardAxis) -> Iterator[_Piece]:
    row = 0
    for start, length in axis.pieces(call.spec("query").shape[SEQUENCE]):
        yield _Piece(call, start, length, row)
        row += length


def ranks_own_slice(call: LocalCall, node: fx.Node, start: int, end: int) -> fx.Node:
    """Positions of a tensor, which ones differs from rank to rank."""
    piece = call.call(aten.slice.Tensor, node, SEQUENCE, start, end)
    piece.meta["rank_dependent"] = True
    return piece


def joined(call: LocalCall, parts: Sequence[fx.Node], dim: int) -> fx.Node:
    """The parts one behind the other."""
    return parts[0] if len(parts) == 1 else call.call(aten.cat.default, list(parts), dim)


def _gathered(call: LocalCall, axis: ShardAxis) -> list[fx.Node]:
    """All keys and values, in order; in one collective where they are of one shape."""
    return _changed(call, axis, [call["key"], call["value"]], Shard(SEQUENCE), REPLICATE)


def _scattered(call: LocalCall, axis: ShardAxis, totals: Sequence[fx.Node]) -> list[fx.Node]:
    """This rank's part of the gradients of all keys and values, summed over the ranks."""
    return _changed(call, axis, totals, PARTIAL, Shard(SEQUENCE))


def _changed(
    call: LocalCall, axis: ShardAxis, nodes: Sequence[fx.Node], have: Placement, want: Placement
) -> list[fx.Node]:
    specs = [call.spec("key"), call.spec("value")]
    position = call.program.axes.index(axis)
    operand = [name for name, value in call.globals.items() if is_tensor(value)].index("key")
    others = [layout.inputs[operand] for layout in call.layouts]

    def places(placement: Placement, shift: int) -> list[Placement]:
        found = [*others[:position], placement, *others[position + 1 :]]
        return [_shifted(p, shift) for p in found]

    program = call.program
    if specs[0].shape != specs[1].shape:
        return [
            redistribute(program, n, plain(s), places(have, 0), places(want, 0))[tuple(places(want, 0))]
            for n, s in zip(nodes, specs, strict=True)
        ]
    both = program.call(aten.stack.default, list(nodes))
    wanted = tuple(places(want, 1))
    moved = redistribute(program, both, plain(specs[0], 2), places(have, 1), wanted)[wanted]
    return [program.call(aten.select.int, moved, 0, i) for i in range(2)]


def plain(spec: TensorSpec, *leading: int) -> TensorSpec:
    """The row-major tensor of that shape, with more dimensions in front."""
    shape = (*leading, *spec.shape)
    return TensorSpec(shape, row_major(shape), spec.dtype, spec.device)


def _shifted(placement: Placement, by: int) -> Placement:
    if isinstance(placement, Shard):
        return Shard(placement.dim + by, placement.outer)
    return Chunk(placement.dim + by) if isinstance(placement, Chunk) else placement


def results_of_backward(call: LocalCall, query: fx.Node, others: Sequence[fx.Node]) -> list[fx.Node | None]:
    """The backward operator's outputs; none of them is the gradient of a mask."""
    found = [query, *others]
    return [found[i] if isinstance(spec, TensorSpec) and i < 3 else None for i, spec in enumerate(call.outputs)]
