"""Split list operators of the optimizer along communication buckets: an update waits for its own bucket alone.

Before, every parameter waits for the last gradient::

    g1, g2 = split(wait(bucket1)); g3, g4 = split(wait(bucket2))
    _fused_adamw_([p1, p2, p3, p4], [g1, g2, g3, g4], ...)

After::

    _fused_adamw_([p1, p2], [g1, g2], ...)          needs bucket1
    _fused_adamw_([p3, p4], [g3, g4], ...)          needs bucket2

For every optimizer that is captured with ``foreach`` or ``fused`` operators: nothing here knows Adam. These operators
work on each position of their lists alone, so any split is exact; which bucket a parameter belongs to follows from
which collectives its gradient comes from, and holds for all operators on the parameter and its state, also those that
do not read the gradient (step counters, weight decay). ``_foreach_norm`` of clipping is split in the same way.

Bitwise. Does nothing where a list depends on one bucket, or every entry on all of them (the update after clipping by
global norm), and to optimizers written with single-tensor operators.

After ``split_fused_optimizer`` of PyTorch's former ``torch.distributed._spmd``, which knew fused Adam and two groups.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from torch import fx

from lightning_spmd.ir.aliasing import overlapping, storage_regions, written_arguments
from lightning_spmd.ir.node_info import Section, info_of
from lightning_spmd.ir.signature import InputRole
from lightning_spmd.ir.steps import ShardedStep
from lightning_spmd.ir.verify import is_wait
from lightning_spmd.stages.passes.contract import GraphPass, PassState

_FUSED = ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")
Waits = frozenset[fx.Node]
_NONE: Waits = frozenset()


def split_optimizer(step: ShardedStep, state: PassState) -> None:
    """Split the list operators of a step; see the module docstring for what it does and when it does nothing."""
    graph = step.graph_module.graph
    owners = _Owners(step)
    waits = _WaitsOf(graph).entries
    bucket_of: dict[str, Waits] = defaultdict(frozenset)
    operators = [node for node in graph.nodes if list_length(node) is not None]
    for node in operators:
        for index, owner in enumerate(owners.by_index[node]):
            if owner is not None:
                bucket_of[owner] |= waits[node][index]
    parts = 0
    for node in operators:
        groups: dict[Waits, list[int]] = defaultdict(list)
        for index, owner in enumerate(owners.by_index[node]):
            groups[waits[node][index] if owner is None else bucket_of[owner]].append(index)
        if len(groups) > 1:
            _split(graph, node, list(groups.values()))
            parts += len(groups)
    if parts:
        state.notes["split_optimizer"] = f"{parts} operators on parts of the parameters"


def list_length(node: fx.Node) -> int | None:
    """How many entries a ``foreach`` or fused optimizer operator works on; None for other nodes."""
    schema = getattr(node.target, "_schema", None)
    name = "" if schema is None else schema.name.removeprefix("aten::")
    if not (name.startswith("_foreach_") or name in _FUSED):
        return None
    lengths = {len(a) for a in node.args if isinstance(a, (list, tuple)) and len(a) > 0}
    return lengths.pop() if len(lengths) == 1 else None


def _entries(node: fx.Node, index: int) -> list[fx.Node]:
    """The nodes at position ``index`` of the operator's lists."""
    lists = [a for a in node.args if isinstance(a, (list, tuple)) and len(a) > index]
    return [entry for items in lists if isinstance(entry := items[index], fx.Node)]


