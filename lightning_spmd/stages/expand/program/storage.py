"""What ``as_strided`` reads: elements by their place in a storage, which must lie as it lay at capture.

A value that came about by the same calls as at capture lies as it did then. One that was gathered, or that a kernel or
a rule made in another way, is dense: there ``as_strided`` would read other elements without a word. So the storage is
made anew, from its whole: in the order of capture, and with the views that led to the operand taken again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from lightning_spmd.errors import ExpansionError
from lightning_spmd.ir.known_results import BY_PLACE
from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.ir.placement import Own, Placement, Replicate
from lightning_spmd.parallel.pieces import local_spec
from lightning_spmd.stages.expand.program.local_program import LocalProgram

aten = torch.ops.aten
_OPERAND = "its operand, which it addresses by storage offset,"


class Storages:
    """Which values of a program lie in their storages as at capture.

    Args:
        program: the program that is written.
        roots: of every node of the global graph, the one whose storage it shares.
        mutated: roots of storages that something writes into.
    """

    def __init__(self, program: LocalProgram, roots: Mapping[fx.Node, fx.Node], mutated: Collection[fx.Node]) -> None:
        self._program = program
        self._roots = roots
        self._mutated = mutated
        self._as_captured: dict[fx.Node, fx.Node] = {}

    def note(
        self, node: fx.Node, new: fx.Node, placements: Sequence[Placement], operands: Sequence[tuple[fx.Node, fx.Node]]
    ) -> None:
        """``new`` is what ``node`` became, by the same operator on ``operands`` (global node, local node)."""
        self._as_captured.pop(node, None)
        if self._roots[node] is node:
            same = self._has_strides(new, local_spec(node.meta["val"], placements, self._program.axes))
        else:
            sources = [local for operand, local in operands if self._roots[operand] is self._roots[node]]
            known = [operand for operand, local in operands if self._as_captured.get(operand) is local]
            same = bool(sources) and new.args[:1] == (sources[0],) and operands[0][0] in known
        if same:
            self._as_captured[node] = new

    def as_captured(
        self, node: fx.Node, new: fx.Node, placements: Sequence[Placement], whole: Callable[[fx.Node], fx.Node]
    ) -> fx.Node:
        """``new``, or the same value in a storage as at capture.

        Args:
            node: the operand.
            new: its version.
            placements: that version's.
            whole: gives the replicated version of a node.

        Raises:
            ExpansionError: no such storage can be made of it.
        """
        if self._as_captured.get(node) is new:
            return new
        root = self._roots[node]
        spec = root.meta["val"]
        if not isinstance(spec, TensorSpec) or not all(isinstance(p, (Replicate, Own)) for p in placements):
            raise ExpansionError(f"{_OPERAND} has another memory order here than at capture")
        if root in self._mutated:
            raise ExpansionError(f"{_OPERAND} was gathered and is written to: write to a copy")
        value = whole(root)
        if not self._has_strides(value, spec):
            call = self._program.call
            empty = call(aten.new_empty_strided.default, value, list(spec.shape), list(spec.stride))
            value = call(aten.copy_.default, empty, value)
        for view in self._views(node, root):
            value = self._program.call(view.target, value, *view.args[1:], **view.kwargs)
        return value

    def _views(self, node: fx.Node, root: fx.Node) -> list[fx.Node]:
        path: list[fx.Node] = []
        while node is not root:
            path.append(node)
            source: Any = node.args[0]
            if len(node.all_input_nodes) != 1 or self._roots.get(source) is not root:
                raise ExpansionError(f"{_OPERAND} is not a plain view of {root.name}")
            node = source
        return path[::-1]

    def _has_strides(self, node: fx.Node, spec: TensorSpec) -> bool:
        found = self._program.spec(node)
        pairs = zip(found.shape, found.stride, spec.stride, strict=True)
        return all(size == 1 or stride == wanted for size, stride, wanted in pairs)


def reads_by_place(op: Any) -> bool:
    """Whether an operator's result depends on how its first operand lies in its storage."""
    return getattr(op, "overloadpacket", None) in BY_PLACE
