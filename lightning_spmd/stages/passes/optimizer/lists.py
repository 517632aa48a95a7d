"""Which operators have a counterpart on lists of tensors, and what a call of one looks like.

``list_call(node)`` reads ``add_(p, g, alpha=a)`` as the family ``add``, in place, on the tensors ``(p, g)`` with the
keyword ``alpha``; ``list_operator`` names the operator that does this for many ``p`` and ``g``. On the host torch's
list operators are loops over the very kernels that they replace.

The arithmetic on Python numbers between them (``lr / (1 - beta ** step)``) has no such operators; :class:`Each` is one.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lightning_spmd import _private_api as private
from lightning_spmd.ir.node_info import TensorSpec, spec_of, value_of

_aten = torch.ops.aten
ITEM = _aten._local_scalar_dense.default  # noqa: SLF001 - an operator's public name

_UNARY = {
    *("abs", "acos", "asin", "atan", "ceil", "clone", "cos", "cosh", "erf", "erfc", "exp", "expm1", "floor", "frac"),
    *("lgamma", "log", "log10", "log1p", "log2", "neg", "reciprocal", "round", "rsqrt", "sigmoid", "sign", "sin"),
    *("sinh", "sqrt", "tan", "tanh", "trunc", "zero"),
}
_BINARY = {"add", "clamp_max", "clamp_min", "copy", "div", "maximum", "minimum", "mul", "pow", "sub"}
_TERNARY = {"addcdiv", "addcmul", "lerp"}
_NUMBER_NAMES = ("other", "exponent", "weight", "value", "min", "max", "ord")
_TENSOR_NAMES = ("self", "other", "exponent", "src", "end", "weight", "tensor1", "tensor2", "min", "max")
_HALVES = (torch.bfloat16, torch.float16)
_WITH_ONE_TENSOR = {"div", "mul"}
"""Families whose second operand may be one tensor of one element for the whole list."""


@dataclass(frozen=True)
class ListCall:
    """What one node computes, in the terms of list operators.

    Args:
        family: the operator's name without ``_foreach_`` and the underscore of in-place operators; ``clamp`` stands for
            ``clamp_min`` and then ``clamp_max``.
        in_place: whether the result is written into the first tensor.
        tensors: operands of which each entry of the list has its own.
        numbers: operands that are one number for the list, or one an entry.
        keywords: further arguments, one for the list.
    """

    family: str
    in_place: bool
    tensors: tuple[fx.Node, ...]
    numbers: tuple[Any, ...] = ()
    keywords: tuple[tuple[str, Any], ...] = ()


def list_call(node: fx.Node) -> ListCall | None:
    """The node as a call that a list operator can make for many, or None."""
    if node.op != "call_function" or not isinstance(node.target, private.OpOverload):
        return None
    schema = getattr(node.target, "_schema")  # noqa: B009 - an operator's public description
    if not schema.name.startswith("aten::"):
        return None
    arguments = {a.name: a.default_value for a in schema.arguments}
    arguments |= dict(zip([a.name for a in schema.arguments], node.args, strict=False))
    arguments |= node.kwargs
    name = schema.name.removeprefix("aten::")
    family, in_place = name.removesuffix("_"), name.endswith("_")
    if arguments.get("out") is not None:
        if arguments.pop("out") is not arguments["self"] or family not in ("maximum", "minimum"):
            return None
        in_place = True
    if not isinstance(value_of(node), TensorSpec):
        return None
    if family == "linalg_vector_norm":
        return _norm(arguments)
    if family == "clamp":
        return _clamp(arguments, in_place)
    if family in _UNARY | _BINARY | _TERNARY:
        return _elementwise(family, in_place, arguments)
    return None


def _elementwise(family: str, in_place: bool, arguments: dict[str, Any]) -> ListCall | None:
    tensors, numbers, keywords = [], [], []
    for name, value in arguments.items():
        if name in _TENSOR_NAMES and _is_tensor(value):
            tensors.append(value)
        elif name in _NUMBER_NAMES and _is_number(value):
            numbers.append(value)
        elif name == "alpha":
            if not _is_one(value):
                keywords.append((name, value))
        elif family == "clone" and name == "memory_format":
            if value not in (None, torch.preserve_format):
                return None
        elif not (name == "non_blocking" and value is False):
            return None
    wanted = 1 if family in _UNARY else 2 if family in _BINARY else 3
    weighted = family in ("addcmul", "addcdiv")
    if len(tensors) + len(numbers) != wanted + weighted or (numbers and keywords) or len(numbers) > 1:
        return None
    if weighted and _is_one(numbers[0]):
        numbers = [1]
    if family == "copy" and numbers:
        return None
    return ListCall(family, in_place, tuple(tensors), tuple(numbers), tuple(keywords))


def _norm(arguments: dict[str, Any]) -> ListCall | None:
    whole = arguments["dim"] is None and arguments["dtype"] is None and not arguments["keepdim"]
    if not whole or isinstance(arguments["ord"], fx.Node):
        return None
    return ListCall("norm", False, (arguments["self"],), (arguments["ord"],))


def _clamp(arguments: dict[str, Any], in_place: bool) -> ListCall | None:
    low, high = arguments["min"], arguments["max"]
    if any(_is_tensor(bound) for bound in (low, high)):
        return None
    if low is None or high is None:
        family, bound = ("clamp_max", high) if low is None else ("clamp_min", low)
        return ListCall(family, in_place, (arguments["self"],), (bound,))
    return ListCall("clamp", in_place, (arguments["self"],), (low, high))


def list_operator(call: ListCall, one_number: bool, one_tensor: bool) -> Any | None:
    """The operator on lists that makes the calls of a group, None where this torch has none.

    Args:
        call: one of the group; not of the family ``clamp``, which is two operators.
        one_number: whether the group shares its number, else each entry has its own.
        one_tensor: whether the second operand is the same tensor of one element for the whole group.
    """
    if call.family == "mul" and call.in_place and call.numbers and spec_of(call.tensors[0]).dtype in _HALVES:
        return None  # on the host torch's list operator rounds the number to the tensors' dtype first
    if call.family in _UNARY or call.family == "copy":
        overload = "default"
    elif call.numbers:
        overload = "Scalar" if one_number else "ScalarList"
    else:
        overload = "Tensor" if one_tensor and call.family in _WITH_ONE_TENSOR else "List"
    packet = getattr(_aten, f"_foreach_{call.family}{'_' * call.in_place}", None)
    return getattr(packet, overload, None)


def takes_one_tensor(call: ListCall) -> bool:
    """Whether the second operand has one element and may be the same for the whole list."""
    return call.family in _WITH_ONE_TENSOR and len(call.tensors) == 2 and spec_of(call.tensors[1]).shape == ()


def _is_tensor(value: Any) -> bool:
    return isinstance(value, fx.Node) and isinstance(value_of(value), TensorSpec)


def _is_number(value: Any) -> bool:
    return isinstance(value_of(value) if isinstance(value, fx.Node) else value, (bool, int, float))


def _is_one(value: Any) -> bool:
    return not isinstance(value, fx.Node) and value == 1


# ---------------------------------------------------------------- Python numbers
@dataclass(frozen=True)
class Each:
    """Applies a function of numbers to each entry of a list: ``Each(operator.sub)(1.0, [a, b])`` is ``[1 - a, 1 - b]``.

    Args:
        function: of Python numbers, or the operator that reads one out of a tensor.
    """

    function: Any

    @property
    def __name__(self) -> str:
        return "each_item" if self.function is ITEM else f"each_{self.function.__name__}"

    def __str__(self) -> str:  # ranks compare their graphs as text; the address of a function would differ
        return self.__name__

    def __call__(self, *arguments: Any) -> list[Any]:
        """One result an entry; arguments that are no lists are the same for all."""
        columns = [a if isinstance(a, list) else itertools.repeat(a) for a in arguments]
        return list(map(self.function, *columns))


def is_number_call(node: fx.Node) -> bool:
    """Whether the node computes a Python number from others, or reads one out of a tensor."""
    if node.op != "call_function" or not isinstance(value_of(node), (bool, int, float)) or node.kwargs:
        return False
    if node.target is ITEM:
        return True
    if isinstance(node.target, private.OpOverload) or not getattr(node.target, "__name__", "").isidentifier():
        return False
    return all(_is_number(a) for a in node.args)
