"""What calls of torch's own operators produce, remembered for the process.

What such a call gives depends on what its operands look like and on nothing else. The layers of a model repeat the same
calls; so do the traces of one step, the program of each rank, and each size of a rank's piece. To ask torch's shape
function takes a hundred microseconds.

Not remembered: operators of others (their shape functions may look at anything), results that depend on data or on the
place in a storage, complex numbers (a conjugate view looks like any other tensor), what changes the shape of its
operand in place, and what is made of other operators (``atleast_1d`` gives its operand back, or a view, or neither).
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
_UNLIKE = (torch.Tag.inplace_view, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class Unlike(TypeError):
    """A value of which its spec does not tell all."""


def key_of(op: Any, args: Any, kwargs: Any, look: Callable[[Any], Any]) -> Any:
    """What a call's result depends on; None if that is unknown.

    Args:
        op: the operator.
        args: of the call.
        kwargs: of the call.
        look: gives the TensorSpec of whatever stands for a tensor, else the value; raises :class:`Unlike`.
    """
    if not _is_known(op):
        return None

    def part(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return tuple(part(entry) for entry in cast(Sequence[Any], value))
        seen = look(value)
        if isinstance(seen, TensorSpec):
            return seen
        return type(seen), seen

    try:
        key = (op, torch.get_default_dtype(), part(args), tuple((name, part(value)) for name, value in kwargs.items()))
        hash(key)
    except TypeError:
        return None
    return key


def is_known(key: Any) -> bool:
    """Whether a call's result is remembered."""
    return key is not None and key in _results


def known(key: Any) -> Any:
    """The specs that a call gives, a tuple or list of them, or None."""
    return _results[key]


def remember(key: Any, value: Any) -> None:
    """``value`` is what :func:`known` says from now on."""
    parts = cast(Sequence[Any], value) if isinstance(value, (list, tuple)) else [value]
    if key is None or any(isinstance(v, TensorSpec) and v.dtype.is_complex for v in parts):
        return
    if len(_results) >= _MOST:
        _results.clear()
    _results[key] = value


def forget() -> None:
    """Begin anew, as a process does."""
    _results.clear()


@functools.cache
def _is_known(op: Any) -> bool:
    if getattr(op, "namespace", None) != "aten" or op is aten.view.dtype or op.overloadpacket in BY_PLACE:
        return False
    return not any(tag in op.tags for tag in _UNLIKE) and not is_composite(op)
