"""For a choice of storages to drop: the nodes to recompute, their places, and the memory in use."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from torch import fx

from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.stages.passes.remat.values import Values


@dataclass(frozen=True)
class Plan:
    """A choice and what follows from it.

    Args:
        dropped: roots of the storages that are dropped after the forward pass.
        places: the recomputed nodes, each with the position of the node that it runs before.
        peak: the most bytes of activations alive at once.
    """

    dropped: frozenset[fx.Node]
    places: dict[fx.Node, int]
    peak: int

    def again(self, values: Values) -> list[fx.Node]:
        """The recomputed nodes, in order."""
        return sorted(self.places, key=lambda node: (self.places[node], values.position[node]))

    def cost(self, values: Values) -> int:
        """The cost of recomputation."""
        return sum(values.costs[node] or 0 for node in self.places)


def chain(values: Values, dropped: Collection[fx.Node]) -> tuple[set[fx.Node], set[fx.Node]]:
    """(nodes to recompute, roots that must be kept for them) if these storages are dropped."""
    again, kept = set[fx.Node](), set[fx.Node]()
    todo = [node for root in dropped for node in read_late(values, root)]
    while todo:
        node = todo.pop()
        if node in again or node in values.free:
            continue
        root = values.roots[node]
        if root is not node or isinstance(node.meta.get("val"), TensorSpec):
            if root not in dropped and root in values.late_readers or root not in values.made:
                continue
            if root not in dropped and root not in values.repeatable:
                kept.add(root)
                continue
        again.add(node)
        todo += values.needed_by(node)
    return again, kept


def read_late(values: Values, root: fx.Node) -> Iterator[fx.Node]:
    """The names under which the backward pass reads a storage, and the nodes that wrote into it."""
    yield from (operand for _, operand in values.late_readers[root])
    yield from values.writers[root]


class Planner:
    """Works out plans, a few hundred of them for one graph.

    Args:
        values: of that graph.
    """

    def __init__(self, values: Values) -> None:
        self.values = values
        self._scale = len(values.order) + 1
        self._early = {root: self._last_early_reader(root) for root in values.activations}
        self._late = {
            root: max(values.position[reader] for reader, _ in readers) for root, readers in values.late_readers.items()
        }

    def plan(self, dropped: Iterable[fx.Node]) -> Plan:
        """The plan for dropping these storages."""
        chosen = frozenset(dropped)
        again, _ = chain(self.values, chosen)
        places = self._places(chosen, again)
        return Plan(chosen, places, self._peak(chosen, places))

    # ------------------------------------------------------------------ pieces
    def _last_early_reader(self, root: fx.Node) -> int:
        values = self.values
        readers = (user for alias in values.aliases[root] for user in alias.users)
        early = (values.position[n] for n in readers if values.position[n] < values.border)
        return max(early, default=values.position[root])

    def _places(self, dropped: Collection[fx.Node], again: set[fx.Node]) -> dict[fx.Node, int]:
        """Each in front of its first reader in the backward pass, or of what reads it there."""
        values = self.values
        places: dict[fx.Node, int] = {}

        def before(node: fx.Node, place: int) -> None:
            places[node] = min(place, places.get(node, place))

        for root in dropped:
            for reader, operand in values.late_readers[root]:
                for node in (operand, *values.writers[root]):
                    before(node, values.position[reader])
        for node in sorted(again, key=values.position.__getitem__, reverse=True):
            for earlier in values.needed_by(node):
                if earlier in again:
                    before(earlier, places[node])
        return places

    def _peak(self, dropped: Collection[fx.Node], places: dict[fx.Node, int]) -> int:
        """The most bytes of activations alive at once; a storage is alive from its maker to its last reader."""
        values, scale = self.values, self._scale
        ends: dict[fx.Node, int] = {}
        starts: dict[fx.Node, int] = {}  # of what is recomputed
        until: dict[fx.Node, int] = {}
        changes: list[tuple[int, int, int]] = []

        def alive(start: int, end: int, size: int) -> None:
            changes.append((start, 0, size))
            changes.append((end, 1, -size))

        for node, place in places.items():
            now = place * scale + values.position[node]
            root = values.roots[node]
            starts[root] = min(now, starts.get(root, now))
            until[root] = max(now, until.get(root, now))
            for operand in values.operands_again(node):
                table = until if operand in places else ends
                source = values.roots[operand]
                table[source] = max(now, table.get(source, now))
            if node is values.drawn.get(root):
                alive(values.position[node] * scale + scale - 1, now, values.packed_size(root))
        for root in values.activations:
            last = self._early[root] if root in dropped else max(self._early[root], self._late.get(root, 0))
            start, end = values.position[root] * scale + scale - 1, last * scale + scale - 1
            alive(start, max(end, ends.get(root, end)), values.size(root))
        for root, start in starts.items():
            end = until[root]
            if root in dropped:
                end = max(end, self._late[root] * scale + scale - 1)
            alive(start, end, values.size(root))
        changes.sort()
        return max(itertools.accumulate(size for _, _, size in changes), default=0)
