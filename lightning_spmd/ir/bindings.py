"""torch's Python bindings of operators, which take half the time of the dispatcher's boxed entry.

``x.view([16])`` costs 0.8 microseconds on the host where ``aten::view``'s own entry costs 1.6. Which operator a binding
calls is decided by torch's parser from the kinds of the arguments. So each form of a call is tried once, under a mode
that only looks: the binding stands for the operator if it arrives as this very operator with these very arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx

from lightning_spmd import _private_api as private
from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.ir.same_value import same_plain
from lightning_spmd.ir.sizes import Size, SizeFloat

METHOD = "method"
"""The binding is the method of that name of the call's first argument."""

_NUMBERS = (bool, int, float, complex)
_known: dict[Any, Any] = {}


def binding_of(func: Any, arguments: Sequence[Any], words: Mapping[str, Any]) -> Any:
    """What calls an operator with the same arguments.

    Args:
        func: the operator.
        arguments: of a call in a graph.
        words: likewise, by name.

    Returns:
        :data:`METHOD`, a function of torch's, or None where there is nothing but the operator's entry.
    """
    if not private.is_operator(func) or func.namespace != "aten":
        return None
    try:
        args: Any = tuple(_kind(a) for a in arguments)
        key = (func, args, tuple((name, _kind(a)) for name, a in words.items()))
        if key not in _known:
            _known[key] = _tried(func, _made(arguments), _made(words))
        return _known[key]
    except TypeError:  # something that has no hash, or that nothing stands for
        return None


def _kind(value: Any) -> Any:
    """All of an argument that torch's parser looks at."""
    if isinstance(value, fx.Node):
        seen: Any = value.meta.get("val")
        if isinstance(seen, TensorSpec):
            return Tensor, len(seen.shape), seen.dtype
        if not isinstance(seen, _NUMBERS):
            raise TypeError(f"{value.name} is no argument that a trial could have")
        return _number(seen)
    if isinstance(value, (list, tuple)):
        entries = cast(Sequence[Any], value)
        return len(entries), tuple(_kind(v) for v in entries)
    return _number(value) if isinstance(value, (*_NUMBERS, Size, SizeFloat)) else value


def _number(value: complex | Size | SizeFloat) -> type:
    return int if isinstance(value, Size) else float if isinstance(value, SizeFloat) else type(value)


def _made(value: Any) -> Any:
    """Arguments for a trial."""
    if isinstance(value, fx.Node):
        value = value.meta.get("val")
    if isinstance(value, TensorSpec):
        return torch.empty([2] * len(value.shape), dtype=value.dtype, device="meta")
    if isinstance(value, Size):
        return 3
    if isinstance(value, SizeFloat):
        return 3.0
    if isinstance(value, (list, tuple)):
        return [_made(v) for v in cast(Sequence[Any], value)]
    if isinstance(value, Mapping):
        return {name: _made(v) for name, v in cast(Mapping[str, Any], value).items()}
    return value


class _Seen(BaseException):
    """What arrived. No ``Exception``: nothing on the way shall take it for one of its own."""

    def __init__(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        super().__init__()
        self.func, self.args_seen, self.kwargs_seen = func, args, kwargs


class _Looks(private.TorchDispatchMode):
    """Ends a call where it arrives."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _Seen(func, args, kwargs or {})


def _tried(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    method = private.method_binding_of(func) if args and isinstance(args[0], Tensor) else None
    if method is not None and _is_call_of(func, method, args, kwargs):
        return METHOD
    functions = private.function_bindings_of(func)
    return next((f for f in functions if _is_call_of(func, f, args, kwargs)), None)


def _is_call_of(func: Any, binding: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    try:
        with torch.no_grad(), private.disable_dispatch_modes(), _Looks():
            binding(*args, **kwargs)
    except _Seen as seen:
        if seen.func is not func:
            return False
        return _same(_all_of(func, args, kwargs), _all_of(func, seen.args_seen, seen.kwargs_seen))
    except (TypeError, RuntimeError, ValueError, IndexError):
        return False
    return False


def _all_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Arguments in the order of the schema, with defaults."""
    arguments = func._schema.arguments  # noqa: SLF001 - how operators are described everywhere in torch
    given: dict[str, Any] = {**dict(zip((a.name for a in arguments), args, strict=False)), **kwargs}
    if given.get("pin_memory") is False:  # what torch's parser says where nothing was said
        del given["pin_memory"]
    return [given.get(a.name, a.default_value if a.has_default_value() else None) for a in arguments]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        ours, theirs = cast(Sequence[Any], one), cast(Sequence[Any], other)
        return len(ours) == len(theirs) and all(map(_same, ours, theirs))
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return one is other
    return same_plain(one, other)
