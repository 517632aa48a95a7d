"""What the parts of an iteration read and write of the state that outlives it, by name.

Names let the end of one iteration be compared with the beginning of the next one, which may be another graph.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import fx

from lightning_spmd.ir.aliasing import storage_regions, written_arguments
from lightning_spmd.ir.reads import is_check
from lightning_spmd.ir.signature import InputRole
from lightning_spmd.ir.steps import ShardedStep

LIVE = (InputRole.PARAMETER, InputRole.BUFFER, InputRole.OPTIMIZER_STATE)
"""Roles of what outlives an iteration, where it is: the next one reads it anew."""
State = tuple[InputRole, tuple[Any, ...]]
"""Role and key of a graph input."""


@dataclass(frozen=True)
class Touch:
    """State that some nodes read and write."""

    reads: frozenset[State] = frozenset()
    writes: frozenset[State] = frozenset()

    def __or__(self, other: Touch) -> Touch:
        return Touch(self.reads | other.reads, self.writes | other.writes)

    def conflicts(self, later: Touch) -> bool:
        """Whether ``later`` has to stay behind this."""
        return bool(self.writes & (later.reads | later.writes) or self.reads & later.writes)


class Touches:
    """The touch of every node of a step."""

    def __init__(self, step: ShardedStep) -> None:
        graph = step.graph_module.graph
        self._regions = storage_regions(graph)
        placeholders = [n for n in graph.nodes if n.op == "placeholder"]
        self.state: dict[fx.Node, State] = {
            node: (entry.role, entry.key) for node, entry in zip(placeholders, step.signature.inputs, strict=True)
        }

    def of(self, node: fx.Node) -> Touch:
        """The touch of one node. A view reads nothing; a reader of the view does."""
        if node.op in ("placeholder", "output"):
            return Touch()
        written = set(written_arguments(node))
        if not written and self._is_view(node):
            return Touch()
        reads = self._states(n for n in node.all_input_nodes if n not in written)
        return Touch(reads, self._states(written))

    def of_all(self, nodes: Iterable[fx.Node]) -> Touch:
        """The touch of several nodes together."""
        total = Touch()
        for node in nodes:
            total |= self.of(node)
        return total

    def root(self, node: fx.Node) -> fx.Node:
        """The node whose storage the node's value may share."""
        return self._regions[node][0]

    def _is_view(self, node: fx.Node) -> bool:
        return self._regions[node][0] is not node

    def _states(self, nodes: Iterable[fx.Node]) -> frozenset[State]:
        roots = (self._regions[n][0] for n in nodes)
        return frozenset(self.state[root] for root in roots if root in self.state)


def first_conflict(touch: Touch, touches: Touches, nodes: Iterable[fx.Node]) -> fx.Node | None:
    """The first of ``nodes`` that must come after a deferred node with this touch.

    That is the first that touches the same state, or at which Python may end the run.
    """
    return next((node for node in nodes if is_check(node) or touch.conflicts(touches.of(node))), None)
