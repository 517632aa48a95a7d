"""The placements known so far along one mesh axis: of each value, the cost of a layout, the effect of a write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from lightning_spmd.cost.collectives import LATENCY
from lightning_spmd.errors import ExpansionError
from lightning_spmd.ir.aliasing import written_arguments
from lightning_spmd.ir.node_info import Section, TensorSpec, info_of, named, spec_of
from lightning_spmd.ir.placement import CHUNK, REPLICATE, Chunk, Partial, Placement, Replicate, Shard, ShardAxis
from lightning_spmd.ir.signature import InputRole, OutputRole, Signature
from lightning_spmd.parallel.parallel_plan import ParallelPlan, activations_between, own_batches
from lightning_spmd.stages.expand.axis_plan import Aliasing, AxisPlan
from lightning_spmd.stages.expand.call import Layout, OpCall
from lightning_spmd.stages.expand.collectives.redistribute import cost
from lightning_spmd.stages.expand.propagation.activations import ActivationRules, split_table_gradients
from lightning_spmd.stages.expand.rows import routing

UPDATE = (Section.CLIP, Section.OPTIMIZER)
_NEVER = 1e6
"""Factor on the cost of moving a weight that the plan has split: work on activations instead, whatever it costs."""


def casts_to_less(parameter: fx.Node) -> list[fx.Node]:
    """The casts of a parameter to less precision, if nothing but its update reads it otherwise.

    A rank that holds a chunk casts that and gathers the result: half the bytes, and the same numbers.
    """
    readers = [user for user in parameter.users if info_of(user).section not in UPDATE]
    size = spec_of(parameter).dtype.itemsize
    for reader in readers:
        only_casts = reader.target is torch.ops.aten._to_copy.default and set(reader.kwargs) == {"dtype"}
        if not only_casts or not spec_of(reader).dtype.is_floating_point or spec_of(reader).dtype.itemsize >= size:
            return []
    return readers


def is_read_by_update_alone(node: fx.Node) -> bool:
    """Whether nothing before clipping and the optimizer reads a value."""
    return all(info_of(user).section in UPDATE for user in node.users)


class StartAgain(Exception):
    """Propagation must start again with another placement at the creation of a storage."""


class Placing:
    """The state of propagation along one axis.

    Args:
        graph: the global graph.
        signature: its signature.
        axis: the axis.
        plan: placements of inputs and outputs.
        banned: operators whose rules did not fit: replicate them.
        outer: placements on the axes before this one, which split first; this axis splits their pieces.
        starts: if the axis splits sequences, the placements of the results where the split begins.
    """

    def __init__(
        self,
        graph: fx.Graph,
        signature: Signature,
        axis: ShardAxis,
        plan: ParallelPlan,
        banned: Mapping[fx.Node, str],
        outer: Sequence[AxisPlan] = (),
        starts: Mapping[fx.Node, Placement] | None = None,
    ) -> None:
        self.graph = graph
        self.signature = signature
        self.axis = axis
        self.plan = plan
        self.banned = banned
        self.aliasing = Aliasing.of(graph)
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        entries = list(zip(placeholders, signature.inputs, strict=True))
        self.parameters = {n: e for n, e in entries if e.role is InputRole.PARAMETER}
        self.kept = {n for n, e in entries if e.role not in (InputRole.BATCH, InputRole.SHARED_BATCH)}
        values: Sequence[Any] = graph.output_node().args[0]  # type: ignore[assignment]
        leaving = zip(values, signature.outputs, strict=True)
        self.shown = {n: e for n, e in leaving if e.role is OutputRole.SHOWN_GRADIENT}
        self.early_casts = {cast for n in self.parameters for cast in casts_to_less(n)}
        self.updated_whole: set[fx.Node] = set()
        self.shards_state = plan.shards_state(axis)
        self.own_batches = own_batches(plan, axis)
        self.outer = outer
        self.splits_sequences = starts is not None
        self.forced: dict[fx.Node, Placement] = dict(starts or {})
        self.activations = self._activation_rules()
        self.result = AxisPlan(axis)
        self.versions: dict[fx.Node, list[Placement]] = {}
        self.detached: set[fx.Node] = set()
        self.narrowed = False
        self.late = False
        self.routed: dict[fx.Node, tuple[routing.Routed | None, ...]] = {}
        self.unroutable: dict[fx.Node, fx.Node] = {}
        self.chosen: dict[int, tuple[routing.Routed | None, ...]] = {}
        self.updating = False

    def _activation_rules(self) -> ActivationRules | None:
        between = activations_between(self.plan, self.axis)
        if between is None:
            return None
        weights = {n: self.plan.input_placement(self.axis, e) for n, e in self.parameters.items()}
        self.forced.update(split_table_gradients(self.graph, weights))
        return ActivationRules(self.axis, between, weights)

    def _set(self, node: fx.Node, placements: tuple[Placement, ...]) -> None:
        self.result.outputs[node] = placements
        if isinstance(node.meta.get("val"), TensorSpec):
            self.versions[node] = [placements[0]]

    def _current(self, node: fx.Node) -> Placement:
        """The placement to reason from: a reduced version, where there is one, stands for a partial sum."""
        versions = self.versions[node]
        if isinstance(versions[0], Partial):
            if self.activations is not None:
                return versions[min(1, len(versions) - 1)]
            return next((p for p in (CHUNK, REPLICATE) if p in versions), versions[0])
        if isinstance(versions[0], Chunk) and not self.updating and self._is_gathered_to_be_read(node):
            return REPLICATE
        return versions[0]

    def _is_gathered_to_be_read(self, node: fx.Node) -> bool:
        """A parameter, or what is cast before it is gathered."""
        root = self.aliasing.roots[node]
        return root in self.parameters or root in self.early_casts

    def _seen_by(self, node: fx.Node, operand: fx.Node) -> Placement:
        """How an operator sees an operand before it says how it wants it.

        Whoever writes into a parameter of which ranks have chunks writes into these: a teacher follows in the step.
        """
        own = self.versions[operand][0]
        writes = isinstance(own, Chunk) and operand in written_arguments(node)
        return own if writes or node in self.early_casts else self._current(operand)

    def _reduced(self, node: fx.Node) -> Placement:
        """As :meth:`_current`, partial sums reduced into chunks."""
        current = self._current(node)
        return CHUNK if current == Partial() and node.meta["val"].shape else current

    def _begin_update(self) -> None:
        """From here on each rank sees its own chunk of the parameters that are stored whole."""
        self.updating = True
        for node, entry in self.parameters.items():
            if self.shards_state and entry.mutated and self.versions[node][0] == REPLICATE and entry.value.shape:
                self.versions[node] = [CHUNK, REPLICATE]
        for node, shown in self.shown.items():
            # hooks write into the reduced gradient, so that is what the update must read: not a sum of its own
            wanted = self.plan.output_placement(self.axis, shown, self.versions[node][0])
            as_updated = not self.shards_state or wanted == CHUNK
            if self.versions[node] == [Partial()] and as_updated:
                self.versions[node].append(wanted)
        for node in self.updated_whole:
            self.versions[node] = [REPLICATE, *(p for p in self.versions[node] if p != REPLICATE)]

    def _fits(self, call: OpCall, layout: Layout) -> bool:
        """Whether the pieces that outer axes leave can be split as a layout says."""
        if not self.outer:
            return True
        placed = [*zip(call.specs, layout.inputs, strict=True), *zip(call.outputs, layout.outputs, strict=False)]
        theirs = [plan.layouts[call.node] for plan in self.outer]
        for position, (spec, placement) in enumerate(placed):
            if not isinstance(placement, Shard) or spec is None:
                continue
            sizes = {spec.shape[placement.dim]}
            for plan, chosen in zip(self.outer, theirs, strict=True):
                other = (*chosen.inputs, *chosen.outputs)[position]
                if isinstance(other, Shard) and other.dim == placement.dim:
                    sizes = plan.axis.shard_sizes(sizes, other.outer)
            if not all(self.axis.splits(size, placement.outer) for size in sizes):
                return False
        return True

    def _gathered_bytes(self, call: OpCall) -> int:
        return sum(s.bytes for s, p in zip(call.specs, call.current, strict=True) if not isinstance(p, Replicate))

    def _operand_cost(self, call: OpCall, index: int, want: Placement) -> float:
        node = call.operands[index]
        section = info_of(call.node).section
        found = min(cost(call.specs[index], have, want, section, self.axis) for have in self.versions[node])
        moves = found >= LATENCY and self.activations is not None and self.activations.origin(node) is not None
        return found * _NEVER if moves else found

    def _cost(self, call: OpCall, layout: Layout) -> float:
        total = sum(self._operand_cost(call, i, want) for i, want in enumerate(layout.inputs))
        # A partial sum must be reduced some day; to move something just to keep it partial only puts that off.
        leaving = sum(
            s.bytes for s, p in zip(call.outputs, layout.outputs, strict=False) if isinstance(p, Partial) and s
        )
        kept = leaving > 0 and any(isinstance(p, Partial) for p in layout.inputs)
        return total + (2.0 * leaving if kept and total >= LATENCY else 1e-3 * leaving)

    def _may_change(self, operand: fx.Node, writer: fx.Node) -> bool:
        """Whether what is written may lie otherwise from here on: nothing sees that, nor is it wanted whole."""
        root = self.aliasing.roots[operand]
        is_free = root.op != "placeholder" and self.forced.get(root) != REPLICATE
        return is_free and not self.aliasing.others_read_later(operand, writer)

    def _written(self, operand: fx.Node, placement: Placement, writer: fx.Node) -> None:
        others = self.aliasing.others_read_later(operand, writer)
        lost = operand in self.detached and self.aliasing.roots[operand] in self.kept
        if lost or (others and (operand in self.detached or any(o in self.detached for o in others))):
            self._make_whole(operand)
            other = named(others[0] if others else operand)
            raise ExpansionError(
                f"{named(writer)} writes into a tensor, and the result of {other} is another view of it that is read "
                f"or kept afterwards and lies otherwise on the ranks of {self.axis.name}; write to a copy, or keep "
                "a copy (`.clone()`)"
            )
        self.versions[operand] = [placement]
        for alias in self.aliasing.groups[self.aliasing.roots[operand]]:
            if alias is not operand and alias in self.versions:
                del self.versions[alias][1:]

    def _siblings(self, root: fx.Node) -> list[fx.Node]:
        """What one line of a loop creates, turn by turn: decided at once, for each decision is another pass."""
        info, spec = info_of(root), root.meta["val"]

        def is_alike(node: fx.Node) -> bool:
            other = info_of(node)
            same = (other.source, other.section) == (info.source, info.section)
            return same and node.meta["val"] == spec and node not in self.forced

        return [root, *filter(is_alike, self.graph.find_nodes(op="call_function", target=root.target))]

    def _make_whole(self, operand: fx.Node) -> None:
        """Create the storage that ``operand`` is in on every rank as a whole; what is updated is gathered for that."""
        root = self.aliasing.roots[operand]
        if self.updating and root in self.kept - self.updated_whole:
            self.updated_whole.add(root)
            raise StartAgain
        if root.op != "placeholder" and self.forced.get(root) != REPLICATE:
            # a write into all of it had made it pieces; as pieces from the start, its views are views of them
            now = self.versions[root][0]
            changed = self.result.outputs[root] == (REPLICATE,) and isinstance(now, Shard)
            if changed and root not in self.forced:
                self.forced.update(dict.fromkeys(self._siblings(root), now))
            else:
                self.forced[root] = REPLICATE
            raise StartAgain
