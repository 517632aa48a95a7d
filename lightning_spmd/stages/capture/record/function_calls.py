"""Calls of torch's functions, seen before torch's parser makes something else of their arguments.

*Which recorded number stands at which argument.* ``torch._fused_adam_(..., lr=lr, weight_decay=wd)`` reaches the
recorder with plain floats. Where both are 0, as at the start of a warm-up, values do not tell which is which; C++
evaluates arguments in an order of its own (the last one first, with GCC), so neither does the order in which they were
asked for. Names do.

*Numbers that become tensors.* ``torch.tensor(x)`` and ``torch.as_tensor(x)`` of a recorded number stay connected to it.

*Views by place.* On ranks ``as_strided`` is recorded as the windows that it is, if it is (``windows.py``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from lightning_spmd import _private_api as private
from lightning_spmd.stages.capture.numbers.host_scalar import SYMBOLS, HostScalar, scalar_of
from lightning_spmd.stages.capture.rewrites.windows import as_windows

_SIZES_OF_INTEGERS = "SymIntArrayRef expected to contain only concrete integers"
"""What torch says of a function that has no form for recorded sizes."""
_BY_PLACE = {torch.Tensor.as_strided, torch.as_strided}
_MAKES_TENSORS = {torch.tensor, torch.as_tensor}
_TAKE_INDICES = {torch.Tensor.__getitem__, torch.Tensor.__setitem__}


class FunctionCalls(TorchFunctionMode):
    """Sees torch's functions as they are called.

    Args:
        by_dimensions: whether views by place become views by dimensions.
    """

    def __init__(self, *, by_dimensions: bool = False) -> None:
        super().__init__()
        self._by_dimensions = by_dimensions
        self._function = ""
        self._args: tuple[Any, ...] = ()
        self._kwargs: dict[str, Any] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not (SYMBOLS.isdisjoint(map(type, args)) and SYMBOLS.isdisjoint(map(type, kwargs.values()))):
            self._function, self._args, self._kwargs = getattr(func, "__name__", ""), args, kwargs
            if func in _MAKES_TENSORS and scalar_of(args[0]) is not None:
                dtype = kwargs.get("dtype") or _dtype_of(args[:1])
                return torch.scalar_tensor(args[0], dtype=dtype, device=kwargs.get("device"))
        else:
            self._function, self._args, self._kwargs = "", (), {}
            if func in _TAKE_INDICES:
                args = (args[0], _index_of(args[1]), *args[2:])
            if func in _MAKES_TENSORS and args and _is_list_of_numbers(args[0]):
                return _tensor_of(args[0], kwargs)
        if self._by_dimensions and func in _BY_PLACE and isinstance(args[0], private.FakeTensor):
            plain = [_with_plain_sizes(a) for a in args], {name: _with_plain_sizes(a) for name, a in kwargs.items()}
            if (view := as_windows(*plain[0], **plain[1])) is not None:
                return view
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            if _SIZES_OF_INTEGERS not in str(error):
                raise
        return func(*map(_with_plain_sizes, args), **{name: _with_plain_sizes(a) for name, a in kwargs.items()})

    def put_back(
        self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], list[HostScalar]]:
        """Arguments with the recorded numbers in their places again, and which ones these are."""
        schema = operator._schema  # noqa: SLF001 - how operators are described everywhere in torch
        if schema.name.rpartition("::")[2] != self._function:
            return args, kwargs, []
        names = [argument.name for argument in schema.arguments]
        given = {**dict(zip(names, self._args, strict=False)), **self._kwargs}
        values = {**dict(zip(names, args, strict=False)), **kwargs}
        found: list[HostScalar] = []
        for name, value in given.items():
            scalar = scalar_of(value)
            # torch leaves out what has the default's value
            if scalar is not None and name in names and _is_plain(values.get(name, scalar.value), scalar):
                values[name] = scalar.as_symbol()
                found.append(scalar)
        positional = [values.pop(name) for name in names[: len(args)]]
        return tuple(positional), values, found


def _is_list_of_numbers(value: Any) -> bool:
    """Whether it is a list of numbers of which some are recorded."""
    if type(value) not in (list, tuple) or not value:
        return False
    kinds = set(map(type, value))
    return not SYMBOLS.isdisjoint(kinds) and kinds <= SYMBOLS | {int, float, bool}


def _index_of(index: Any) -> Any:
    """An index in which lists of recorded positions are tensors, as torch makes of lists of plain ones."""
    if type(index) is tuple:
        return tuple(map(_index_of, index))
    positions = type(index) is list and _is_list_of_numbers(index) and {*map(type, index)} <= {torch.SymInt, int}
    return _tensor_of(index, {"dtype": torch.int64}) if positions else index


def _tensor_of(numbers: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    dtype, device = kwargs.get("dtype") or _dtype_of(numbers), kwargs.get("device")
    made = torch.stack([torch.scalar_tensor(number, dtype=dtype, device=device) for number in numbers])
    return made.requires_grad_() if kwargs.get("requires_grad") else made


def _dtype_of(numbers: Any) -> torch.dtype:
    """Of the tensor that ``torch.tensor`` makes of these numbers."""
    kinds = {type(number if (scalar := scalar_of(number)) is None else scalar.value) for number in numbers}
    return torch.get_default_dtype() if float in kinds else torch.int64 if int in kinds else torch.bool


def _is_plain(value: Any, scalar: HostScalar) -> bool:
    return type(value) in (int, float) and value == scalar.value


def _with_plain_sizes(argument: Any) -> Any:
    """Sizes that are tensors or recorded numbers, as Python's own numbers, for which the graph then holds."""
    if not isinstance(argument, (tuple, list)):
        return argument
    sizes: list[Any] = list(argument)  # pyright: ignore[reportUnknownArgumentType]
    return [int(s) if type(s) is torch.SymInt or _is_integer(s) else s for s in sizes]


def _is_integer(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 0 and not value.dtype.is_floating_point
