"""Where a context-parallel axis begins to split sequences: where data of the batch first meets parameters.

Up to there every rank has the whole batch: token numbers, masks, positions are small. The sequence of a leaf of the
batch is followed through views, slices, casts and arithmetic with the sharding rules themselves, asked as if every
position were a rank's own. The first operator that joins it with weights (an embedding, a projection of features) makes
its result in pieces; from there on propagation keeps them, and whatever comes whole to meet them is cut for free.

Sequences in the graph decide how the axis cuts (:func:`cut_of`): folded where causal attention would give the last
ranks more to do than the first, in order otherwise, in unequal pieces where the ranks do not divide the only length
there is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import fx

from lightning_spmd.ir.aliasing import written_arguments
from lightning_spmd.ir.first import first
from lightning_spmd.ir.node_info import Section, TensorSpec, info_of
from lightning_spmd.ir.placement import REPLICATE, Placement, Replicate, Shard, ShardAxis
from lightning_spmd.ir.signature import InputRole, Signature
from lightning_spmd.stages.expand.call import Layout, OpCall, is_tensor
from lightning_spmd.stages.expand.rules import rule_of

aten = torch.ops.aten

_CHANGE_LENGTH = {aten.slice.Tensor, aten.constant_pad_nd.default, aten.cat.default}
"""Operators that leave a sequence a sequence, of another length."""
_FRESH = {
    aten.new_zeros,
    aten.new_ones,
    aten.new_full,
    aten.new_empty,
    aten.zeros_like,
    aten.full_like,
    aten.empty_like,
}
"""Operators that make a tensor in the shape of another."""


@dataclass(frozen=True)
class Sequence:
    """Where the positions of a sequence are in a tensor: a dimension, in blocks (one a sequence of the batch)."""

    length: int
    where: Shard


@cache
def _positions(length: int) -> ShardAxis:
    """An axis with as many ranks as a sequence has positions."""
    return ShardAxis("positions", length, 0, "", (1,) * length)


def find_sequences(graph: fx.Graph, signature: Signature, dim: int) -> dict[fx.Node, Sequence]:
    """The operators that join a sequence of the batch with weights first, and where it lies in their result.

    Args:
        graph: the global graph.
        signature: its signature.
        dim: which dimension of a leaf of the batch is its sequence.
    """
    return _Following(graph, signature, dim).starts


class _Following:
    def __init__(self, graph: fx.Graph, signature: Signature, dim: int) -> None:
        self.starts: dict[fx.Node, Sequence] = {}
        self.known: dict[fx.Node, Sequence] = {}
        self.items: dict[fx.Node, list[Sequence | None]] = {}
        self.weights: set[fx.Node] = set()
        self.mixed: set[fx.Node] = set()
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        entries = dict(zip(placeholders, signature.inputs, strict=True))
        for node in graph.nodes:
            if node.op == "placeholder":
                entry = entries[node]
                if entry.role is InputRole.PARAMETER:
                    self.weights.add(node)
                shape = entry.value.shape if isinstance(entry.value, TensorSpec) else ()
                if entry.role is InputRole.BATCH and len(shape) > dim and shape[dim] > 1:
                    self.known[node] = Sequence(shape[dim], Shard(dim))
            elif node.op == "call_function" and info_of(node).section is Section.FORWARD:
                self._operator(node)

    def _operator(self, node: fx.Node) -> None:
        operands = node.all_input_nodes
        if any(o in self.mixed for o in operands):
            self.mixed.add(node)
            return
        parent = operands[0] if operands else None
        if parent in self.items and not hasattr(node.target, "_schema"):
            item = self.items[parent][node.args[1]]  # type: ignore[index]
            if item is not None:
                self.known[node] = item
            return
        followed = any(o in self.known for o in operands)
        weighed = any(o in self.weights for o in operands)
        if weighed:
            (self.mixed if followed else self.weights).add(node)
        if not followed or not hasattr(node.target, "_schema"):
            return
        found = _same_positions(node, self.known) or _through(node, self.known, self.weights)
        if not weighed:
            self._keep(node, found)
        elif found[0] is not None and not written_arguments(node):
            self.starts[node] = found[0]

    def _keep(self, node: fx.Node, found: list[Sequence | None]) -> None:
        if isinstance(node.meta.get("val"), TensorSpec):
            if found[0] is not None:
                self.known[node] = found[0]
        else:
            self.items[node] = found


def _same_positions(node: fx.Node, known: Mapping[fx.Node, Sequence]) -> list[Sequence | None] | None:
    """Of what is written in place, and of what is made in the shape of a sequence to be written into."""
    origin = written_arguments(node) or (node.all_input_nodes[:1] if _packet(node) in _FRESH else [])
    value = node.meta.get("val")
    if not origin or not isinstance(value, TensorSpec) or value.shape != origin[0].meta["val"].shape:
        return [None] if written_arguments(node) else None
    return [known.get(origin[0])]


def _packet(node: fx.Node) -> object:
    return getattr(node.target, "overloadpacket", None)


def _through(node: fx.Node, known: Mapping[fx.Node, Sequence], weights: set[fx.Node]) -> list[Sequence | None]:
    """Where the sequence of an operator's operands is in its results."""
    for length in {known[o].length: None for o in node.all_input_nodes if o in known}:

        def placed(operand: fx.Node, length: int = length) -> Placement:
            sequence = known.get(operand)
            return sequence.where if sequence is not None and sequence.length == length else REPLICATE

        call = OpCall(node, _positions(length), placed)
        layout = next((c for c in _layouts(call) if _keeps(call, c, weights)), None)
        if layout is not None:
            return [Sequence(length, p) if isinstance(p, Shard) else None for p in layout.outputs]
    changed = _other_length(node, known)
    return [changed, *[None] * 8]


