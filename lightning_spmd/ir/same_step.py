"""Compares two captured graphs of a step node for node, and finds the first difference.

Host numbers are compared by structure first, then by value: one capture may keep a number as an input that is a
constant behind a guard in the other. Then the present value decides. Tensors from outside are equal if they are the
same object or have equal values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor, fx

from lightning_spmd.ir.node_info import TensorSpec, info_of
from lightning_spmd.ir.same_value import same_plain, same_tensor, shown
from lightning_spmd.ir.signature import GraphInput, InputRole
from lightning_spmd.ir.steps import CapturedStep

_READ_VALUE = torch.ops.aten._local_scalar_dense.default  # noqa: SLF001 - an operator's public name
_UNKNOWN = object()


@dataclass(frozen=True)
class Difference:
    """The first place where two graphs of one step differ.

    Args:
        was: the node of the first graph.
        now: the node of the second graph.
        source: ``file:line`` of the user's code, empty if unknown.
        module: path of the module.
    """

    was: str
    now: str
    source: str = ""
    module: str = ""

    def __str__(self) -> str:
        place = f"  at {self.source}" + (f", in module {self.module!r}" if self.module else "") + "\n"
        return f"{place if self.source else ''}  was: {self.was}\n  now: {self.now}"


def first_difference(one: CapturedStep, other: CapturedStep) -> Difference | None:
    """The first difference of ``other`` from ``one``, or None.

    Args:
        one: the graph in use.
        other: another capture of the same step.
    """
    return _Comparison(one, other).difference()


class _Comparison:
    """Walks both graphs side by side; ``twins`` maps a node of the first to the node of the second that equals it."""

    def __init__(self, one: CapturedStep, other: CapturedStep) -> None:
        self.one, self.other = one, other
        self.twins: dict[fx.Node, fx.Node] = {}
        self._ours, self._theirs = _inputs(one), _inputs(other)

    def difference(self) -> Difference | None:
        """The first one, in the order of the program."""
        return self._inputs() or self._nodes() or self._returned() or self._outputs()

    # ------------------------------------------------------------------ inputs
    def _inputs(self) -> Difference | None:
        """Pair the inputs by role and key; constants have no name and are paired where they are read."""
        places = {(e.role, *e.key): (node, e) for node, e in self._theirs.items()}
        for node, entry in self._ours.items():
            if entry.role is InputRole.CONSTANT or (entry.role, *entry.key) not in places:
                continue  # one that is read without a twin shows itself there
            twin, theirs = places[entry.role, *entry.key]
            if not _same_kind(entry.value, theirs.value):
                return Difference(f"{entry.name}: {_kind(entry.value)}", f"{entry.name}: {_kind(theirs.value)}")
            self.twins[node] = twin
        return None

    def _same_constant(self, one: fx.Node, other: fx.Node) -> bool:
        mine, theirs = self._constant(self.one, self._ours[one]), self._constant(self.other, self._theirs[other])
        if mine is None or theirs is None or not same_tensor(mine, theirs):
            return False
        self.twins[one] = other
        return True

    @staticmethod
    def _constant(step: CapturedStep, entry: GraphInput) -> Tensor | None:
        if entry.role is not InputRole.CONSTANT:
            return None
        index: int = entry.key[0]
        return step.constants[index]()

    # ------------------------------------------------------------------ nodes
    def _nodes(self) -> Difference | None:
        """Operators in their order; reads of a value whose number became a constant have no twin."""
        ours, theirs = _operators(self.one), _operators(self.other)
        one, other = next(ours, None), next(theirs, None)
        while one is not None or other is not None:
            if one is not None and other is not None and self._same_call(one, other):
                one, other = next(ours, None), next(theirs, None)
            elif one is not None and one.target is _READ_VALUE:
                one = next(ours, None)
            elif other is not None and other.target is _READ_VALUE:
                other = next(theirs, None)
            else:
                return self._told(one, other)
        return None

    def _same_call(self, one: fx.Node, other: fx.Node) -> bool:
        same = _same_target(one.target, other.target) and self._same((one.args, one.kwargs), (other.args, other.kwargs))
        if same:
            self.twins[one] = other
        return same

    def _same(self, one: Any, other: Any) -> bool:
        """Equality of arguments, with twins for nodes."""
        if isinstance(one, fx.Node) or isinstance(other, fx.Node):
            return self._same_value(one, other)
        if isinstance(one, (tuple, list)):
            ours, theirs = cast(Sequence[Any], one), cast(Sequence[Any], other)
            return isinstance(other, (tuple, list)) and len(ours) == len(theirs) and all(map(self._same, ours, theirs))
        if isinstance(one, dict):
            mine, its = cast(dict[Any, Any], one), cast(dict[Any, Any], other)
            return (
                isinstance(other, dict) and mine.keys() == its.keys() and all(self._same(mine[k], its[k]) for k in mine)
            )
        return same_plain(one, other)

    def _same_value(self, one: Any, other: Any) -> bool:
        if isinstance(one, fx.Node) and isinstance(other, fx.Node):
            if self.twins.get(one) is other:
                return True
            if one in self._ours and other in self._theirs and self._same_constant(one, other):
                return True
            if _is_number(one) and _is_number(other) and one.op == other.op == "call_function":
                return self._same_call(one, other) or self._same_number(one, other)
        return self._same_number(one, other)

    def _same_number(self, one: Any, other: Any) -> bool:
        was, now = self._number(one), _value(other)
        if _UNKNOWN in (was, now):
            return False
        if isinstance(one, fx.Node) != isinstance(other, fx.Node) and {type(was), type(now)} == {int, float}:
            return was == now  # an operator took the one as it is, and the other as the float that it wanted
        return same_plain(was, now)

    def _number(self, value: Any) -> Any:
        """What a number of the first graph is now."""
        if not isinstance(value, fx.Node):
            return value
        if value in self.twins:
            return _value(self.twins[value])
        if value.op == "placeholder":
            return _UNKNOWN
        operands = [self._number(a) for a in value.args]
        if not _is_number(value) or value.target is _READ_VALUE or _UNKNOWN in operands or value.kwargs:
            return _UNKNOWN
        function: Callable[..., Any] = value.target  # pyright: ignore[reportAssignmentType]
        return function(*operands)

    def _told(self, one: fx.Node | None, other: fx.Node | None) -> Difference:
        one, other = self._number_behind(one, other)
        info = info_of(other if other is not None else cast(fx.Node, one))
        was = "nothing more" if one is None else self._line(one, self.one, self._ours)
        now = "nothing more" if other is None else self._line(other, self.other, self._theirs)
        return Difference(was, now, info.source, info.module)

    def _number_behind(self, one: fx.Node | None, other: fx.Node | None) -> tuple[fx.Node | None, fx.Node | None]:
        """The arithmetic in which two operators first differ, if that is all in which they do."""
        while one is not None and other is not None and _same_target(one.target, other.target):
            pairs = zip(one.all_input_nodes, other.all_input_nodes, strict=False)
            numbers = ((a, b) for a, b in pairs if _is_number(a) and _is_number(b) and a.op == b.op == "call_function")
            deeper = next(((a, b) for a, b in numbers if not self._same_value(a, b)), None)
            if deeper is None:
                break
            one, other = deeper
        return one, other

    def _line(self, node: fx.Node, step: CapturedStep, inputs: Mapping[fx.Node, GraphInput]) -> str:
        def operand(value: fx.Node) -> Any:
            entry = inputs.get(value)
            if entry is None:
                return _Word(value.name)
            return _Word(shown(self._constant(step, entry)) if entry.role is InputRole.CONSTANT else entry.name)

        arguments: Any = fx.map_arg((node.args, node.kwargs), operand)
        words = [shown(a) for a in arguments[0]] + [f"{k}={shown(v)}" for k, v in arguments[1].items()]
        return f"{_name_of(node.target)}({', '.join(words)})"

    # ------------------------------------------------------------------ what leaves the graph
    def _returned(self) -> Difference | None:
        if same_plain(self.one.returned, self.other.returned):
            return None
        method = self.one.variant.method
        return Difference(f"{method} returns {shown(self.one.returned)}", f"it returns {shown(self.other.returned)}")

    def _outputs(self) -> Difference | None:
        ours, theirs = _outputs(self.one), _outputs(self.other)
        for (name, one), (its_name, other) in zip(ours, theirs, strict=False):
            if name != its_name or not self._same(one, other):
                return Difference(f"the result {name[-1]!r} is {shown(one)}", f"{its_name[-1]!r} is {shown(other)}")
        if len(ours) != len(theirs):
            more = max(ours, theirs, key=len)[min(len(ours), len(theirs)) :]
            names = ", ".join(repr(name[-1]) for name, _ in more)
            return Difference(f"{len(ours)} results", f"{len(theirs)} results; {names} in one of them only")
        return None


# ---------------------------------------------------------------------- graphs
def _inputs(step: CapturedStep) -> dict[fx.Node, GraphInput]:
    placeholders = (n for n in step.graph_module.graph.nodes if n.op == "placeholder")
    return dict(zip(placeholders, step.signature.inputs, strict=True))


def _operators(step: CapturedStep) -> Iterator[fx.Node]:
    """Calls that make or change tensors, and reads of a tensor's value; arithmetic on numbers is found from them."""
    for node in step.graph_module.graph.nodes:
        if node.op == "call_function" and (not _is_number(node) or node.target is _READ_VALUE):
            yield node


