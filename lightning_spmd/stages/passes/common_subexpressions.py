"""Compute equal expressions once, collectives included.

Before::

    a = mul(x, y); use(a); b = mul(x, y); use(b)
    r = all_reduce(g); v = wait(r); use(v); s = all_reduce(g); w = wait(s); use(w)

After::

    a = mul(x, y); use(a); use(a)
    r = all_reduce(g); v = wait(r); use(v); use(v)

Two nodes are equal if operator and arguments are, and if no storage that they read is written in between. They stay
apart where sharing could be seen: a result that something writes into, or that leaves the graph (two states of an
optimizer begin as the same zeros). Random draws, in-place operators and operators that are not torch's own are never
merged.

Recomputation stays. A forward value and its copy in the backward pass are what activation checkpointing asks for, so
parts of the iteration are kept apart; and within the backward pass a value is used again only while it is alive anyway
(checkpoints inside checkpoints recompute there twice), or if it is a few bytes that no operand goes into. Views cost no
memory and are merged everywhere, also those that are written through.

Only all-reduces are merged, no gathers: parameters gathered again for the backward pass are meant to be. Does nothing
to a graph without duplicates. Bitwise.

The collectives' half is what ``torch.distributed._spmd`` did in ``_dedup_collectives``.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable
from typing import Any

import torch
from torch import fx

from lightning_spmd.ir.aliasing import storage_roots, written_arguments
from lightning_spmd.ir.effects import is_pure, is_same_on_all_ranks, leaving_storages, replace_reads
from lightning_spmd.ir.geometry import is_view
from lightning_spmd.ir.node_info import Section, TensorSpec, info_of, value_of
from lightning_spmd.ir.steps import ShardedStep
from lightning_spmd.ir.verify import is_wait, stamp_writes
from lightning_spmd.stages.passes.contract import GraphPass, PassState

_aten = torch.ops.aten
_ALL_REDUCE = torch.ops._c10d_functional.all_reduce.default  # noqa: SLF001 - an operator's public name

_SMALL = 512
"""Bytes that the backward pass may hold to its end: a block of CUDA's allocator."""

_SPLITS = {
    _aten.split.Tensor,
    _aten.split_with_sizes.default,
    _aten.unbind.int,
    _aten.unsafe_split.Tensor,
    _aten.unsafe_split_with_sizes.default,
}


def merge_common_subexpressions(step: ShardedStep, state: PassState) -> None:
    """Merge equal nodes; see the module docstring for which are equal."""
    merger = _Merger(step)
    merged = merger.run()
    if merged:
        state.notes["common_subexpressions"] = f"nodes merged into equal ones: {merged}"


class _Merger:
    """One walk over the graph; tables describe the graph as it was, ``last_use`` as it becomes."""

    def __init__(self, step: ShardedStep) -> None:
        self.step = step
        self.graph = step.graph_module.graph
        stamp_writes(self.graph)  # keys compare, for every operand, how often its storage was written before
        self.roots = storage_roots(self.graph)
        order: list[fx.Node] = list(self.graph.nodes)
        self.position = {node: i for i, node in enumerate(order)}
        written = {self.roots[o] for n in order if not is_wait(n) for o in written_arguments(n)}
        self.unshared = written | leaving_storages(self.graph, self.roots)
        self.last_use = {self.roots[o]: i for i, n in enumerate(order) for o in n.all_input_nodes}

    def run(self) -> int:
        """Merge, and tell how many nodes went."""
        known: dict[Hashable, fx.Node] = {}
        merged = 0
        for node in list(self.graph.nodes):
            if not self._is_candidate(node):
                continue
            key = self._key(node)
            first = known.setdefault(key, node)
            if first is node:
                continue
            if self._may_share(first, node):
                merged += self._merge(first, node)
            else:
                known[key] = node  # the later one may serve those after it
        return merged

    def _is_candidate(self, node: fx.Node) -> bool:
        if node.target is operator.getitem:
            return True  # the same item of the same value: what matters is decided with that value
        if node.op != "call_function" or not (node.target is _ALL_REDUCE or is_pure(node)):
            return False
        if self.roots[node] is not node and not self._is_view(node):
            return False  # `reshape` and its like: a view or a copy
        return all(is_same_on_all_ranks(self.step, n) for n in (node, *node.all_input_nodes))

    def _is_view(self, node: fx.Node) -> bool:
        return is_view(node) or node.target in _SPLITS

    def _key(self, node: fx.Node) -> Hashable:
        section = None if self._is_view(node) or node.target is operator.getitem else info_of(node).section
        placements = _frozen(node.meta.get("placements", ()))
        return (node.target, _frozen(node.args), _frozen(node.kwargs), node.meta["write_counts"], section, placements)

    def _may_share(self, first: fx.Node, second: fx.Node) -> bool:
        if is_view(first) or first.target is operator.getitem or isinstance(value_of(first), (bool, int, float)):
            return True
        if first.target in _SPLITS:  # writes are told apart by piece, and pieces by the split that made them
            return self.roots[first] not in self.unshared
        if any(storage in self.unshared for node in (first, second) for storage in _storages(node)):
            return False
        if first.target is _ALL_REDUCE:
            return self._waits(first, second) is not None
        if info_of(first).section is not Section.BACKWARD or _is_small_constant(first):
            return True
        now = self.position[second]
        return all(self.last_use.get(storage, -1) > now for storage in _storages(first))

    def _waits(self, first: fx.Node, second: fx.Node) -> tuple[fx.Node, fx.Node] | None:
        """The waits of two all-reduces, if the first one's comes before everything that reads the second one's."""
        users = [*first.users, *second.users]
        if len(users) != 2 or not all(is_wait(n) for n in users):
            return None
        readers = [self.position[reader] for reader in users[1].users]
        return (users[0], users[1]) if self.position[users[0]] < min(readers, default=len(self.position)) else None

    def _merge(self, first: fx.Node, second: fx.Node) -> int:
        gone = [second]
        waits = self._waits(first, second) if first.target is _ALL_REDUCE else None
        if waits is not None:
            replace_reads(waits[1], waits[0])
            gone.append(waits[1])
        else:
            replace_reads(second, first)
        old, new = self.roots[second], self.roots[first]
        self.last_use[new] = max(self.last_use.get(new, -1), self.last_use.get(old, -1))
        for node in reversed(gone):
            self.graph.erase_node(node)
        return len(gone)


def _is_small_constant(node: fx.Node) -> bool:
    """Whether a value of no operand is not worth being made again."""
    spec = value_of(node)
    return not node.all_input_nodes and isinstance(spec, TensorSpec) and spec.bytes <= _SMALL


def _storages(node: fx.Node) -> list[fx.Node]:
    """The storages that a node makes: its own, or one an output."""
    return [u for u in node.users if u.target is operator.getitem] or [node]


def _frozen(value: Any) -> Hashable:
    """Arguments as a key, by representation: to Python ``1`` equals ``1.0`` and ``True``, ``0.0`` equals ``-0.0``."""
    if isinstance(value, fx.Node):
        return value
    if isinstance(value, (list, tuple)):
        items: list[Any] = list(value)  # pyright: ignore[reportUnknownArgumentType]
        return (type(value).__name__, *map(_frozen, items))
    if isinstance(value, dict):
        pairs: list[Any] = sorted(value.items())  # pyright: ignore[reportUnknownArgumentType]
        return ("dict", *map(_frozen, pairs))
    return (type(value).__name__, repr(value))


PASS = GraphPass("common_subexpressions", merge_common_subexpressions, after=frozenset({"identity_views"}))
