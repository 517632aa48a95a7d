"""The graph being written. Every call is made on fake tensors (``fakes``), which give its spec and check its shapes.

All ranks must write the same calls, although the possible calls depend on the size of a piece: one row is contiguous in
every order, and a kernel may refuse a tensor without rows. So the program is written for every size of a rank's piece
(``expand``). A shorter form is used if all ranks can use it (:meth:`LocalProgram.agreed`), and a call that one of them
cannot make is made by none.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from lightning_spmd import _private_api as private
from lightning_spmd.ir.aliasing import aliased_argument
from lightning_spmd.ir.default_dtype import switches_of
from lightning_spmd.ir.effects import mentions
from lightning_spmd.ir.layout import is_plain, row_major
from lightning_spmd.ir.node_info import SUBJECT, NodeInfo, Section, TensorSpec, info_of
from lightning_spmd.ir.placement import Chunk, Placement, Shard, ShardAxis
from lightning_spmd.stages.expand.program.fakes import Fakes

_functional = torch.ops._c10d_functional


class LocalProgram:
    """Builds one rank's graph.

    Args:
        axes: the mesh axes.
        longer: places where some rank cannot use the shorter form. A place is a node of the global graph and the number
            of such choices made for it before.
    """

    def __init__(self, axes: tuple[ShardAxis, ...], longer: set[tuple[fx.Node, int]] | None = None) -> None:
        self.axes = axes
        self.longer = set() if longer is None else longer
        self.graph = fx.Graph()
        self.attributes: dict[str, torch.Tensor] = {}
        self.roots: dict[fx.Node, fx.Node] = {}
        """by value, the one whose storage it may share"""
        self.class_sums: dict[fx.Node, fx.Node] = {}
        """gradient of scores whose classes are split → its sum over all classes, if known without a collective"""
        self.trips: dict[tuple[fx.Node, str], Any] = {}
        """(ends of rows by expert, axis) → what its ranks know of where these rows go (``experts``)"""
        self.info: NodeInfo | None = None
        self.subject = ""
        """what the next collective moves"""
        self._place: fx.Node | None = None
        self._choices = Counter[fx.Node | None]()
        self._fakes = Fakes(has_rows=all(map(_has_rows, axes)))

    def begin(self, node: fx.Node) -> None:
        """Begin the program of ``node`` of the global graph."""
        self.info = info_of(node)
        self._place = node

    def agreed(self, possible: bool) -> bool:
        """Whether the shorter form of the next call may be used: it is possible on every rank."""
        if self._place is None:
            return possible
        place = (self._place, self._choices[self._place])
        self._choices[self._place] += 1
        if not possible:
            self.longer.add(place)
        return place not in self.longer

    def add_input(self, node: fx.Node, value: Any, placements: tuple[Placement, ...]) -> fx.Node:
        """A placeholder for the global placeholder ``node`` with its local value."""
        new = self.graph.placeholder(str(node.target))
        new.meta.update(val=value, placements=placements)
        self.roots[new] = new
        return new

    def spec(self, node: fx.Node) -> TensorSpec:
        """The spec of a new node on this rank."""
        return self._fakes.spec(node)

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        """The local shape of a new node."""
        return self.spec(node).shape

    def call(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Append a call and compute its spec."""
        with switches_of(self.info or NodeInfo(Section.COMMUNICATION)):
            value, fake = self._fakes.result(op, args, kwargs)
        node = self._append(op, args, kwargs, value)
        self._fakes.keep(node, fake)
        return node

    def call_if_possible(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node | None:
        """Like :meth:`call` if every rank can make the call, otherwise None."""
        try:
            self._fakes.result(op, args, kwargs)
        except (RuntimeError, ValueError):
            self.agreed(False)
            return None
        return self.call(op, *args, **kwargs) if self.agreed(True) else None

    def number(self, op: Any, operands: Sequence[Any], value: Any) -> fx.Node:
        """Append a call that reads numbers out of tensors (``.item()``); they were ``value`` at capture."""
        return self._append(op, tuple(operands), {}, value)

    def dense(self, node: fx.Node) -> fx.Node:
        """``node`` in row-major order: a copy, unless every rank has it in that order."""
        if self.agreed(is_plain(self.spec(node))):
            return node
        return self.call(torch.ops.aten.clone.default, node, memory_format=torch.contiguous_format)

    def collective(self, op: Any, operand: fx.Node, shape: Sequence[int], *args: Any) -> fx.Node:
        """Append a functional collective on ``operand`` and its wait, and return the result.

        The result's spec is stated, not computed, so no process group needs to exist while graphs are built.
        """
        return self.wait(self.start(op, operand, shape, *args))

    def start(self, op: Any, operand: fx.Node, shape: Sequence[int], *args: Any) -> fx.Node:
        """Append a functional collective. Calls that are appended before :meth:`wait` run beside it."""
        source = self.spec(operand)
        # With uneven rows strides may differ among the ranks (one row is contiguous either way); their graphs may not.
        # Libraries read the memory as it lies.
        if self._fakes.is_lazy(operand) or not is_plain(source) or not self._lies_alike(operand):
            operand = self.call(torch.ops.aten.clone.default, operand, memory_format=torch.contiguous_format)
        shape = tuple(shape)
        result = TensorSpec(shape, row_major(shape), source.dtype, source.device)
        started = self._append(op, (operand, *args), {}, result)
        started.meta.update({"info": self._communicating(), SUBJECT: (self.subject,)})
        return started

    def wait(self, started: fx.Node) -> fx.Node:
        """Append the wait for a collective and return its result."""
        waited = self._append(_functional.wait_tensor.default, (started,), {}, self.spec(started))
        waited.meta["info"] = self._communicating()
        return waited

    def _lies_alike(self, node: fx.Node) -> bool:
        """Whether a value has the same sizes on all ranks."""
        placements = node.meta.get("placements")
        whole = placements is not None and not mentions(placements, (Shard, Chunk))
        return whole or all(axis.is_even for axis in self.axes)

    def _communicating(self) -> NodeInfo:
        info = self.info or NodeInfo(Section.COMMUNICATION)
        return NodeInfo(Section.COMMUNICATION, info.module, info.source)

    def all_reduce(self, operand: fx.Node, axis: ShardAxis, op: str = "sum", *, keep_nan: bool = True) -> fx.Node:
        """The reduction of ``operand`` over the ranks of ``axis``.

        For a maximum libraries compare with ``<``, which keeps a NaN or drops it as the ranks happen to be ordered: so
        what is NaN travels beside the numbers, unless ``keep_nan`` is false.
        """
        if op == "sum" or not keep_nan or not self.spec(operand).dtype.is_floating_point:
            return self._all_reduce(operand, axis, op)
        unknown = self.call(torch.ops.aten.isnan.default, operand)
        known = self.call(torch.ops.aten.masked_fill.Scalar, operand, unknown, -math.inf if op == "max" else math.inf)
        flags = self.call(torch.ops.aten._to_copy.default, unknown, dtype=self.spec(operand).dtype)
        flags = flags if op == "max" else self.call(torch.ops.aten.neg.default, flags)
        both = self._all_reduce(self.call(torch.ops.aten.stack.default, [known, flags]), axis, op)
        unknown = self.call(torch.ops.aten.ne.Scalar, self.call(torch.ops.aten.select.int, both, 0, 1), 0)
        known = self.call(torch.ops.aten.select.int, both, 0, 0)
        return self.call(torch.ops.aten.masked_fill.Scalar, known, unknown, math.nan)

    def _all_reduce(self, operand: fx.Node, axis: ShardAxis, op: str) -> fx.Node:
        return self.collective(_functional.all_reduce.default, operand, self.shape(operand), op, axis.group)

    def constant(self, value: torch.Tensor) -> fx.Node:
        """A small constant tensor held by the graph module."""
        name = f"constant_{len(self.attributes)}"
        self.attributes[name] = value
        node = self.graph.create_node("get_attr", name)
        node.meta.update(val=TensorSpec.of(value), info=self.info)
        self.roots[node] = node
        return node

    def _append(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> fx.Node:
        node = self.graph.call_function(op, args, kwargs)
        node.meta.update(val=value, info=self.info)
        source = aliased_argument(node)
        self.roots[node] = node if source is None else self.roots[source]
        return node

    def finish(self, outputs: list[Any]) -> fx.GraphModule:
        """Close the graph."""
        self.graph.output(tuple(outputs))
        return private.GraphModule(torch.nn.Module() if not self.attributes else _holder(self.attributes), self.graph)


def _has_rows(axis: ShardAxis) -> bool:
    """Whether no piece is empty. Where values choose rows, ranks without any are tried with none that are chosen."""
    return all(axis.chosen) if axis.chosen else bool(axis.split[axis.rank] or not axis.total)


def _holder(attributes: dict[str, torch.Tensor]) -> torch.nn.Module:
    holder = torch.nn.Module()
    for name, value in attributes.items():
        holder.register_buffer(name, value)
    return holder
