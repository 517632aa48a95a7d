"""Calls of torch's functions, seen before torch's parser makes something else of their arguments.

*Which recorded number stands at which argument.* ``torch._fused_adam_(..., lr=lr, weight_decay=wd)`` reaches the
recorder with plain floats. Where both are 0, as at the start of a warm-up, values do not tell which is which; C++
evaluates arguments in an order of its own (the last one first, with GCC), so neither does the order in which they were
asked for. Names do.

*Numbers that become tensors, tensors that become Python's.* ``torch.tensor(x)`` and ``torch.as_tensor(x)`` of a
recorded number stay connected to it; ``tolist()`` of a tensor from outside the graph is told.

*Tensors that become others.* ``p.data = x`` is no operator.

*Views by place.* On ranks ``as_strided`` is recorded as the windows that it is, if it is (``windows.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from lightning_spmd import _private_api as private
from lightning_spmd.errors import CaptureError
from lightning_spmd.messages import the_step
from lightning_spmd.stages.capture.drawn_array import DrawnArray
from lightning_spmd.stages.capture.host_scalar import SYMBOLS, HostScalar, scalar_of
from lightning_spmd.stages.capture.later_array import LaterArray, as_tensor
from lightning_spmd.stages.capture.numpy_numbers import dtype_of
from lightning_spmd.stages.capture.user_code import user_location
from lightning_spmd.stages.capture.windows import as_windows

_AS_PYTHON = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__repr__}
_SET_DATA = torch.Tensor.data.__set__  # pyright: ignore[reportAttributeAccessIssue]
_AS_NUMBER: dict[Any, type] = {
    torch.Tensor.__float__: float,
    torch.Tensor.__int__: int,
    torch.Tensor.__index__: int,
    torch.Tensor.__bool__: bool,
}
_SIZES_OF_INTEGERS = "SymIntArrayRef expected to contain only concrete integers"
"""What torch says of a function that has no form for recorded sizes."""
_BY_PLACE = {torch.Tensor.as_strided, torch.as_strided}
_MAKES_TENSORS = {torch.tensor, torch.as_tensor}
_TAKE_INDICES = {torch.Tensor.__getitem__, torch.Tensor.__setitem__}
_TAKE_ARRAYS = _MAKES_TENSORS | _TAKE_INDICES


class FunctionCalls(TorchFunctionMode):
    """Sees torch's functions as they are called.

    Args:
        number: gives the number of a kind in a tensor of the graph, or None where torch's own way will do.
        by_dimensions: whether views by place become views by dimensions.

    Attributes:
        on_values: told each tensor from outside the graph whose values become Python's at once.
        array_of: gives what stands for NumPy's array of a tensor of the graph.
    """

    def __init__(
        self,
        number: Callable[[torch.Tensor, type], Any] = lambda _tensor, _kind: None,
        *,
        by_dimensions: bool = False,
    ) -> None:
        super().__init__()
        self._by_dimensions = by_dimensions
        self._number = number
        self.on_values: Callable[[torch.Tensor], None] = lambda _: None
        self.array_of: Callable[[torch.Tensor], Any] = lambda tensor: tensor.numpy()
        self._function = ""
        self._args: tuple[Any, ...] = ()
        self._kwargs: dict[str, Any] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # not by `any`: every call of a function would go through the profile hook (`frames`)
        if not (SYMBOLS.isdisjoint(map(type, args)) and SYMBOLS.isdisjoint(map(type, kwargs.values()))):
            self._function, self._args, self._kwargs = getattr(func, "__name__", ""), args, kwargs
            if func in _MAKES_TENSORS and scalar_of(args[0]) is not None:
                dtype = kwargs.get("dtype") or dtype_of(args[:1])
                return torch.scalar_tensor(args[0], dtype=dtype, device=kwargs.get("device"))
        else:
            self._function, self._args, self._kwargs = "", (), {}
            if func == _SET_DATA and isinstance(args[0], private.FakeTensor):
                raise CaptureError(
                    f"{the_step()} assigns `.data` of a tensor, which no operator shows: the graph would go on with "
                    "what it was; write into it instead (p.copy_(value), p.data.mul_(0.9))",
                    user_location(),
                )
            if func is torch.Tensor.__format__ and isinstance(args[0], private.FakeTensor) and args[0].dim() == 0:
                return format(args[0].item(), args[1])  # as of a real one: f"expert_{index}"
            if func in _TAKE_ARRAYS:
                if func in _MAKES_TENSORS and type(args[0]) is DrawnArray:
                    return args[0].as_tensor(func, args[1:], kwargs)
                if func in _MAKES_TENSORS and type(args[0]) is LaterArray:
                    return as_tensor(args[0], func, kwargs)
                args = tuple(map(_drawn_as_tensors, args))
                if func in _TAKE_INDICES:
                    args = (args[0], _index_of(args[1]), *args[2:])
            if func in _MAKES_TENSORS and args and _is_list_of_numbers(args[0]):
                return _tensor_of(args[0], kwargs)
            if func is torch.Tensor.numpy and isinstance(args[0], private.FakeTensor):
                return self.array_of(args[0])
            if func in _AS_NUMBER and (number := self._number(args[0], _AS_NUMBER[func])) is not None:
                return number
            if func in _AS_PYTHON and not isinstance(args[0], private.FakeTensor):
                self.on_values(args[0])
                with private.disable_dispatch_modes():
                    return func(*args, **kwargs)
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


def _drawn_as_tensors(argument: Any) -> Any:
    """An index with drawn arrays as tensors."""
    if type(argument) is DrawnArray:
        return argument.as_index()
    return tuple(map(_drawn_as_tensors, argument)) if type(argument) is tuple else argument


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
    dtype, device = kwargs.get("dtype") or dtype_of(numbers), kwargs.get("device")
    made = torch.stack([torch.scalar_tensor(number, dtype=dtype, device=device) for number in numbers])
    return made.requires_grad_() if kwargs.get("requires_grad") else made


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
