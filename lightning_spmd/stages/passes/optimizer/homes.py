"""Where in the update each node belongs: to which parameter, which communication buckets, which part of the memory.

Nodes of one home may be computed together: nothing then waits for a bucket that it would not wait for anyway, and the
tensors of one home fit into the cache, so a list operator finds there what the one before it left.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass

from torch import fx

from lightning_spmd.ir.dependence import Dependences
from lightning_spmd.ir.first import first
from lightning_spmd.ir.node_info import Section, TensorSpec, info_of, value_of
from lightning_spmd.ir.placement import Placement, Shard
from lightning_spmd.ir.signature import InputRole
from lightning_spmd.ir.steps import ShardedStep
from lightning_spmd.ir.verify import is_wait, starts_collective

WORKING_SET = 512 * 1024
"""Bytes of parameters whose update is computed together on the host. With four such lists (AdamW) 256 KiB to 1 MiB were
fastest at every size of tensor; above, list operators push one another's data out of the cache (three times slower at
16 MiB), below, they are too short."""

UPDATE = (Section.CLIP, Section.OPTIMIZER)
Waits = frozenset[fx.Node]
_NONE: Waits = frozenset()


@dataclass(frozen=True)
class Home:
    """What nodes must agree on to be computed together.

    Args:
        section: clipping or optimizer.
        waits: the collectives that must have arrived.
        settings: hyper-parameters in the parameter's update: one list after the other has the same parameters.
        part: a number for each working set of parameters; None for what belongs to no single parameter.
    """

    section: Section
    waits: Waits
    settings: frozenset[fx.Node]
    part: Hashable


class Homes:
    """The home of every node of the update.

    Args:
        step: the graph, before it is changed.
        dependences: of its graph.
    """

    def __init__(self, step: ShardedStep, dependences: Dependences) -> None:
        self.nodes = [n for n in dependences.order if n.op == "call_function" and info_of(n).section in UPDATE]
        self._inside = set(self.nodes)
        self.owners: dict[fx.Node, str] = {}
        self._find_owners(step)
        self._waits = _waits(dependences)
        self._last = _last_waits(dependences)
        self._bucket: dict[str, Waits] = defaultdict(frozenset)
        for node in self.nodes:
            owner = self.owners.get(node)
            if owner is not None and info_of(node).section is Section.OPTIMIZER:
                self._bucket[owner] |= self._waits[node]
        self._settings = self._find_settings(step)
        self._parts = self._find_parts(step)

    def __contains__(self, node: fx.Node) -> bool:
        return node in self._inside

    def of(self, node: fx.Node) -> Home:
        """The home of a node of the update.

        What the optimizer does to a parameter before it needs the gradient (weight decay) belongs to the gradient's
        bucket: an update is then one piece that can be moved. What reads a gradient waits for no more than it reads.
        """
        section = info_of(node).section
        owner = self.owners.get(node)
        waits = self._waits[node]
        if owner is not None and section is Section.OPTIMIZER and not waits & self._last:
            waits |= self._bucket[owner]
        if owner is None:
            return Home(section, waits, _NONE, None)
        return Home(section, waits, self._settings[owner], self._parts[owner])

    # ------------------------------------------------------------------ whose
    def _find_owners(self, step: ShardedStep) -> None:
        """A value belongs to a parameter if it is computed from it or its state alone, or if only such values read it.

        The second half finds the owners of gradients, and of counters that start within the graph.
        """
        placeholders = [n for n in step.graph_module.graph.nodes if n.op == "placeholder"]
        for node, entry in zip(placeholders, step.signature.inputs, strict=True):
            if entry.role in (InputRole.PARAMETER, InputRole.OPTIMIZER_STATE):
                self.owners[node] = entry.key[0]
        self._follow()
        claims: dict[fx.Node, set[str]] = defaultdict(set)
        for node in reversed(self.nodes):
            if node not in self.owners and len(claims[node]) == 1:
                self.owners[node] = first(claims[node], "claim")
            if (owner := self.owners.get(node)) is not None:
                for operand in node.all_input_nodes:
                    claims[operand].add(owner)
        for node, owners in claims.items():
            if node.op != "placeholder" and len(owners) == 1:
                self.owners.setdefault(node, first(owners, "owner"))
        self._follow()

    def _follow(self) -> None:
        for node in self.nodes:
            owners = {self.owners[n] for n in node.all_input_nodes if n in self.owners}
            if len(owners) == 1:
                self.owners.setdefault(node, owners.pop())

    # ------------------------------------------------------------------ which part
    def _find_settings(self, step: ShardedStep) -> dict[str, frozenset[fx.Node]]:
        """The hyper-parameters that each parameter's update reads, also through numbers computed from them."""
        placeholders = [n for n in step.graph_module.graph.nodes if n.op == "placeholder"]
        inputs = zip(placeholders, step.signature.inputs, strict=True)
        sources = {node: frozenset({node}) for node, entry in inputs if entry.role is InputRole.HYPER_PARAMETER}
        found: dict[str, frozenset[fx.Node]] = defaultdict(frozenset)
        for node in self.nodes:
            read = _NONE.union(*(sources.get(n, _NONE) for n in node.all_input_nodes))
            if (owner := self.owners.get(node)) is not None:
                found[owner] |= read
            elif not isinstance(value_of(node), TensorSpec):
                sources[node] = read
        return found

    def _find_parts(self, step: ShardedStep) -> dict[str, int]:
        sizes = {
            e.key[0]: (_global_bytes(step, e.value, e.placements), e.value.device.type == "cpu")
            for e in step.signature.inputs
            if e.role is InputRole.PARAMETER and isinstance(e.value, TensorSpec)
        }
        parts: dict[str, int] = {}
        open_parts: dict[Hashable, tuple[int, int]] = {}
        count = 0
        for owner in dict.fromkeys(self.owners[n] for n in self.nodes if n in self.owners):
            size, limited = sizes.get(owner, (0, False))
            kind = (self._bucket[owner], self._settings[owner])
            part, used = open_parts.get(kind, (-1, 0))
            if part < 0 or (limited and used + size > WORKING_SET):
                part, used, count = count, 0, count + 1
            parts[owner] = part
            open_parts[kind] = (part, used + size)
        return parts


