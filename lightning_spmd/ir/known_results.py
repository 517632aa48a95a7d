"""Remembers the results of calls of torch's own operators for the process.

The result's spec depends only on the specs of the operands. A model's layers repeat the same calls, and so do the
traces of one step, the programs of each rank, and the sizes of a rank's piece. Asking torch's shape function takes a
hundred microseconds.

Not remembered: operators of libraries (their shape functions may look at anything), results that depend on data (those
of ``x[index]`` only where an index is a mask) or on a storage offset, complex numbers (a conjugate view looks like any
other tensor), operators that change the shape of their operand in place, composite operators (``atleast_1d`` may return
its operand, or a view), and operators of numbers in place of tensors (``torch.div(16, 8)``): torch computes them at
capture, too, and Python may ask for the value.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from lightning_spmd._private_api import is_composite
from lightning_spmd.ir.node_info import TensorSpec

aten = torch.ops.aten

_MOST = 1 << 15
"""Calls that are remembered; then it begins anew. A model of 12 layers has some hundreds."""
_results: dict[Any, Any] = {}

BY_PLACE = {aten.as_strided, aten.as_strided_, aten.as_strided_copy, aten.as_strided_scatter}
"""Operators whose result depends on how their first operand lies in its storage."""
_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_INDEX = aten.index.Tensor
_MASKS = (torch.bool, torch.uint8)
_UNLIKE = (torch.Tag.inplace_view, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class Unlike(TypeError):
    """A value that its spec does not describe completely."""


def key_of(op: Any, args: Any, kwargs: Any, look: Callable[[Any], Any]) -> Any:
    """The key that determines a call's result; None if unknown.

    Args:
        op: the operator.
        args: of the call.
        kwargs: of the call.
        look: returns the TensorSpec of a value that stands for a tensor, otherwise the value; raises :class:`Unlike`.
    """
    if not _is_known(op) or (args and isinstance(args[0], (int, float)) and _takes_tensor_first(op)):
        return None

    def part(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return tuple(part(entry) for entry in cast(Sequence[Any], value))
        seen = look(value)
        if isinstance(seen, TensorSpec):
            return seen
        if isinstance(seen, _SYMBOLS):
            raise Unlike  # to compare it is to decide on it
        return type(seen), seen

    try:
        if op is _INDEX and any(_is_mask(look(index)) for index in args[1]):
            return None
        key = (op, torch.get_default_dtype(), part(args), tuple((name, part(value)) for name, value in kwargs.items()))
        hash(key)
    except TypeError:
        return None
    return key


def is_known(key: Any) -> bool:
    """Whether a call's result is remembered."""
    return key is not None and key in _results


def known(key: Any) -> Any:
    """The specs of a call's result (one, or a tuple or list), or None."""
    return _results[key]


def remember(key: Any, value: Any) -> None:
    """Store ``value`` as the answer of :func:`known`."""
    parts = cast(Sequence[Any], value) if isinstance(value, (list, tuple)) else [value]
    if key is None or any(isinstance(v, TensorSpec) and v.dtype.is_complex for v in parts):
        return
    if len(_results) >= _MOST:
        _results.clear()
    _results[key] = value


def _is_mask(seen: Any) -> bool:
    return isinstance(seen, TensorSpec) and seen.dtype in _MASKS


@functools.cache
def _takes_tensor_first(op: Any) -> bool:
    arguments = op._schema.arguments  # noqa: SLF001 - how operators are described everywhere in torch
    return bool(arguments) and str(arguments[0].type) == "Tensor"


@functools.cache
def _is_known(op: Any) -> bool:
    if getattr(op, "namespace", None) != "aten" or op is aten.view.dtype or op.overloadpacket in BY_PLACE:
        return False
    return op is _INDEX or not (any(tag in op.tags for tag in _UNLIKE) or is_composite(op))
