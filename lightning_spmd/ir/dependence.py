"""The order that nodes must keep: by data, writes to shared storage, random draws and questions to other ranks.

``Dependences(graph)`` derives constraints from the present order, which is assumed to be correct. Any other order that
respects them computes the same. Stages that move nodes ask this table, and the verifier checks the result again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from torch import fx

from lightning_spmd.ir.aliasing import Region, overlapping, storage_regions, written_arguments
from lightning_spmd.ir.effects import draws_random
from lightning_spmd.ir.reads import is_check
from lightning_spmd.ir.verify import copies_nothing, is_wait, starts_collective

T = TypeVar("T")


@dataclass
class _History:
    """Last writers of a storage and its readers since then, by piece."""

    writers: dict[fx.Node | None, fx.Node] = field(default_factory=dict[fx.Node | None, fx.Node])
    readers: dict[fx.Node | None, list[fx.Node]] = field(default_factory=dict[fx.Node | None, list[fx.Node]])


class Dependences:
    """Predecessors and successors of every node of a graph.

    Args:
        graph: in an order that is right.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.order: list[fx.Node] = list(graph.nodes)
        self.position: dict[fx.Node, int] = {node: i for i, node in enumerate(self.order)}
        self.regions: dict[fx.Node, Region] = storage_regions(graph)
        self.before: dict[fx.Node, set[fx.Node]] = {node: set(node.all_input_nodes) for node in self.order}
        self._add_hazards()
        self._add_draws()
        self._add_decisions()
        self.after: dict[fx.Node, set[fx.Node]] = {node: set() for node in self.order}
        for node, earlier in self.before.items():
            for other in earlier:
                self.after[other].add(node)

    def _add_hazards(self) -> None:
        histories: dict[fx.Node, _History] = {}
        writes = {node: set(found) for node in self.order if (found := written_arguments(node))}
        changed = {self.regions[operand][0] for found in writes.values() for operand in found}
        for node in self.order:
            written = writes.get(node, set[fx.Node]())
            operands = [operand for operand in _read_by(node) if self.regions[operand][0] in changed]
            for operand in operands:
                root, piece = self.regions[operand]
                history = histories.setdefault(root, _History())
                self.before[node].update(_overlapping(history.writers, piece))
                if operand in written:
                    for readers in _overlapping(history.readers, piece):
                        self.before[node].update(readers)
            for operand in operands:
                root, piece = self.regions[operand]
                history = histories[root]
                if operand in written:
                    if piece is None:
                        history.writers.clear()
                        history.readers.clear()
                    history.writers[piece] = node
                    history.readers[piece] = []
                else:
                    history.readers.setdefault(piece, []).append(node)
            self.before[node].discard(node)

    def _add_draws(self) -> None:
        """Random operators, and what chooses their stream, stay in order: each draw moves the generator."""
        last: fx.Node | None = None
        for node in self.order:
            if not draws_random(node):
                continue
            if last is not None:
                self.before[node].add(last)
            last = node

    def _add_decisions(self) -> None:
        """Questions that may end a run stay in order, and in front of what outlives the run."""
        last: fx.Node | None = None
        for node in self.order:
            if is_check(node) or (last is not None and self._outlives(node)):
                self.before[node].update([] if last is None else [last])
            last = node if is_check(node) else last

    def _outlives(self, node: fx.Node) -> bool:
        return any(self.regions[written][0].op in ("placeholder", "get_attr") for written in written_arguments(node))

    def closure(self, starts: Iterable[fx.Node]) -> set[fx.Node]:
        """``starts`` and everything that must come after one of them."""
        return _reach(starts, self.after)

    def origins(self, ends: Iterable[fx.Node]) -> set[fx.Node]:
        """``ends`` and everything that must come before one of them."""
        return _reach(ends, self.before)


def _read_by(node: fx.Node) -> list[fx.Node]:
    """Values that a node works on; what a collective reads it reads until it has been waited for."""
    if not is_wait(node):
        return node.all_input_nodes
    start = node.all_input_nodes[0]
    return [start, *start.all_input_nodes] if copies_nothing(start) else [start]


def _overlapping(by_piece: dict[fx.Node | None, T], piece: fx.Node | None) -> list[T]:
    return [value for other, value in by_piece.items() if overlapping(piece, other)]


def _reach(starts: Iterable[fx.Node], edges: dict[fx.Node, set[fx.Node]]) -> set[fx.Node]:
    found = set(starts)
    todo = list(found)
    while todo:
        for other in edges[todo.pop()]:
            if other not in found:
                found.add(other)
                todo.append(other)
    return found


@dataclass(frozen=True)
class Tail:
    """Nodes that follow from the end of collectives alone: waits, and the nodes that read their results.

    Args:
        starts: the collectives, in order.
        nodes: the waits and everything that depends on them, in order. No other collective depends on them.
        returns: whether the iteration's outputs need it.
    """

    starts: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]
    returns: bool


def tails(dependences: Dependences) -> list[Tail]:
    """The tails of a graph, in order of their first collective. Collectives that others depend on have none.

    Collectives whose results meet (in a fused update, in the norm of all gradients) share a tail.
    """
    order = dependences.order
    output = order[-1]
    found: list[tuple[set[fx.Node], set[fx.Node]]] = []
    for start in filter(starts_collective, order):
        reached = dependences.closure(n for n in start.users if is_wait(n))
        if any(starts_collective(n) or is_check(n) for n in reached):  # what Python decides is decided early
            continue
        joined: tuple[set[fx.Node], set[fx.Node]] = ({start}, reached)
        apart: list[tuple[set[fx.Node], set[fx.Node]]] = []
        for starts, nodes in found:
            if (nodes & joined[1]) - {output}:
                joined = (joined[0] | starts, joined[1] | nodes)
            else:
                apart.append((starts, nodes))
        found = [*apart, joined]
    position = dependences.position
    result = [
        Tail(
            tuple(sorted(starts, key=position.__getitem__)),
            tuple(sorted(nodes - {output}, key=position.__getitem__)),
            output in nodes,
        )
        for starts, nodes in found
    ]
    return sorted(result, key=lambda tail: position[tail.starts[0]])


def reorder(graph: fx.Graph, order: Sequence[fx.Node]) -> None:
    """Put the nodes of ``graph`` into ``order``, which holds each of them once and ends in the output."""
    anchor = order[-1]
    for node in order[:-1]:
        anchor.prepend(node)