def _global_bytes(step: ShardedStep, spec: TensorSpec, placements: tuple[Placement, ...]) -> int:
    """Bytes of the whole tensor: ranks whose pieces differ must cut at the same places."""
    size = spec.bytes
    for axis, placement in zip(step.axes, placements, strict=True):
        if isinstance(placement, Shard) and axis.split[axis.rank]:
            size = size * axis.total // axis.split[axis.rank]
    return size


def _waits(dependences: Dependences) -> dict[fx.Node, Waits]:
    """For every node the waits that must come before it."""
    found: dict[fx.Node, Waits] = {}
    for node in dependences.order:
        earlier = {found[n] for n in dependences.before[node]}
        waits = _NONE.union(*earlier) if len(earlier) != 1 else earlier.pop()
        found[node] = waits | {node} if is_wait(node) else waits
    return found


def _last_waits(dependences: Dependences) -> Waits:
    """The waits that no other collective comes after: gradients', not those within the backward pass."""
    followed: dict[fx.Node, bool] = {}
    for node in reversed(dependences.order):
        followed[node] = any(starts_collective(n) or followed[n] for n in dependences.after[node])
    return frozenset(n for n in dependences.order if is_wait(n) and not followed[n])


def is_on_host(node: fx.Node) -> bool:
    """Whether all tensors that the node reads and makes are in host memory."""
    values = [value_of(n) for n in (node, *node.all_input_nodes)]
    return all(not isinstance(v, TensorSpec) or v.device.type == "cpu" for v in values)
