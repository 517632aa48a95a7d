"""Recompute activations in the backward pass instead of keeping them since the forward pass.

Before::

    n = layer_norm(x); h = mm(n, w1); g = gelu(h); y = mm(g, w2)  ...  dh = gelu_backward(dg, h); dw1 = mm(dh.t, n)

After::

    n = layer_norm(x); h = mm(n, w1); g = gelu(h); y = mm(g, w2)  ...
    n2 = layer_norm(x); h2 = mm(n2, w1); dh = gelu_backward(dg, h2); dw1 = mm(dh.t, n2)

``SPMDStrategy(rematerialize=0.5)`` gives back that share of the activations' bytes, counted where most are alive;
``rematerialize="512MiB"`` leaves so many of them on each device. Cheapest first, by the bytes that are freed for what
making them again costs: views, casts, pointwise operators and normalizations, then matrix products, attention last.
Each is made once, right in front of its first reader.

Bitwise: the same operators run on the same values. Random draws are never repeated: of a dropout mask the booleans are
kept. A batch norm that runs again updates no running statistics. Not recomputed is what a collective moved (so no
collective is added), what an operator made that is not torch's own or may give other bits in a second run, and what is
made of a value that is overwritten meanwhile; an operator in place is repeated with what it writes into. What
``torch.utils.checkpoint`` makes again in the backward pass stays as it is.

Does nothing without the option, without a backward pass, where activations fit anyway, or where some rank of uneven
ones has no row.

Chen et al., arXiv:1604.06174; the choice is explained in ``stages/passes/remat/choice.py``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from lightning_spmd.ir.effects import counts_of, is_pure, set_counts
from lightning_spmd.ir.node_info import Section, TensorSpec, info_of, spec_of
from lightning_spmd.ir.steps import ShardedStep
from lightning_spmd.ir.verify import forget_writes, stamp_writes
from lightning_spmd.stages.passes.contract import GraphPass, PassState
from lightning_spmd.stages.passes.remat.choice import choose
from lightning_spmd.stages.passes.remat.plan import Plan, Planner
from lightning_spmd.stages.passes.remat.values import WITHOUT_STATISTICS, Values
from lightning_spmd.stages.passes.remat.wanted import MIB, bytes_to_leave, short_of, values_to_spare

_TO_COPY = torch.ops.aten._to_copy.default  # noqa: SLF001 - an operator's public name


def rematerialize(step: ShardedStep, state: PassState) -> None:
    """Make activations again; see the module docstring for which."""
    wanted = state.rematerialize
    values = values_to_spare(step, wanted)
    if wanted is None or values is None:
        return
    planner = Planner(values)
    before = planner.plan(()).peak
    limit = bytes_to_leave(wanted, before)
    if before <= limit:
        return
    plan = choose(values, planner, limit)
    if plan.dropped:
        stamp_writes(values.graph)
        _Writer(values, plan).write()
    forward = sum(cost or 0 for cost in values.costs.values())
    note = (
        f"activations take {plan.peak / MIB:.1f} MiB instead of {before / MIB:.1f}, "
        f"{100 * plan.cost(values) / max(forward, 1):.0f} % of the forward pass is done twice"
    )
    state.notes["rematerialize"] = note + short_of(wanted, limit, plan.peak)


class _Writer:
    """Writes what runs again into the graph."""

    def __init__(self, values: Values, plan: Plan) -> None:
        self.values = values
        self.plan = plan
        self.graph = values.graph
        self.copies: dict[fx.Node, fx.Node] = {}

    def write(self) -> None:
        """Make the copies and let the backward pass read them."""
        for node in self.plan.again(self.values):
            with self.graph.inserting_before(self.values.order[self.plan.places[node]]):
                self.copies[node] = self._again(node)
        for root in self.plan.dropped:
            for reader, operand in self.values.late_readers[root]:
                counts = counts_of(reader)
                reader.replace_input_with(operand, self.copies[operand])
                if operand in counts:
                    counts[self.copies[operand]] = counts.pop(operand)
                set_counts(reader, counts)
        for node in reversed(self.values.order[: self.values.border]):
            if node.op == "call_function" and not node.users and is_pure(node):
                self.graph.erase_node(node)

    def _again(self, node: fx.Node) -> fx.Node:
        if node is self.values.drawn.get(self.values.roots[node]):
            copy = self._drawn_again(node)
        else:
            copy = self.graph.node_copy(node, lambda n: self.copies.get(n, n))
            statistics = self.values.statistics(node)
            if statistics:
                arguments = list(copy.args)
                for position in WITHOUT_STATISTICS[node.target]:
                    arguments[position] = None
                copy.args = tuple(arguments)
                forget_writes(copy)
        copy.meta["info"] = replace(info_of(node), section=Section.BACKWARD)
        return copy

    def _drawn_again(self, draw: fx.Node) -> fx.Node:
        """Zeros and ones that were drawn, kept as booleans."""
        spec = spec_of(draw)
        with self.graph.inserting_after(draw):
            kept = self.graph.call_function(_TO_COPY, (draw,), {"dtype": torch.bool})
        facts = {key: draw.meta[key] for key in ("info", "placements") if key in draw.meta}
        kept.meta.update(facts, val=TensorSpec(spec.shape, spec.stride, torch.bool, spec.device))
        again: Any = self.graph.call_function(_TO_COPY, (kept,), {"dtype": spec.dtype})
        again.meta.update(facts, val=spec)
        return again


PASS = GraphPass(
    "rematerialize",
    rematerialize,
    after=frozenset({"identity_views", "common_subexpressions", "redundant_copies", "dead_code"}),
)
"""Before ``regather_parameters``, which gathers again what a product that runs again needs."""
