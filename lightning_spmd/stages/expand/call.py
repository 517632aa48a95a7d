"""The input of a sharding rule (:class:`OpCall`) and its answer (:class:`Layout`).

A rule is about one operator call and one mesh axis. Operands are the tensors among the arguments in schema order, with
lists flattened; outputs are flattened in the same way. Rules are asked only if some operand is not replicated, or a
placement of the result is wanted. They need not list the layout in which everything is replicated.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

from torch import fx

from lightning_spmd.ir.first import first
from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.ir.placement import REPLICATE, Blocks, Chunk, Partial, Placement, Shard, ShardAxis
from lightning_spmd.parallel.pieces import local_shape
from lightning_spmd.stages.expand.program.local_program import LocalProgram

Emit: TypeAlias = "Callable[[LocalCall], list[fx.Node | None]]"
Rule: TypeAlias = "Callable[[OpCall], list[Layout]]"
Localizer: TypeAlias = "Callable[[LocalCall], dict[str, Any]]"


@dataclass(frozen=True, slots=True)
class Layout:
    """One legal way to run an operator on the ranks of one axis.

    Args:
        inputs: the placement that each operand must have.
        outputs: the placement that each output then has.
        emit: builds the local program if it is not the operator itself on local tensors; returns one node per output.
        local: whether that program has no collective on this axis.
        expected: whether the gather that it needs is the purpose of the axis' plan, so that no warning is given.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    emit: Emit | None = None
    local: bool = False
    expected: bool = False


@cache
def argument_names(op: Any) -> tuple[tuple[str, Any, bool], ...]:
    """(name, default, keyword-only) of every schema argument of an operator."""
    return tuple((a.name, a.default_value, a.kwarg_only) for a in op._schema.arguments)