def _is_number(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (bool, int, float))


def _value(value: Any) -> Any:
    """What a number of the second graph is; its capture has just seen it."""
    if not isinstance(value, fx.Node):
        return value
    return value.meta["val"] if _is_number(value) else _UNKNOWN


def _outputs(step: CapturedStep) -> list[tuple[tuple[Any, ...], Any]]:
    values: Any = list(step.graph_module.graph.nodes)[-1].args[0]
    return [
        ((entry.role, entry.key, entry.name), value)
        for entry, value in zip(step.signature.outputs, values, strict=True)
    ]


def _same_kind(one: Any, other: Any) -> bool:
    """Whether inputs are alike in all that a graph depends on: of tensors, everything but strides without a meaning."""
    if not isinstance(one, TensorSpec) or not isinstance(other, TensorSpec):
        return type(one) is type(other)
    strides = zip(one.shape, one.stride, other.stride, strict=False)
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device) and all(
        size == 1 or mine == its for size, mine, its in strides
    )


def _kind(value: Any) -> str:
    if not isinstance(value, TensorSpec):
        return type(value).__name__
    return f"{value} with strides {list(value.stride)} on {value.device}"


def _same_target(one: Any, other: Any) -> bool:
    if isinstance(one, FunctionType) and isinstance(other, FunctionType):
        return one.__code__ is other.__code__
    return one == other


# ---------------------------------------------------------------------- words
class _Word(str):
    """Text that is shown without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def _name_of(target: Any) -> str:
    name = str(target)
    return getattr(target, "__name__", name) if name.startswith("<") else name
