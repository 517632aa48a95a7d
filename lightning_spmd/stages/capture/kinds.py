"""Kinds of Python values, by their types: what the walk looks into, what it leaves alone."""

from __future__ import annotations

import argparse
import collections
import functools
import itertools
import types
from typing import Any

from torch import nn

from lightning_spmd.stages.capture.user_code import is_user_class

TORCH_INTERNALS = frozenset(nn.Module().__dict__) - {"training"}
BOOKKEEPING = frozenset({"_current_fx_name", "_trainer", "_fabric", "_param_requires_grad_state", "log", "print"})
"""Lightning's own: the hook that runs (set around each), what toggled parameters were, and what capture replaces."""
SWAPPED = frozenset({"param_groups", "state"})
LIGHTNING = ("lightning", "pytorch_lightning")
WRAPPERS = ("collections", "weakref", "queue")  # their data lies in attributes that no user's code names
OPERATORS = ("torch", "numpy", "torchmetrics", "lightning_spmd")  # of these nobody keeps a step's state in properties
DATA_DESCRIPTORS = (property, types.GetSetDescriptorType, types.MemberDescriptorType)
STATELESS = (
    types.BuiltinFunctionType,
    types.MethodWrapperType,
    types.MethodDescriptorType,
    types.CodeType,
    type(NotImplemented),
)
WITHOUT_STATE = frozenset(
    {"builtins", "_thread", "torch", "torch._C", "typing", "types", "functools", "operator", "inspect", "dataclasses",
     "_contextvars", "collections"}
)  # fmt: skip
"""Where classes come from whose objects do not change: ``inspect.Signature``, ``dataclasses.Field``, tokens."""
PLAIN_DATA = (types.SimpleNamespace, argparse.Namespace)
CONTAINERS = (dict, list, tuple, set, frozenset, collections.deque)
ITERATORS = (
    types.GeneratorType, *(type(iter(c)) for c in ([], (), {}, {}.values(), {}.items(), set(), "", range(0))),
    enumerate, zip, map, filter, reversed, itertools.count, itertools.cycle, itertools.chain, itertools.repeat,
    itertools.islice, itertools.product, itertools.permutations, itertools.combinations, itertools.accumulate,
    itertools.starmap, itertools.takewhile, itertools.dropwhile, itertools.zip_longest,
)  # fmt: skip


def attributes_of(value: Any) -> dict[str, Any] | None:
    """The ``__dict__`` of an object, without asking the object; None if it has none."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except (AttributeError, TypeError):
        return None
    return found if type(found) is dict else None


def is_on(kind: type, name: str) -> bool:
    """Whether a class or one of its bases, ``object`` aside, defines a name."""
    return any(name in vars(base) for base in kind.__mro__[:-1])


@functools.cache
def slots_of(kind: type) -> frozenset[str]:
    """The slots of a class of the user's and of its bases."""
    found = (
        name
        for base in kind.__mro__
        if is_user_class(base)
        for name, value in vars(base).items()
        if isinstance(value, types.MemberDescriptorType)
    )
    return frozenset(found)
