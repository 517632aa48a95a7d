"""``tensor_parallel_plan="auto"``: the Megatron pairing (arXiv:1909.08053), found in the captured graph.

::

    x ──► q, k, v (or qkv) ──► heads, attention ──► out ──► +
    x ──► gate, up ──► silu · ──► down ──► +
    indices ──► table
    x ──► head ──► log-softmax
    rows ──► products with a stack of weights, chosen by row

All linear layers that read one value are one group; if that cannot be split, those of each module are. If every way
from their split outputs leads, without a gather, into products that contract the split dimension, the group is colwise
and those are rowwise.

"Without a gather" is asked of the sharding rules themselves, on an axis of the wanted size: so heads that the ranks
cannot share out are left whole, and whatever operators a model has between two layers need no list here. Fused
projections are tried in the parts into which the graph splits their output. Nothing is said about convolutions.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lightning_spmd.ir.first import first
from lightning_spmd.ir.node_info import Section, info_of
from lightning_spmd.ir.placement import PARTIAL, REPLICATE, Blocks, Placement, Shard, block_sizes, blocks_of
from lightning_spmd.ir.signature import InputRole
from lightning_spmd.ir.steps import CapturedStep
from lightning_spmd.parallel.mesh import tensor_parallel_axis
from lightning_spmd.stages.expand.call import Layout, OpCall, is_tensor
from lightning_spmd.stages.expand.rules import layouts_of

aten = torch.ops.aten

_VIEWS = (aten.view, aten._unsafe_view, aten.reshape, aten.t, aten.transpose, aten._to_copy, aten.clone, aten.alias)
_OPERANDS = {aten.mm: (0, 1), aten.addmm: (1, 2), aten.linear: (0, 1)}
"""Product → positions of activation and weight."""
_STACK = 3
"""Dimensions of one matrix an expert."""
_SPLITS = (aten.split, aten.split_with_sizes, aten.unsafe_split)


@dataclass(frozen=True)
class _Linear:
    """One product of an activation with a parameter."""

    node: fx.Node
    layer: str
    source: fx.Node

    def split_output(self, blocks: Blocks) -> Shard:
        """Its output with split features."""
        return Shard(len(self.node.meta["val"].shape) - 1, blocks)


class _Finder:
    """One search.

    Args:
        captured: the graph.
        size: number of ranks of the axis.
    """

    def __init__(self, captured: CapturedStep, size: int) -> None:
        graph = captured.graph_module.graph
        self.axis = tensor_parallel_axis(size, 0, "")
        self.nodes = [n for n in graph.nodes if n.op == "call_function" and info_of(n).section is Section.FORWARD]
        inputs = [n for n in graph.nodes if n.op == "placeholder"]
        self.entries = dict(zip(inputs, captured.signature.inputs, strict=True))
        self.returned = set(graph.output_node().all_input_nodes)
        self.from_batch = self._reached_from(InputRole.BATCH)
        self.activations = self.from_batch & self._reached_from(InputRole.PARAMETER)
        self.linears = {linear.node: linear for linear in self._linears()}
        self.plan: dict[str, str | Mapping[str, Any]] = {}

    def run(self) -> dict[str, str | Mapping[str, Any]]:
        """Layer path → style."""
        groups: dict[fx.Node, list[_Linear]] = {}
        for linear in self.linears.values():
            groups.setdefault(linear.source, []).append(linear)
        for group in groups.values():
            if not self._pair([linear for linear in group if linear.layer not in self.plan]):
                self._pair_by_module([linear for linear in group if linear.layer not in self.plan])
        self._experts()
        self._ends()
        return self.plan

    # ------------------------------------------------------------------ pieces
    def _reached_from(self, role: InputRole) -> set[fx.Node]:
        reached = {n for n, e in self.entries.items() if e.role is role}
        for node in self.nodes:
            if not reached.isdisjoint(node.all_input_nodes):
                reached.add(node)
        return reached

    def _layer(self, node: object) -> str | None:
        """Path of the layer whose weight a node is, perhaps seen through views and casts."""
        while isinstance(node, fx.Node) and _packet(node) in _VIEWS:
            node = node.args[0]
        entry = self.entries.get(node) if isinstance(node, fx.Node) else None
        if entry is None or entry.role is not InputRole.PARAMETER or not str(entry.key[0]).endswith(".weight"):
            return None
        return str(entry.key[0]).removesuffix(".weight")

    def _linears(self) -> Iterator[_Linear]:
        for node in self.nodes:
            positions = _OPERANDS.get(_packet(node))
            layer = self._layer(node.args[positions[1]]) if positions else None
            source = node.args[positions[0]] if positions else None
            if layer is None or not isinstance(source, fx.Node) or source not in self.from_batch:
                continue
            while _packet(source) in _VIEWS and isinstance(source.args[0], fx.Node):
                source = source.args[0]
            yield _Linear(node, layer, source)

    def _pair_by_module(self, group: list[_Linear]) -> None:
        """What a router and experts in a list read is one value: the layers of each module are a group of their own."""
        modules: dict[str, list[_Linear]] = {}
        for linear in group:
            modules.setdefault(linear.layer.rpartition(".")[0], []).append(linear)
        for own in modules.values() if len(modules) > 1 else ():
            self._pair(own)

    def _pair(self, group: list[_Linear]) -> bool:
        """Give the styles to a group and to what it leads into, if its outputs can stay split all the way."""
        if not group:
            return True
        for blocks in self._possible_parts(group):
            if any(not self.axis.splits(g.node.meta["val"].shape[-1], blocks) for g in group):
                continue
            ends = self._follow({g.node: g.split_output(blocks) for g in group})
            if ends is None:
                continue
            for g in group:
                self.plan[g.layer] = _entry("colwise", g.node.meta["val"].shape[-1], blocks)
            for node, (contracted, size) in ends.items():
                self.plan[self.linears[node].layer] = _entry("rowwise", size, contracted)
            return True
        return False

    def _possible_parts(self, group: list[_Linear]) -> list[Blocks]:
        if len(group) > 1:
            return [1]
        found: list[Blocks] = []
        level = [group[0].node]
        for _ in range(4):
            level = [user for n in level for user in n.users if info_of(user).section is Section.FORWARD]
            splits = [n for n in level if _packet(n) in _SPLITS]
            found += [blocks_of([s.shape[-1] for s in n.meta["val"]]) for n in splits]
        return list(dict.fromkeys([*found, 1, 2, 3]))

    def _follow(self, starts: Mapping[fx.Node, Placement]) -> dict[fx.Node, tuple[Blocks, int]] | None:
        """The products that contract what becomes of the starts: blocks and size. None: something must be gathered."""
        state: dict[fx.Node, tuple[Placement, ...]] = {n: (p,) for n, p in starts.items()}
        ends: dict[fx.Node, tuple[Blocks, int]] = {}
        for node in self.nodes:
            if node in starts or state.keys().isdisjoint(node.all_input_nodes):
                continue
            if node.target is operator.getitem:
                state[node] = (state[node.args[0]][node.args[1]],)  # type: ignore[index]
                continue
            call = OpCall(node, self.axis, lambda n: state[n][0] if n in state else REPLICATE)
            layout = self._layout(call, state)
            if layout is None:
                return None
            if layout.outputs == (PARTIAL,):
                position = first((i for i, o in enumerate(call.operands) if o in state), "split operand")
                split = layout.inputs[position]
                if node not in self.linears or self.linears[node].layer in self.plan or not isinstance(split, Shard):
                    return None
                ends[node] = (split.outer, call.specs[position].shape[split.dim])
            elif any(isinstance(p, Shard) for p in layout.outputs):
                state[node] = layout.outputs
        if not ends or not self.returned.isdisjoint(state):
            return None
        return ends

    def _layout(self, call: OpCall, state: Mapping[fx.Node, tuple[Placement, ...]]) -> Layout | None:
        """How an operator works on its split operands as they are, slicing no activation: its gradient is whole."""
        product = call.node in self.linears

        def keeps(layout: Layout) -> bool:
            for operand, have, want in zip(call.operands, call.current, layout.inputs, strict=True):
                computed = operand in self.activations and not product
                if have != want and (operand in state or (computed and isinstance(want, Shard))):
                    return False
            partial = any(p == PARTIAL for p in layout.outputs)
            return (layout.emit is None or layout.local) and (not partial or product)

        return next((layout for layout in layouts_of(call) or [] if keeps(layout)), None)

    # ------------------------------------------------------------------ experts
    def _experts(self) -> None:
        """Stacks of experts that rows of the batch choose from, where the ranks can share them out."""
        for node in self.nodes:
            weight, chooses = _stack_of_experts(node)
            while isinstance(weight, fx.Node) and _packet(weight) in _VIEWS:
                weight = weight.args[0]
            entry = self.entries.get(weight) if isinstance(weight, fx.Node) else None
            if entry is None or entry.role is not InputRole.PARAMETER or chooses not in self.from_batch:
                continue
            path, _, _ = str(entry.key[0]).rpartition(".")
            shape = entry.value.shape
            if path and len(shape) == _STACK and self.axis.divides(shape[0]):
                self.plan[path] = "experts"

    # ------------------------------------------------------------------ both ends of a language model
    def _ends(self) -> None:
        for node in self.nodes:
            # Tables of positions, which the batch does not choose from, are small and read whole.
            if _packet(node) is aten.embedding and node.args[1] in self.from_batch:
                self._split_vocabulary(self._layer(node.args[0]), "embedding", node.args[0])
            elif _packet(node) is aten._log_softmax:
                source: Any = node.args[0]
                while _packet(source) in _VIEWS:
                    source = source.args[0]
                if source in self.linears and node.args[1] in (1, -1):
                    at = _OPERANDS[_packet(source)][1]
                    self._split_vocabulary(self.linears[source].layer, "loss", source.args[at])

    def _split_vocabulary(self, layer: str | None, style: str, weight: object) -> None:
        if layer is None or layer in self.plan or not is_tensor(weight):
            return
        spec = weight.meta["val"]  # type: ignore[union-attr]
        classes = spec.shape[1] if style == "loss" and _packet(weight) is not None else spec.shape[0]
        if self.axis.divides(classes):
            self.plan[layer] = style


def _packet(node: object) -> Any:
    return getattr(getattr(node, "target", None), "overloadpacket", None)


def _stack_of_experts(node: fx.Node) -> tuple[object, object]:
    """(what may be a stack of experts, what chooses from it) of a grouped product or of ``stack[ids]``."""
    if _packet(node) is aten._grouped_mm:
        return node.args[1], node.args[0]
    if _packet(node) is aten.index and len(node.args[1]) == 1:  # type: ignore[arg-type]
        return node.args[0], node.args[1][0]  # type: ignore[index]
    return None, None


def _entry(style: str, size: int, blocks: Blocks) -> str | Mapping[str, Any]:
    if isinstance(blocks, int):
        return style if blocks == 1 else {"style": style, "parts": blocks}
    return {"style": style, "parts": list(block_sizes(size, blocks) or ())}


def find_plan(captured: CapturedStep, size: int) -> dict[str, str | Mapping[str, Any]]:
    """A plan for ``parallel.tensor_parallel.resolve_plan``: layer path → style. Empty where nothing can be split.

    Args:
        captured: the step, captured from whole parameters; it is not changed.
        size: number of ranks of the tensor axis.
    """
    return _Finder(captured, size).run()