def bind_arguments(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by schema name, defaults filled in."""
    return {
        name: args[i] if i < len(args) else kwargs.get(name, default)
        for i, (name, default, _) in enumerate(argument_names(op))
    }


def flatten_values(value: Any) -> Iterator[Any]:
    """The leaves of nested lists and tuples."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from flatten_values(item)
    else:
        yield value


def is_tensor(value: Any) -> bool:
    """Whether an argument is a node that produces one tensor."""
    return isinstance(value, fx.Node) and isinstance(value.meta.get("val"), TensorSpec)


class OpCall:
    """One operator call of the global graph, seen along one mesh axis."""

    __slots__ = (
        "arguments", "axis", "current", "forced", "node", "op", "operands", "outputs", "specs", "splits_sequences"
    )  # fmt: skip

    def __init__(self, node: fx.Node, axis: ShardAxis, placement_of: Callable[[fx.Node], Placement]) -> None:
        self.node = node
        self.op: Any = node.target
        self.axis = axis
        self.arguments = bind_arguments(node.target, node.args, node.kwargs)
        self.operands: list[fx.Node] = [v for v in flatten_values(list(self.arguments.values())) if is_tensor(v)]
        self.specs: list[TensorSpec] = [n.meta["val"] for n in self.operands]
        self.current: list[Placement] = [placement_of(n) for n in self.operands]
        self.outputs: list[Any] = list(flatten_values(node.meta.get("val")))
        self.forced: Placement | None = None
        self.splits_sequences = False

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def get(self, name: str, default: Any = None) -> Any:
        """An argument by schema name, or ``default`` if this overload has none of that name."""
        return self.arguments.get(name, default)

    def index(self, name: str) -> int | None:
        """Position among the operands of the tensor argument ``name``, or None if it is absent."""
        position = 0
        for key, value in self.arguments.items():
            leaves = [v for v in flatten_values(value) if is_tensor(v)]
            if key == name:
                return position if leaves else None
            position += len(leaves)
        return None

    def named(self, dims: dict[str, int | None]) -> list[int | None]:
        """Dimensions per operand from dimensions per argument name (first tensor of a list argument)."""
        found: list[int | None] = [None] * len(self.operands)
        for name, dim in dims.items():
            if (i := self.index(name)) is not None:
                found[i] = dim
        return found

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape of the first output."""
        return self.outputs[0].shape


# Per operand or output: a tensor dimension to split, or a placement, or None for "replicated".
Where: TypeAlias = "int | Placement | None"


def _placement(where: Where, outer: Blocks) -> Placement:
    if where is None:
        return REPLICATE
    return Shard(where, outer) if isinstance(where, int) else where


def along(call: OpCall, inputs: Sequence[Where], outputs: Sequence[Where], emit: Emit | None = None) -> list[Layout]:
    """Layouts that split the given dimensions of operands and outputs together.

    Offered only where an operand already is split that way (or the output is wanted that way): a split by itself gains
    nothing.
    """
    outers = {
        p.outer
        for p, d in zip(call.current, inputs, strict=True)
        if isinstance(p, Shard) and isinstance(d, int) and p.dim == d
    }
    if isinstance(call.forced, Shard) and outputs and outputs[0] == call.forced.dim and isinstance(outputs[0], int):
        outers.add(call.forced.outer)
    found: list[Layout] = []
    if any(isinstance(p, Chunk) and p.dim == d for p, d in zip(call.current, inputs, strict=True)):
        found += _chunked(call, inputs, outputs, emit)
    for outer in outers:
        sizes = {s.shape[d] for s, d in zip(call.specs, inputs, strict=True) if isinstance(d, int)}
        sizes |= {
            s.shape[d] for s, d in zip(call.outputs, outputs, strict=True) if isinstance(d, int) and s is not None
        }
        if all(call.axis.splits(size, outer) for size in sizes) and (outer == 1 or len(sizes) == 1):
            found.append(
                Layout(tuple(_placement(d, outer) for d in inputs), tuple(_placement(d, outer) for d in outputs), emit)
            )
    return found


def _chunked(call: OpCall, inputs: Sequence[Where], outputs: Sequence[Where], emit: Emit | None) -> list[Layout]:
    """As :func:`along` for chunks, which keep their pieces only where all dimensions have the same size."""
    pairs = [*zip(call.specs, inputs, strict=True), *zip(call.outputs, outputs, strict=True)]
    sizes = {s.shape[d] for s, d in pairs if isinstance(d, int) and s is not None}
    if len(sizes) != 1 or any(isinstance(d, int) and d != 0 for d in (*inputs, *outputs)):
        return []

    def placed(where: Where) -> Placement:
        return Chunk(where) if isinstance(where, int) else _placement(where, 1)

    results = tuple(map(placed, outputs))
    if call.axis.within is not None and any(isinstance(result, Partial) for result in results):
        # every chunk lies on several ranks: the sum over all of the axis would count it as often
        emit = _reduced_at_once(emit, results)
        results = tuple(REPLICATE if isinstance(result, Partial) else result for result in results)
    return [Layout(tuple(map(placed, inputs)), results, emit)]


@cache
def _reduced_at_once(emit: Emit | None, results: tuple[Placement, ...]) -> Emit:
    """The emitter that reduces partial results among the ranks that hold the chunks."""

    def reduced(call: LocalCall) -> list[fx.Node | None]:
        if emit is not None:
            items = emit(call)
        else:
            items = [call.default()] if len(results) == 1 else call.items(call.default())
        axes = call.emitting_axes(reduced)
        return [
            call.all_reduce(item, axes, result.op) if isinstance(result, Partial) and item is not None else item
            for item, result in zip(items, results, strict=True)
        ]

    return reduced


def axis_of_pieces(axis: ShardAxis, placements: Sequence[Placement]) -> ShardAxis:
    """The ranks that together hold each element once, of an axis over which some operand is split."""
    return axis.chunks if any(isinstance(p, Chunk) for p in placements) else axis


def in_one_range(layouts: Sequence[Layout]) -> list[Layout]:
    """The layouts in which a rank's piece is one range of the dimension, from ``ShardAxis.offset`` on."""

    def fits(placement: Placement) -> bool:
        return not isinstance(placement, Chunk) and (not isinstance(placement, Shard) or placement.outer == 1)

    return [c for c in layouts if all(map(fits, (*c.inputs, *c.outputs)))]


def linear(call: OpCall, positions: Sequence[int], outputs: Sequence[Where] | None = None) -> list[Layout]:
    """The layout in which the operands at ``positions`` and all outputs are partial sums, the others replicated."""
    if not any(call.current[i] == Partial() for i in positions):
        return []
    inputs = tuple(Partial() if i in positions else REPLICATE for i in range(len(call.operands)))
    return [Layout(inputs, tuple(_placement(d, 1) for d in outputs) if outputs else (Partial(),) * len(call.outputs))]


def rowwise(call: OpCall, excluded: Sequence[int] = (), *, last: int = 0) -> list[Layout]:
    """Layouts for operators that treat every index of the other dimensions alike.

    All operands and outputs that have at least ``ndim - last`` dimensions share their leading ones; smaller operands
    are replicated.

    Args:
        call: the call.
        excluded: dimensions (of the first output) that are worked along, may be negative.
        last: that many trailing dimensions are worked along too.
    """
    ndim = max((len(s.shape) for s in [*call.specs, *call.outputs] if s is not None), default=0)
    banned = {d % ndim for d in excluded} if ndim else set()
    found: list[Layout] = []
    for dim in range(ndim - last):
        if dim in banned:
            continue
        inputs = [dim if len(s.shape) > dim and len(s.shape) >= ndim - last else None for s in call.specs]
        outputs = [dim if s is not None and len(s.shape) > dim else None for s in call.outputs]
        found.extend(along(call, inputs, outputs))
    return found


class LocalCall:
    """The input of a custom emitter or localizer: local operands, and placements on every axis.

    Args:
        program: the program to which nodes are appended.
        node: the global node.
        layouts: the chosen layout on each axis.
        operands: the local operands, in schema order.
        numbers: the local nodes of number-valued global nodes.
    """

    def __init__(
        self,
        program: LocalProgram,
        node: fx.Node,
        layouts: Sequence[Layout],
        operands: list[fx.Node],
        numbers: dict[fx.Node, fx.Node],
    ) -> None:
        self.program = program
        self.node = node
        self.op: Any = node.target
        self.layouts = layouts
        self.operands = operands
        self.globals = bind_arguments(node.target, node.args, node.kwargs)
        self.outputs: list[Any] = list(flatten_values(node.meta.get("val")))
        self._numbers = numbers
        flat = iter(operands)
        self._locals = {name: self._substitute(value, flat) for name, value in self.globals.items()}
        self.call = program.call

    def _substitute(self, value: Any, flat: Any) -> Any:
        if is_tensor(value):
            return first(flat, "operand")
        if isinstance(value, fx.Node):
            return self._numbers[value]
        return type(value)(self._substitute(v, flat) for v in value) if isinstance(value, (list, tuple)) else value

    def __getitem__(self, name: str) -> Any:
        """The argument ``name`` with local operands."""
        return self._locals[name]

    def get(self, name: str, default: Any = None) -> Any:
        """Like ``[]``, or ``default`` if the overload has no such argument."""
        return self._locals.get(name, default)

    def replace(self, name: str, value: fx.Node) -> None:
        """Work on another local operand."""
        self._locals[name] = value

    def spec(self, name: str) -> TensorSpec:
        """Global spec of the tensor argument ``name``."""
        return self.globals[name].meta["val"]

    def output_shape(self, index: int = 0) -> list[int]:
        """Local shape of output ``index``."""
        placements = [layout.outputs[index] for layout in self.layouts]
        return list(local_shape(self.outputs[index].shape, placements, self.program.axes))

    def emitting_axes(self, emit: Emit) -> list[ShardAxis]:
        """The axes whose layout asked for this emitter; of one that splits in chunks, the ranks that hold them."""
        pairs = zip(self.program.axes, self.layouts, strict=True)
        return [axis_of_pieces(axis, layout.inputs) for axis, layout in pairs if layout.emit is emit]

    def all_reduce(
        self, value: fx.Node, axes: Sequence[ShardAxis], op: str = "sum", *, keep_nan: bool = True
    ) -> fx.Node:
        """``value`` reduced over several axes."""
        for axis in axes:
            value = self.program.all_reduce(value, axis, op, keep_nan=keep_nan)
        return value

    def items(self, value: fx.Node) -> list[fx.Node | None]:
        """The outputs of a multi-output call, one node each."""
        return [
            self.call(operator.getitem, value, i) if isinstance(spec, TensorSpec) else None
            for i, spec in enumerate(value.meta["val"])
        ]

    def default(self, **overrides: Any) -> fx.Node:
        """The operator itself on local operands, written as the global call is, with some arguments replaced."""
        new = self._written_as(self.call, overrides)
        if new is None:
            raise TypeError(f"{self.op} gave nothing")
        return new

    def default_if_possible(self, **overrides: Any) -> fx.Node | None:
        """Like :meth:`default` if every rank can make the call, otherwise None."""
        return self._written_as(self.program.call_if_possible, overrides)

    def _written_as(self, call: Callable[..., fx.Node | None], overrides: dict[str, Any]) -> fx.Node | None:
        node = self.node
        names = [name for name, _, _ in argument_names(node.target)]
        values = {**self._locals, **overrides}
        given = names[: len(node.args)]
        keywords = [n for n in names if n in node.kwargs or (n in overrides and n not in given)]
        new = call(node.target, *[values[n] for n in given], **{n: values[n] for n in keywords})
        if new is not None and overrides and any(not axis.is_even for axis in self.program.axes):
            new.meta["rank_dependent"] = True
        return new
