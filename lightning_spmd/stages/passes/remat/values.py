"""Storages that the forward pass keeps for the backward pass, and the nodes that recompute each of them.

A *storage* is named by its root (``ir.aliasing``); views, in-place results and items of a split are names of it. It can
be recomputed if every operator that made it or wrote into it can be repeated, without other effects and with the same
bits, from values that are unchanged. All of this holds on all ranks: sizes are those of the rank with most rows.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import torch
from torch import fx

from lightning_spmd.cost.recompute import CALL, recompute_cost
from lightning_spmd.ir.aliasing import storage_roots, written_arguments
from lightning_spmd.ir.effects import is_unnoticed, leaving_storages
from lightning_spmd.ir.node_info import Section, TensorSpec, info_of
from lightning_spmd.ir.placement import Placement, Shard
from lightning_spmd.ir.signature import InputRole
from lightning_spmd.ir.steps import ShardedStep

_aten = torch.ops.aten
WITHOUT_STATISTICS: dict[Any, tuple[int, int]] = {
    _aten.native_batch_norm.default: (3, 4),
    _aten.cudnn_batch_norm.default: (3, 4),
}
"""Batch norms that give the same without running statistics to update, where they train; positions of these."""
_TRAINS = 5  # the position of `training` in both
_DRAWS = {_aten.bernoulli_.float}
"""Draws of zeros and ones: kept as booleans, a quarter of their bytes or half of them."""
_EMPTY = {_aten.empty_like.default, _aten.empty.memory_format, _aten.new_empty.default, _aten.empty_strided.default}


class Values:
    """The storages of a step's forward pass.

    Args:
        step: with a forward and a backward pass; the order is that of the graph.
    """

    def __init__(self, step: ShardedStep) -> None:
        graph = step.graph_module.graph
        self.graph = graph
        self.order: list[fx.Node] = list(graph.nodes)
        self.position = {node: i for i, node in enumerate(self.order)}
        self.roots = storage_roots(graph)
        backward = [i for i, n in enumerate(self.order) if n.op == "call_function" and _is_backward(n)]
        self.border = backward[0] if backward else len(self.order)
        self.end = backward[-1] if backward else len(self.order)
        self.writers: defaultdict[fx.Node, list[fx.Node]] = defaultdict(list)
        for node in self.order:
            for operand in written_arguments(node):
                self.writers[self.roots[operand]].append(node)
        self.aliases: defaultdict[fx.Node, list[fx.Node]] = defaultdict(list)
        for node, root in self.roots.items():
            self.aliases[root].append(node)
        self._sizes = _Sizes(step)
        self._parameters = {
            node
            for node, entry in zip(graph.find_nodes(op="placeholder"), step.signature.inputs, strict=True)
            if entry.role is InputRole.PARAMETER
        }
        self._leaving = leaving_storages(graph, self.roots)
        self.costs = {n: self._cost(n) for n in self.order[: self.border] if n.op == "call_function"}

    # ------------------------------------------------------------------ what there is
    def size(self, node: fx.Node) -> int:
        """Bytes of the one tensor that a node produces, 0 for anything else."""
        return self._sizes.bytes(node)

    @cached_property
    def free(self) -> set[fx.Node]:
        """Values that need no memory of their own: inputs, numbers, values computed from parameters alone."""
        found: set[fx.Node] = set()
        weights = set(self._parameters)
        for node in self.order[: self.border]:
            inputs = node.all_input_nodes
            if node.op != "call_function" or isinstance(node.meta.get("val"), (bool, int, float)):
                found.add(node)
            elif inputs and all(n in weights for n in inputs):
                weights.add(node)
        return found | weights

    @cached_property
    def activations(self) -> list[fx.Node]:
        """Roots of the storages that the forward pass makes and the iteration frees, in order."""
        return [
            node
            for node in self.order[: self.border]
            if self.roots[node] is node and node not in self.free and node not in self._leaving and self.size(node)
        ]

    @cached_property
    def made(self) -> set[fx.Node]:
        """The same as a set."""
        return set(self.activations)

    def packed_size(self, node: fx.Node) -> int:
        """Bytes that a draw keeps as booleans, given its root or itself; 0 for anything else."""
        root = self.roots[node]
        drawn = self.drawn.get(root)
        return self._sizes.numel(drawn) if drawn is not None and node in (root, drawn) else 0

    @cached_property
    def late_readers(self) -> dict[fx.Node, list[tuple[fx.Node, fx.Node]]]:
        """By root, who reads it after the forward pass, and under which name; in order."""
        found: dict[fx.Node, list[tuple[fx.Node, fx.Node]]] = {}
        for reader in self.order[self.border :]:
            for operand in reader.all_input_nodes:
                root = self.roots[operand]
                if self.position[root] < self.border and self.position[operand] < self.border:
                    found.setdefault(root, []).append((reader, operand))
        return found

    @cached_property
    def repeatable(self) -> set[fx.Node]:
        """Roots of storages that can be made again."""
        return {root for root in self.activations if self._can_be_made_again(root)}

    def needed_by(self, node: fx.Node) -> list[fx.Node]:
        """The nodes that must run before a node runs again: its operands, and the nodes that wrote into them."""
        found = dict.fromkeys(self.operands_again(node))
        for operand in list(found):
            earlier = (w for w in self.writers[self.roots[operand]] if self.position[w] < self.position[node])
            found.update(dict.fromkeys(earlier))
        return list(found)

    def operands_again(self, node: fx.Node) -> list[fx.Node]:
        """The operands of a node when it runs again."""
        if node in self._draws:
            return []
        silent = self.statistics(node)
        return [n for n in node.all_input_nodes if n not in silent]

    @cached_property
    def drawn(self) -> dict[fx.Node, fx.Node]:
        """By root, the draw of zeros and ones that fills it, to be kept as booleans."""
        found: dict[fx.Node, fx.Node] = {}
        for root in self.activations:
            writers = self.writers[root]
            first = writers[0] if writers else None
            if first is None or first.target not in _DRAWS or root.target not in _EMPTY:
                continue
            if list(root.users) == [first] and first.all_input_nodes == [root] and root.meta["val"].dtype.itemsize > 1:
                found[root] = first
        return found

    # ------------------------------------------------------------------ pieces
    def _cost(self, node: fx.Node) -> int | None:
        """What repeating a node costs; None: it must not be."""
        known = self._sizes.is_known(node)
        if node in self._draws:
            return CALL + self._sizes.numel(node) * (1 + node.meta["val"].dtype.itemsize) if known else None
        known = known and is_unnoticed(node)
        return recompute_cost(node, self._sizes.numel) if known else None

    @cached_property
    def _draws(self) -> set[fx.Node]:
        return set(self.drawn.values())

    def statistics(self, node: fx.Node) -> list[fx.Node]:
        """The running statistics that a batch norm would update."""
        positions = WITHOUT_STATISTICS.get(node.target)
        if positions is None or not node.args[_TRAINS]:
            return []
        return [n for i in positions if isinstance(n := node.args[i], fx.Node)]

    def _can_be_made_again(self, root: fx.Node) -> bool:
        makers = [root, *self.writers[root]]
        if root.target is operator.getitem:
            makers = [root.all_input_nodes[0], *makers]
        last_write = max((self.position[w] for w in self.writers[root]), default=-1)
        if last_write >= self.border:
            return False
        early = [n for n in self.aliases[root] if self.position[n] < self.border]
        for maker in (*makers, *early):
            into = {self.roots[o] for o in written_arguments(maker) if o not in self.statistics(maker)}
            if self.costs.get(maker) is None or into - {root}:
                return False
        readers = {reader for alias in self.aliases[root] for reader in alias.users}
        looking = {n for n in readers if self.roots[n] is not root and n not in makers}
        if any(self.position[n] < last_write for n in looking):
            return False  # something saw it half made
        return all(self._is_lasting(n, root) for n in (*makers, *early))

    def _is_lasting(self, node: fx.Node, own: fx.Node) -> bool:
        """Whether what a node reads, beside its own storage, stays as it is until the backward pass has run."""
        for operand in self.operands_again(node):
            root = self.roots[operand]
            if root is own:
                continue
            if any(self.position[node] < self.position[w] <= self.end for w in self.writers[root]):
                return False
        return True


class _Sizes:
    """Sizes that are the same on every rank, whatever rows it holds: those of the rank with most of them."""

    def __init__(self, step: ShardedStep) -> None:
        self._uneven = [(i, axis) for i, axis in enumerate(step.axes) if not axis.is_even]

    def is_known(self, node: fx.Node) -> bool:
        """Whether the node's size can be told for other ranks."""
        return not self._uneven or _placements(node) is not None

    def numel(self, node: fx.Node) -> int:
        """Elements of what a node produces, of the first tensor of several."""
        return sum(self._scaled(node, spec.numel, i) for i, spec in enumerate(_tensors(node.meta.get("val"))[:1]))

    def bytes(self, node: fx.Node) -> int:
        """Bytes of one tensor, from its first element to the last one; 0 where other ranks' size cannot be told."""
        spec = node.meta.get("val")
        if not isinstance(spec, TensorSpec) or 0 in spec.shape or not self.is_known(node):
            return 0
        reach = 1 + sum((size - 1) * stride for size, stride in zip(spec.shape, spec.stride, strict=True))
        return self._scaled(node, (spec.numel if self._uneven else reach) * spec.dtype.itemsize, 0)  # gaps do not scale

    def _scaled(self, node: fx.Node, size: int, result: int) -> int:
        placements = _placements(node, result) or ()
        for index, axis in self._uneven:
            if index < len(placements) and isinstance(placements[index], Shard):
                size = size * max(axis.split) // axis.split[axis.rank]
        return size


def _placements(node: fx.Node, result: int = 0) -> tuple[Placement, ...] | None:
    found: Any = node.meta.get("placements")
    return found[result] if found and isinstance(found[0], tuple) else found


def _tensors(value: Any) -> list[TensorSpec]:
    if isinstance(value, TensorSpec):
        return [value]
    items: Iterable[Any] = value if isinstance(value, (tuple, list)) else ()  # pyright: ignore[reportUnknownVariableType]
    return [spec for item in items for spec in _tensors(item)]


def _is_backward(node: fx.Node) -> bool:
    return info_of(node).section is Section.BACKWARD
