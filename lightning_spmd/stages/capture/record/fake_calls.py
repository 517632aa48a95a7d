"""Calls on fake tensors at capture: by ``FakeTensorMode`` if a call is new, else with known results.

A known call has the results that torch's own cache of shapes would give, in a fifth of the time: fresh tensors, views
into the storage of the operand, or the operand that it wrote into.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_spmd import _private_api as private
from lightning_spmd.ir.aliasing import UNDECLARED_VIEWS, UNDECLARED_WRITES, gives_fresh_tensors
from lightning_spmd.ir.known_results import Unlike, is_known, key_of, known, remember
from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.ir.operators.shape_functions import empty_result


class _Kind(enum.Enum):
    FRESH = enum.auto()
    VIEW = enum.auto()
    """of the first operand"""
    WRITES = enum.auto()
    """into the first operand, which it gives back, if anything"""


@dataclass(frozen=True, slots=True)
class _View:
    """A view that begins ``offset`` elements behind where its operand does."""

    spec: TensorSpec
    offset: int


class FakeCalls:
    """Makes calls on fake tensors.

    Args:
        mode: active below whoever asks.
    """

    def __init__(self, mode: private.FakeTensorMode) -> None:
        self.mode = mode
        mode.cache_enabled = False  # `known_results` is in front of it
        self._stand_ins: dict[int, Tensor] = {}

    def stand_in(self, tensor: Tensor) -> None:
        """A real tensor is handed to calls as a fake one from now on; only outside dispatch modes.

        torch would compute on one of a single element itself, and an in-place operator would change it, at capture.
        """
        self._stand_ins[id(tensor)] = self.mode.from_tensor(tensor.detach(), static_shapes=True)

    def make(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of a call."""
        if self._stand_ins:
            args, kwargs = mapped(self._as_fake, args), mapped(self._as_fake, kwargs)
        kind = _kind(func)
        key = None if kind is None else key_of(func, args, kwargs, _look)
        if key is None:
            return empty_result(func, args, kwargs)
        if kind is _Kind.VIEW:
            return self._view(func, args, kwargs, ("view", key))
        if is_known(key):
            if kind is _Kind.WRITES:
                return args[0] if func._schema.returns else None  # noqa: SLF001 - as everywhere in torch
            return mapped(self._new, known(key))
        out = empty_result(func, args, kwargs)
        if all(private.tells_all(made) for made in flat(out) if isinstance(made, Tensor)):
            remember(key, mapped(lambda made: TensorSpec.of(made) if isinstance(made, Tensor) else made, out))
        return out

    def _as_fake(self, value: Any) -> Any:
        return self._stand_ins.get(id(value), value) if isinstance(value, Tensor) else value

    def _new(self, spec: Any) -> Any:
        return private.new_fake(self.mode, spec) if isinstance(spec, TensorSpec) else spec

    def _view(self, func: Any, args: Any, kwargs: Any, key: Any) -> Any:
        base = args[0]
        if is_known(key):
            return mapped(lambda view: private.new_fake(self.mode, view.spec, base, view.offset), known(key))
        out = func(*args, **kwargs)
        made = flat(out)
        if all(private.tells_all(v) and private.storage_of(v) == private.storage_of(base) for v in made):
            start = base.storage_offset()
            remember(key, mapped(lambda view: _View(TensorSpec.of(view), view.storage_offset() - start), out))
        return out


@functools.cache
def _kind(func: Any) -> _Kind | None:
    """How results alias operands; None if that is not simple."""
    schema = func._schema  # noqa: SLF001 - how operators are described everywhere in torch
    if gives_fresh_tensors(func) or func in UNDECLARED_WRITES:  # nothing is written at capture
        return _Kind.FRESH
    if func in UNDECLARED_VIEWS:
        return _Kind.VIEW
    first = schema.arguments[0].alias_info if schema.arguments else None
    shared = [r.alias_info for r in schema.returns]
    if first is None or any(a.alias_info is not None for a in schema.arguments if a.kwarg_only):
        return None
    if schema.is_mutable:
        own = len(shared) <= 1 and all(r is not None and r.before_set == first.before_set for r in shared)
        return _Kind.WRITES if own and first.is_write else None
    alone = all(a.alias_info is None for a in schema.arguments[1:])
    same = all(r is not None and not first.before_set.isdisjoint(r.before_set | r.after_set) for r in shared)
    return _Kind.VIEW if shared and alone and same and str(schema.arguments[0].type) == "Tensor" else None


def _look(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if not private.tells_all(value):
        raise Unlike
    return TensorSpec.of(value)


def flat(*values: Any) -> list[Any]:
    """The leaves of a call's nested arguments. Operators take lists and tuples alone; pytree is slower."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, (list, tuple)):
            found += flat(*value)
        elif isinstance(value, dict):
            found += flat(*value.values())
        else:
            found.append(value)
    return found


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Nested arguments of a call with ``function`` of each."""
    if isinstance(value, (list, tuple)):
        kind = tuple if isinstance(value, tuple) else list
        return kind(mapped(function, v) for v in value)
    if isinstance(value, dict):
        return {name: mapped(function, v) for name, v in value.items()}
    return function(value)
