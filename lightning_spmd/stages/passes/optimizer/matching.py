"""Reading an update back from list operators: who wrote a list last, and what a number was computed from.

In-place operators on lists have no results, so data flows through memory: the operand of one operator is what the last
operator before it wrote into the same tensors. :class:`Flow` follows that; :class:`Numbers` follows Python numbers.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import fx

from lightning_spmd.ir.aliasing import storage_regions, written_arguments
from lightning_spmd.stages.passes.optimizer.lists import ITEM, Each

Expression = Any
"""A node that is an input, a constant, or ``(name of the function, *arguments)``."""


class Flow:
    """Writers of the lists of a graph.

    Args:
        graph: in its present order.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.order: list[fx.Node] = list(graph.nodes)
        self.position: dict[fx.Node, int] = {node: i for i, node in enumerate(self.order)}
        self.regions = storage_regions(graph)
        self._writers: dict[fx.Node, list[fx.Node]] = {}
        for node in self.order:
            for operand in written_arguments(node):
                self._writers.setdefault(self.regions[operand][0], []).append(node)

    def writer(self, tensors: Sequence[fx.Node], reader: fx.Node, name: str) -> fx.Node | None:
        """The operator ``name`` on just these tensors, in this order, if it wrote them last before ``reader``."""
        last = [self._last_writer(t, reader) for t in tensors]
        found = last[0]
        if found is None or any(other is not found for other in last) or operator_name(found) != name:
            return None
        return found if operand_list(found, 0) == list(tensors) else None

    def _last_writer(self, tensor: fx.Node, reader: fx.Node) -> fx.Node | None:
        limit = self.position[reader]
        earlier = (n for n in self._writers.get(self.regions[tensor][0], ()) if self.position[n] < limit)
        return max(earlier, key=self.position.__getitem__, default=None)

    def maker(self, tensors: Sequence[fx.Node], name: str) -> fx.Node | None:
        """The operator ``name`` whose results these are, all of them in order."""
        first = tensors[0]
        made = first.args[0] if first.target is operator.getitem else None
        if not isinstance(made, fx.Node) or operator_name(made) != name:
            return None
        whole = [(t.target, t.args) for t in tensors] == [(operator.getitem, (made, i)) for i in range(len(tensors))]
        return made if whole and len(operand_list(made, 0)) == len(tensors) else None

    def is_private(self, nodes: set[fx.Node], kept: Sequence[fx.Node], read: Sequence[fx.Node]) -> bool:
        """Whether ``nodes`` may become one operator where the last of them stands.

        Args:
            nodes: what goes.
            kept: tensors that they update: in between nothing else may touch them.
            read: tensors that they read: from the first time on nothing may write them.
        """
        begin, end = min(map(self.position.__getitem__, nodes)), max(map(self.position.__getitem__, nodes))
        updated = {self.regions[t][0] for t in kept}
        for node in self.order[begin:end]:
            if node not in nodes and any(self.regions[n][0] in updated for n in node.all_input_nodes):
                return False
        for tensor in read:
            readers = [self.position[n] for n in tensor.users if n in nodes or reads_numbers(n)]
            writes = [self.position[n] for n in self._writers.get(self.regions[tensor][0], ())]
            if any(min(readers, default=begin) < write < end for write in writes):
                return False
        return True

    def readers_after(self, end: fx.Node, tensors: Sequence[fx.Node]) -> list[fx.Node]:
        """Who touches the storage of ``tensors`` behind ``end``."""
        storages = {self.regions[t][0] for t in tensors}
        later = self.order[self.position[end] + 1 :]
        return [node for node in later if any(self.regions[n][0] in storages for n in node.all_input_nodes)]


class Numbers:
    """What numbers were computed from."""

    def __init__(self) -> None:
        self._known: dict[tuple[fx.Node, int | None], Expression] = {}

    def at(self, value: Any, index: int) -> Expression:
        """The expression of entry ``index`` of a list or of what :class:`Each` gives, else of the value itself."""
        if isinstance(value, (list, tuple)):
            return self.at(value[index], index)
        if not isinstance(value, fx.Node):
            return value
        place = index if isinstance(value.target, Each) else None
        if (value, place) not in self._known:
            self._known[value, place] = self._read(value, index)
        return self._known[value, place]

    def _read(self, node: fx.Node, index: int) -> Expression:
        made = node.args[0] if node.args else None
        if node.target is operator.getitem and isinstance(made, fx.Node) and isinstance(made.target, Each):
            position: Any = node.args[1]
            return self.at(made, position)
        function = node.target.function if isinstance(node.target, Each) else node.target
        if node.op != "call_function" or function is operator.getitem:
            return node
        if function is ITEM:
            read: Any = node.args[0]
            return ("item", read[index] if isinstance(read, (list, tuple)) else read)
        name = getattr(function, "__name__", str(function))
        arguments = [self.at(a, index) for a in node.args]
        if name == "mul" and arguments[1:] == [-1.0]:
            return ("neg", arguments[0])
        return (name, *arguments)


class Unknown:
    """Stands in a pattern for anything; the same object for the same thing."""


def matches(pattern: Any, expression: Expression, found: dict[Unknown, Any]) -> bool:
    """Whether an expression is like the pattern; what the unknowns stand for is added to ``found``."""
    if isinstance(pattern, Unknown):
        return found.setdefault(pattern, expression) == expression
    if isinstance(pattern, tuple):
        same = isinstance(expression, tuple) and len(pattern) == len(expression)
        return same and all(matches(p, e, found) for p, e in zip(pattern, expression, strict=True))
    if isinstance(pattern, fx.Node) or isinstance(expression, (tuple, fx.Node)):
        return pattern is expression
    return pattern == expression


def reads_numbers(node: fx.Node) -> bool:
    """Whether the node reads Python numbers out of tensors."""
    return (node.target.function if isinstance(node.target, Each) else node.target) is ITEM


def operator_name(node: fx.Node) -> str:
    """``add_`` for ``_foreach_add_`` of any overload, empty for what is no operator on lists."""
    schema = getattr(node.target, "_schema", None)
    name = "" if schema is None else schema.name
    return name.removeprefix("aten::_foreach_") if name.startswith("aten::_foreach_") else ""


def operand(node: fx.Node, position: int, default: Any = None) -> Any:
    """The operand at ``position``, or the default that was left out."""
    return node.args[position] if position < len(node.args) else default


def operand_list(node: fx.Node, position: int) -> list[fx.Node]:
    """The list of tensors at ``position``; empty if the operand is none."""
    value = operand(node, position)
    return [n for n in value if isinstance(n, fx.Node)] if isinstance(value, (list, tuple)) else []
