"""Chooses, for one mesh axis, the placement of every value of the global graph.

Nodes are visited once, in order. For each operator the cheapest legal layout given what its operands already are wins
(``redistribute.cost``); placements already paid for (a gradient that was reduced for the norm) are free.

**Mutation.** A written operand may change its placement only if nothing can see the difference: it is no graph input
and no other name of its storage is read later; then later readers get the new tensor. Otherwise it must stay as it was
created. If that would cost communication (``out = zeros(B, T); out[:, 0] = x`` with a split ``x``), the placement is
wanted at the creation of the storage: it is forced there and propagation starts again (each creation at most twice). So
is a whole tensor where rows of a split one are written (``x[1:3] = 0``): their slice is of a gathered copy. Writes into
graph inputs (buffers) never change the input's placement: the other operands are gathered or reduced.

**Sharded state.** A parameter that is stored in chunks is gathered before anything is computed with it. Clipping and
the optimizer work on chunks: partial sums of gradients are reduced into them, and of a parameter that is stored whole
each rank updates its own chunk in place; the emitter gathers those at the end.

**Activations** between parallel layers: see ``activations``.

Order of the rules for one operator: ours, then those registered with DTensor (also by users), then replication of
everything, which is reported.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable
from typing import Any

from torch import fx

from lightning_spmd.cost.collectives import LATENCY
from lightning_spmd.errors import ExpansionError
from lightning_spmd.ir.aliasing import written_arguments
from lightning_spmd.ir.first import first
from lightning_spmd.ir.node_info import TensorSpec, info_of, named
from lightning_spmd.ir.placement import (
    CHUNK,
    OWN,
    PARTIAL,
    REPLICATE,
    Chosen,
    Chunk,
    Partial,
    Placement,
    Replicate,
    Shard,
)
from lightning_spmd.ir.reads import hands_over
from lightning_spmd.ir.signature import GraphInput, InputRole, OutputRole
from lightning_spmd.stages.expand.axis_plan import AxisPlan, result_is_the_operand
from lightning_spmd.stages.expand.call import Layout, OpCall, flatten_values, is_tensor
from lightning_spmd.stages.expand.collectives.redistribute import goes_through_whole
from lightning_spmd.stages.expand.experts.regions import EXPERT_WEIGHTS
from lightning_spmd.stages.expand.experts.split_experts import layout_by_expert
from lightning_spmd.stages.expand.propagation.late_sums import late_sums
from lightning_spmd.stages.expand.propagation.own_batches import layout_of_own
from lightning_spmd.stages.expand.propagation.placing import UPDATE, Placing, StartAgain, is_read_by_update_alone
from lightning_spmd.stages.expand.rows import chosen, routing
from lightning_spmd.stages.expand.rules import layouts_of
from lightning_spmd.stages.expand.rules.factories import emit_zeros
from lightning_spmd.stages.expand.rules.registered import registered_layouts


class Propagation(Placing):
    """Propagation along one axis; the arguments are those of :class:`Placing`."""

    def _remedy(self) -> str:
        if self.activations is not None:
            return "another style for the layers around it may avoid that"
        return "it works along the sequence" if self.splits_sequences else "it works across the rows of the batch"

    def run(self) -> AxisPlan:
        """Choose all placements."""
        while True:
            self.result = AxisPlan(self.axis, remedy=self._remedy())
            self.versions, self.detached, self.routed, self.updating = {}, set(), {}, False
            try:
                self._pass()
                if self._reduces_later():
                    continue
                smaller = {} if self.narrowed else self._narrow()
            except StartAgain:
                continue
            if not smaller:
                return self.result
            self.narrowed = True
            self.forced.update(smaller)

    def _reduces_later(self) -> bool:
        """Whether partial sums are found, once, that are better reduced later than at their first reader."""
        if self.activations is None or self.late:
            return False
        self.late = True
        found = late_sums(self.graph, self.result, self.aliasing)
        self.activations = dataclasses.replace(self.activations, passing=found.passing)
        self.forced.update(dict.fromkeys(found.zeros, PARTIAL))
        return bool(found.passing)

    def _pass(self) -> None:
        inputs = iter(self.signature.inputs)
        for node in self.graph.nodes:
            if node.op == "placeholder":
                self._set(node, (self._input(node, first(inputs, "input in the signature")),))
            elif node.op == "output":
                self._results(node)
            elif node.target is operator.getitem:
                if not hands_over(node.args[0]):  # type: ignore[arg-type]  # a number that Python gives
                    self._getitem(node)
            elif hasattr(node.target, "_schema"):
                self._operator(node)
            elif hands_over(node):
                self._refuse_routing(self._routed(node.all_input_nodes), node)

    def _input(self, node: fx.Node, entry: GraphInput) -> Placement:
        if self.own_batches and entry.role is InputRole.CONSTANT and is_read_by_update_alone(node):
            return REPLICATE  # `torch.tensor(1.0)` in an optimizer's step
        if entry.role is InputRole.KEPT:
            return entry.placements[len(self.outer)]
        return self.plan.input_placement(self.axis, entry)

    def _getitem(self, node: fx.Node) -> None:
        parent, index = node.args
        if isinstance(parent, fx.Node) and isinstance(index, int):
            values = parent.meta["val"]
            at = len(list(flatten_values(values[:index])))
            self._set(node, self.result.outputs[parent][at : at + len(list(flatten_values([values[index]])))])
            if parent in self.routed:
                self.routed[node] = (self.routed[parent][index],)
            if parent in self.detached:
                self.detached.add(node)

    def _results(self, node: fx.Node) -> None:
        for value, entry in zip(node.args[0], self.signature.outputs, strict=True):  # type: ignore[arg-type]
            current = self._current(value) if is_tensor(value) else REPLICATE
            if isinstance(value, fx.Node):
                self._refuse_routing(self._routed([value]), value)
            is_kept = entry.role is OutputRole.KEPT
            self.result.results.append(current if is_kept else self.plan.output_placement(self.axis, entry, current))

    # ------------------------------------------------------------------ one operator

    def _operator(self, node: fx.Node) -> None:
        if info_of(node).section in UPDATE:
            if not self.updating:
                self._begin_update()
        else:
            self.updating = False  # a step in the middle of training_step: what follows reads whole parameters again
        seen = self._prepare(node)
        call = OpCall(node, self.axis, lambda n: seen.get(n) or self._seen_by(node, n))
        call.forced, call.splits_sequences = self.forced.get(node), self.splits_sequences
        self.result.operands[node] = call.operands
        if self.own_batches and self._place_own(call):
            return
        if self.activations is not None and self._place_by_expert(call):
            return
        if self.activations is None and node.meta.get(EXPERT_WEIGHTS) == self.axis.name:
            self._choose(call, Layout((CHUNK,), (CHUNK,)))
            return
        if call.forced == PARTIAL:  # zeros, to which partial sums are added
            is_like_a_part = any(isinstance(p, Chunk | Shard) for p in call.current)
            self._choose(call, Layout(tuple(call.current), (PARTIAL,), emit_zeros if is_like_a_part else None))
            return
        everywhere = Layout((REPLICATE,) * len(call.operands), (REPLICATE,) * max(len(call.outputs), 1))
        written = written_arguments(node)
        whole = call.forced is None and all(isinstance(p, Replicate) for p in call.current)
        seen_elsewhere = any(o in self.detached or self.versions[o][0] != REPLICATE for o in written)
        if call.forced == REPLICATE or (whole and not seen_elsewhere):
            self._choose(call, everywhere)
            for operand in written:
                self._written(operand, REPLICATE, node)
            return
        if self._route(call):
            return
        candidates = self._candidates(call)
        if self.updating and self.shards_state and Partial() in call.current:
            candidates = [*candidates, *self._candidates(OpCall(node, self.axis, self._reduced))]
        if call.forced is not None:
            wanted = [c for c in candidates if c.outputs[0] == call.forced]
            if wanted:
                self._choose(call, min(wanted, key=lambda c: self._cost(call, c)))
                if isinstance(call.forced, Shard) and isinstance(call.forced.outer, Chosen):
                    (bag,) = self.chosen[call.forced.outer.count]
                    self.routed[node] = (dataclasses.replace(bag, order=routing.Order.BAG),) if bag else ()
                return
        options = [*candidates, everywhere]
        if written:
            self._choose_writing(call, options, written)
        else:
            self._choose(call, min(options, key=lambda c: self._cost(call, c)))

    def _place_own(self, call: OpCall) -> bool:
        """What depends on a rank's own batch is the rank's own; see ``own_batches``. Whether this does."""
        layout = layout_of_own(call, updating=self.updating)
        if layout is None:
            return False
        for operand in written_arguments(call.node):
            if self._current(operand) != OWN:
                self._create_as_own(operand, call.node)
        self._choose(call, layout)
        for operand in written_arguments(call.node):
            self._written(operand, OWN, call.node)
        return True

    def _place_by_expert(self, call: OpCall) -> bool:
        """Rows by expert are where their experts are; see ``experts``. Whether this works on them."""
        layout = layout_by_expert(call)
        if layout is None:
            return False
        self._choose(call, layout)
        for operand in written_arguments(call.node):
            self._written(operand, layout.inputs[call.operands.index(operand)], call.node)
        return True

    def _create_as_own(self, operand: fx.Node, writer: fx.Node) -> None:
        """What a rank's own values are written into is its own from its creation on."""
        root = self.aliasing.roots[operand]
        if root.op == "placeholder":
            raise ExpansionError(
                f"{named(writer)} writes a value computed from this rank's local batch into {root.name}, "
                "which is the same on all ranks: keep the value in a buffer, which may differ between ranks"
            )
        self.forced[root] = OWN
        raise StartAgain

    def _prepare(self, node: fx.Node) -> dict[fx.Node, Placement]:
        """Reduce and gather operands as the rules for activations say; operands that ``node`` sees differently."""
        if self.activations is None:
            return {}
        reduced, gathered = self.activations.operand_changes(node, self._current)
        for operand, placement in [*reduced.items(), *gathered.items()]:
            if placement not in self.versions[operand]:
                self.versions[operand].append(placement)
        return gathered

    def _route(self, call: OpCall) -> bool:
        """Run a sort of split rows, and what depends on its order, on the rank's own rows; see ``routing``."""
        values = [self.routed.get(o, (None,))[0] for o in call.operands]
        known = {i: v for i, v in enumerate(values) if v is not None}
        if known:
            found = None if call.node in self.banned else self._routed_further(call, known)
            if found is None or not self._may_write(call, found.layout):
                self._refuse_routing(known.values(), call.node)
                return False
        elif (found := self._choose_rows(call)) is not None:
            pass
        elif routing.begins_routing(call) and call.node not in self.unroutable:
            found = routing.begin(call)
        else:
            return False
        self._choose(call, found.layout)
        self.routed[call.node] = found.outputs
        for operand in written_arguments(call.node):
            self._written(operand, found.layout.inputs[call.operands.index(operand)], call.node)
        return True

    def _routed_further(self, call: OpCall, known: dict[int, routing.Routed]) -> routing.Route | None:
        if not any(chosen.is_chosen(value.where) for value in known.values()):
            return routing.route(call, known)
        if call.op in chosen.COUNTED_BY:
            return self._choose_rows(call)
        return chosen.route(call, known, lambda layout: self._cost(call, layout), self._is_same_along)

    def _is_same_along(self, node: fx.Node, dim: int) -> bool:
        return chosen.is_same_along(node, dim, lambda n: self.aliasing.roots[n] in self.aliasing.written)

    def _choose_rows(self, call: OpCall) -> routing.Route | None:
        """How a rank finds rows that values choose among its own; see ``chosen``. None: it does among gathered ones."""
        node = call.node
        counted = chosen.count_of(node, self.aliasing.position)
        splits_rows = self.activations is None and not self.splits_sequences
        if counted is None or node in self.unroutable or node in self.banned or not splits_rows:
            return None
        count, position = counted
        parts: Any = count.target
        known = parts.chosen(position)
        value: Any = count.args[position]
        if known is None or self.versions[value][0] != PARTIAL:
            return None
        found = chosen.begin(call, known[0])
        if found is not None:
            self.result.chosen.add(counted)
            self.chosen[known[0]] = found.outputs
        return found

    def _may_write(self, call: OpCall, layout: Layout) -> bool:
        """Whether written operands lie as a layout says, or may from here on.

        What is made for the rows that are written into it is made as it must lie for that: propagation starts again.
        """
        written = written_arguments(call.node)
        for operand in written:
            want, root = layout.inputs[call.operands.index(operand)], self.aliasing.roots[operand]
            made_here = root is operand and root.op != "placeholder" and root not in self.forced
            if self.versions[operand][0] == REPLICATE and isinstance(want, Shard) and made_here:
                self.forced.update(dict.fromkeys(self._siblings(root), want))
                raise StartAgain
            if want != self.versions[operand][0] and not self._may_change(operand, call.node):
                return False
        return result_is_the_operand(call, layout, written)

    def _routed(self, nodes: Iterable[fx.Node]) -> list[routing.Routed]:
        return [value for node in nodes for value in self.routed.get(node, ()) if value is not None]

    def _refuse_routing(self, values: Iterable[routing.Routed], reader: fx.Node) -> None:
        """Where something would see the order of the rows, gathered rows are sorted, or chosen from, instead.

        Args:
            values: what of it depends on them.
            reader: what sees it.
        """
        sorts = {value.sort for value in values}
        if not sorts:
            return
        self.unroutable.update(dict.fromkeys(sorts, reader))
        for node in [n for n, placement in self.forced.items() if chosen.is_chosen(placement)]:
            del self.forced[node]
            self.narrowed = False
        raise StartAgain

    def _candidates(self, call: OpCall) -> list[Layout]:
        node = call.node
        if node in self.banned:
            self.result.replicated[node] = self._gathered_bytes(call)
            return []

        def failed(error: Exception) -> None:
            self.result.failures[node] = f"its rule does not know this call: {type(error).__name__}: {error}"

        if (reader := self.unroutable.get(node)) is not None and call.op in chosen.COUNTED_BY:
            self.result.failures[node] = f"all that it finds is wanted, in order, by {named(reader)}"
        found = layouts_of(call, failed)
        if found is None and node not in self.result.failures:
            found = registered_layouts(call)
        if found is None:
            self.result.replicated[node] = self._gathered_bytes(call)
            return []
        return [layout for layout in found if self._fits(call, layout)]

    def _choose(self, call: OpCall, layout: Layout) -> None:
        node = call.node
        self.result.layouts[node] = layout
        aliasing = self.aliasing.roots[node] is not node
        for operand, want in zip(call.operands, layout.inputs, strict=True):
            versions = self.versions[operand]
            shares = aliasing and self.aliasing.roots[operand] is self.aliasing.roots[node]
            pieces = not isinstance(want, (Replicate, Partial))
            copied = pieces and isinstance(layout.outputs[0], (Replicate, Partial))  # one row of a split dimension
            if shares and (want != versions[0] or copied or operand in self.detached):
                self.detached.add(node)
            if want not in versions:
                self._note_gather(call, operand, layout.expected)
                if goes_through_whole(versions[0], want, self.axis) and REPLICATE not in versions:
                    versions.append(REPLICATE)
                versions.append(want)
        self._set(node, layout.outputs)

    def _note_gather(self, call: OpCall, operand: fx.Node, expected: bool) -> None:
        """Report it, except where it is the mirror of a reduce-scatter that the plan asked for, or inherent."""
        versions = self.versions[operand]
        unasked = info_of(call.node).section not in UPDATE and call.node not in self.forced and not expected
        if unasked and isinstance(versions[0], Shard) and REPLICATE not in versions:
            gathered = self.result.gathered
            gathered[call.node] = gathered.get(call.node, 0) + operand.meta["val"].bytes

    # ------------------------------------------------------------------ work that only a piece of is read
    def _narrow(self) -> dict[fx.Node, Placement]:
        """Replicated values of which every reader takes the same piece, and the placement to create them with.

        Against the order of execution, so whole chains follow: an attention mask, the gradient of a sum. Otherwise
        every rank would hold such tensors for the global batch.
        """
        wanted: dict[fx.Node, set[Placement]] = {n: set() for n in self.graph.nodes}
        narrowed: dict[fx.Node, Placement] = {}
        for node in reversed(self.graph.nodes):
            if node.op == "output":
                for value, placement in zip(node.args[0], self.result.results, strict=True):  # type: ignore[arg-type]
                    if isinstance(value, fx.Node):
                        wanted[value].add(placement)
            layout = self.result.layouts.get(node)
            if layout is None:
                continue
            smaller = self._smaller(node, wanted[node])
            if smaller is not None:
                layout, narrowed[node] = smaller, smaller.outputs[0]
            for operand, placement in zip(self.result.operands[node], layout.inputs, strict=True):
                wanted[operand].add(placement)
        return narrowed

    def _smaller(self, node: fx.Node, wanted: set[Placement]) -> Layout | None:
        if self.result.outputs[node] != (REPLICATE,) or len(wanted) != 1 or node in self.forced or node in self.banned:
            return None
        (placement,) = wanted
        if not isinstance(placement, Shard) or not isinstance(node.meta.get("val"), TensorSpec):
            return None
        if self.aliasing.roots[node] in self.aliasing.written:
            return None
        call = OpCall(node, self.axis, self._current)
        call.forced = placement
        options = [c for c in layouts_of(call) or [] if c.outputs == (placement,) and (c.emit is None or c.local)]
        options = [c for c in options if self._fits(call, c)]
        best = min(options, key=lambda c: self._cost(call, c), default=None)
        return best if best is not None and self._takes_pieces_alone(call, best) else None

    def _takes_pieces_alone(self, call: OpCall, layout: Layout) -> bool:
        """Whether a layout asks for nothing but what is there and pieces of it, however large: nothing moves."""
        pairs = zip(call.operands, layout.inputs, strict=True)

        def is_there(operand: fx.Node, want: Placement) -> bool:
            there = self.versions[operand]
            if want in there or REPLICATE not in there or not isinstance(want, Shard):
                return want in there
            return not chosen.is_chosen(want) or self._is_same_along(operand, want.dim)

        return all(is_there(operand, want) for operand, want in pairs)

    # ------------------------------------------------------------------ writes
    def _choose_writing(self, call: OpCall, options: list[Layout], written: list[fx.Node]) -> None:
        bound = [i for i, o in enumerate(call.operands) if o in written and not self._may_change(o, call.node)]

        def legal(layout: Layout) -> bool:
            return all(layout.inputs[i] == self.versions[call.operands[i]][0] for i in bound)

        options = [layout for layout in options if result_is_the_operand(call, layout, written)]
        free = min(options, key=lambda c: self._cost(call, c))
        allowed = [c for c in options if legal(c)]
        best = min(allowed, key=lambda c: self._cost(call, c), default=None)
        if best is None or self._cost(call, best) >= LATENCY > self._cost(call, free):
            self._force(call, free, bound)
        if best is None:
            for operand in written:
                self._make_whole(operand)
            raise ExpansionError(
                f"{named(call.node)} writes into a tensor that is split over "
                f"{self.axis.name} in a way that the operator cannot work on; write to a copy (`x = x.clone()`) instead"
            )
        self._choose(call, best)
        for i, operand in enumerate(call.operands):
            if operand in written:
                self._written(operand, best.inputs[i], call.node)

    def _force(self, call: OpCall, wanted: Layout, bound: list[int]) -> None:
        """Ask for the wanted placement of a written operand where its storage is created, if that can give it."""
        for i in bound:
            operand, want = call.operands[i], wanted.inputs[i]
            root = self.aliasing.roots[operand]
            if root.op == "placeholder" or root in self.forced or want == self.versions[operand][0]:
                continue
            path = [operand]
            while path[-1] is not root:
                views = (a for a in path[-1].all_input_nodes if self.aliasing.roots[a] is root)
                path.append(first(views, "view of it"))
            path.reverse()
            for dim in range(len(root.meta["val"].shape) if isinstance(root.meta["val"], TensorSpec) else 0):
                if self.axis.divides(root.meta["val"].shape[dim]) and self._leads_to(path, Shard(dim), want):
                    self.forced[root] = Shard(dim)
                    raise StartAgain

    def _leads_to(self, path: list[fx.Node], start: Placement, want: Placement) -> bool:
        placement = start
        for before, node in zip(path, path[1:], strict=False):
            if node.target is operator.getitem:
                continue
            call = OpCall(node, self.axis, lambda n, b=before, p=placement: p if n is b else self._current(n))
            index = call.operands.index(before)
            found = [c for c in layouts_of(call) or [] if c.inputs[index] == placement]
            if not found:
                return False
            best = min(
                found, key=lambda c: sum(self._operand_cost(call, i, w) for i, w in enumerate(c.inputs) if i != index)
            )
            placement = best.outputs[0]
        return placement == want