class _WaitsOf:
    """For every value and every entry of a list operator the waits it depends on, also through what was written."""

    def __init__(self, graph: fx.Graph) -> None:
        self.entries: dict[fx.Node, list[Waits]] = {}
        self._values: dict[fx.Node, Waits] = {}
        self._regions = storage_regions(graph)
        self._written: dict[fx.Node, dict[fx.Node | None, Waits]] = {}
        for node in graph.nodes:
            self._visit(node)

    def _visit(self, node: fx.Node) -> None:
        length = list_length(node)
        written = set(written_arguments(node))
        if length is not None:
            shared = self._union(_shared(node))
            self.entries[node] = [self._union(_entries(node, i)) | shared for i in range(length)]
            for index, waits in enumerate(self.entries[node]):
                self._write(written.intersection(_entries(node, index)), waits)
            self._values[node] = _NONE
            return
        item = _item_of_list(node)
        if item is not None:
            self._values[node] = self.entries[item[0]][item[1]]
            return
        waits = self._union(node.all_input_nodes)
        self._values[node] = waits | {node} if is_wait(node) else waits
        self._write(written, waits)

    def _union(self, nodes: Sequence[fx.Node]) -> Waits:
        return _NONE.union(*(self._values[n] for n in nodes), *(self._written_into(n) for n in nodes))

    def _written_into(self, node: fx.Node) -> Waits:
        root, piece = self._regions[node]
        pieces = self._written.get(root, {})
        return _NONE.union(*(waits for other, waits in pieces.items() if overlapping(piece, other)))

    def _write(self, nodes: set[fx.Node], waits: Waits) -> None:
        for node in nodes:
            root, piece = self._regions[node]
            pieces = self._written.setdefault(root, {})
            pieces[piece] = pieces.get(piece, _NONE) | waits


def _item_of_list(node: fx.Node) -> tuple[fx.Node, int] | None:
    """(list operator, position) if the node takes one result out of a list operator's."""
    if (
        node.target is not operator.getitem
        or not isinstance(node.args[0], fx.Node)
        or list_length(node.args[0]) is None
    ):
        return None
    index: Any = node.args[1]
    return node.args[0], index


def _shared(node: fx.Node) -> list[fx.Node]:
    """Operands that all positions of a list operator use."""
    values = [*node.args, *node.kwargs.values()]
    return [v for v in values if isinstance(v, fx.Node)]


class _Owners:
    """Which parameter a value belongs to: its own, its state's, or what was computed from these entry by entry."""

    def __init__(self, step: ShardedStep) -> None:
        self.by_index: dict[fx.Node, list[str | None]] = {}
        self._of: dict[fx.Node, str | None] = {}
        graph = step.graph_module.graph
        placeholders = [n for n in graph.nodes if n.op == "placeholder"]
        for node, entry in zip(placeholders, step.signature.inputs, strict=True):
            owned = entry.role in (InputRole.PARAMETER, InputRole.OPTIMIZER_STATE)
            self._of[node] = entry.key[0] if owned else None
        for node in graph.nodes:
            if node.op == "call_function":
                self._visit(node)

    def _visit(self, node: fx.Node) -> None:
        length = list_length(node)
        if length is not None:
            self.by_index[node] = [self._only(_entries(node, i)) for i in range(length)]
            self._of[node] = None
            return
        item = _item_of_list(node)
        if item is not None:
            self._of[node] = self.by_index[item[0]][item[1]]
            return
        updating = info_of(node).section in (Section.OPTIMIZER, Section.CLIP)  # activations have no parameter
        self._of[node] = self._only(node.all_input_nodes) if updating else None

    def _only(self, nodes: Sequence[fx.Node]) -> str | None:
        owners = {owner for n in nodes if (owner := self._of.get(n)) is not None}
        return owners.pop() if len(owners) == 1 else None


def _split(graph: fx.Graph, node: fx.Node, groups: list[list[int]]) -> None:
    length = list_length(node)
    place: dict[int, tuple[fx.Node, int]] = {}
    with graph.inserting_before(node):
        for indices in groups:
            args = tuple(_take(a, indices, length) for a in node.args)
            kwargs = {name: _take(value, indices, length) for name, value in node.kwargs.items()}
            part = graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
            value = node.meta.get("val")
            part.meta.update(val=_take(value, indices, length), info=info_of(node))
            place.update({index: (part, position) for position, index in enumerate(indices)})
    for user in list(node.users):
        index: Any = user.args[1]
        user.args = place[index]
    graph.erase_node(node)


def _take(value: Any, indices: list[int], length: int | None) -> Any:
    if isinstance(value, (list, tuple)) and len(value) == length:
        return [value[i] for i in indices]
    return value


PASS = GraphPass("split_optimizer", split_optimizer, after=frozenset({"bucket_collectives"}))
