"""Tensors that others have taken the place of: whoever still holds one works with its successor.

Sharding makes other parameters of a module's. Lists and closures of the user's may hold those from before, which nobody
trains; torch cannot give such an object another content, since the classes lie otherwise in memory. So it becomes an
object of a subclass that passes every call on.
"""

from __future__ import annotations

import copy
import functools
import types
from typing import Any

import torch
from torch import Tensor, nn

from lightning_spmd import _private_api as private
from lightning_spmd.ir.node_info import TensorSpec

_SUCCESSOR = "lightning_spmd_successor"
"""Attribute of a tensor that has one."""


class Replaced:
    """A base of the classes of such tensors."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call with the successors."""
        args, kwargs = with_successors((args, kwargs or {}))
        return func(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        successor = vars(self).get(_SUCCESSOR)
        if successor is None:
            raise AttributeError(name)
        return getattr(successor, name)

    def __repr__(self) -> str:
        return repr(vars(self)[_SUCCESSOR])

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(vars(self)[_SUCCESSOR], memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return vars(self)[_SUCCESSOR].__reduce_ex__(protocol)


def replace(tensor: Tensor, successor: Tensor) -> None:
    """From here on a tensor stands for another one, and has no memory of its own.

    Args:
        tensor: a parameter or buffer that is no longer its module's.
        successor: of the same shape.
    """
    if type(tensor) in (Tensor, nn.Parameter):
        with torch.no_grad():
            tensor.data, tensor.grad = private.without_memory(TensorSpec.of(tensor)), None
    vars(tensor)[_SUCCESSOR] = successor
    tensor.__class__ = _replaced(type(tensor))


def with_successors(values: Any) -> Any:
    """Values of any structure, with successors in the place of what they replaced."""
    return private.pytree.tree_map_only(Replaced, successor_of, values)


def successor_of(tensor: Any) -> Any:
    """The tensor that is there now; others as they are."""
    while isinstance(tensor, Replaced):
        tensor = vars(tensor)[_SUCCESSOR]
    return tensor


@functools.cache
def _replaced(kind: type[Tensor]) -> Any:
    return types.new_class(f"Replaced{kind.__name__}", (Replaced, kind))