def _keeps(call: OpCall, layout: Layout, weights: set[fx.Node]) -> bool:
    """Whether sequences stay as they lie; what has none may be cut for them, a weight if it has a row a position."""
    for operand, now, then in zip(call.operands, call.current, layout.inputs, strict=True):
        if now == then:
            continue
        if not isinstance(now, Replicate) or not isinstance(then, Shard):
            return False
        if operand in weights and len(call.shape) < 3:
            return False
    return True


def _layouts(call: OpCall) -> list[Layout]:
    rule = rule_of(call.op)
    return [] if rule is None else rule(call)


def _other_length(node: fx.Node, known: Mapping[fx.Node, Sequence]) -> Sequence | None:
    """Of an operator that takes some positions of each sequence, or adds some."""
    value = node.meta.get("val")
    if node.target not in _CHANGE_LENGTH or not isinstance(value, TensorSpec):
        return None
    sequence = first((known[o] for o in node.all_input_nodes if o in known), f"sequence among what {node} reads")
    dim = sequence.where.dim
    others = [o.meta["val"].shape for o in node.all_input_nodes if is_tensor(o)]
    same = all(s[:dim] + s[dim + 1 :] == value.shape[:dim] + value.shape[dim + 1 :] for s in others)
    if sequence.where.outer != 1 or not same or value.shape[dim] < 2:
        return None
    return Sequence(value.shape[dim], Shard(dim))


def cut_of(axis: ShardAxis, graph: fx.Graph, starts: Mapping[fx.Node, Sequence]) -> ShardAxis:
    """The axis as it cuts this graph's sequences."""
    lengths = {sequence.length for sequence in starts.values()}
    if not lengths:
        return axis
    folded = dataclasses.replace(axis, folded=True)
    if any(_is_causal(node) for node in graph.nodes) and all(map(folded.divides, lengths)):
        return folded
    if any(map(axis.divides, lengths)) or len(lengths) > 1 or min(lengths) < axis.size:
        return axis
    rows, longer = divmod(min(lengths), axis.size)
    return dataclasses.replace(axis, split=tuple(rows + (rank < longer) for rank in range(axis.size)))


def _is_causal(node: fx.Node) -> bool:
    """Whether the node is an attention kernel in which a position sees only those before it."""
    if "scaled_dot_product" not in str(node.target):
        return False
    return bool(OpCall(node, _positions(1), lambda _: REPLICATE).get("is_causal"))


def uncut(axis: ShardAxis, starts: Mapping[fx.Node, Sequence]) -> Iterator[str]:
    """What a context-parallel axis does not split, for the user."""
    if not starts:
        yield (
            f"nothing is split over {axis.name}: no tensor of the batch with a sequence as its second dimension meets "
            "a layer that works position by position; all its ranks compute the same"
        )
    for node, sequence in starts.items():
        if not axis.splits(sequence.length, 1):
            info = info_of(node)
            where = " ".join(filter(None, [f"in module {info.module!r}" if info.module else "", info.source]))
            yield (
                f"{node.target} {where} has sequences of {sequence.length} positions, which the {axis.size} ranks of "
                f"{axis.name} do not divide: all of them compute the whole; pad to a multiple of {2 * axis.size}"
            )
