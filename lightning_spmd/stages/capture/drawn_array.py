"""Arrays of random numbers that a step draws from NumPy: known when it is captured, drawn anew in each run.

What NumPy makes of one is again one. As a tensor it is an input of the graph; where Python takes a number out of it,
that number is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from lightning_spmd.errors import CaptureError, answered
from lightning_spmd.messages import the_step
from lightning_spmd.stages.capture.later_array import BINARY, COMPARED, METHODS, LaterArray, as_tensor
from lightning_spmd.stages.capture.user_code import user_location

Input = Callable[[Any, str, Callable[[], Any]], Any]
MakeTensor = Callable[[Any, Callable[[], Any], Callable[[Any], torch.Tensor]], torch.Tensor]


class DrawnArray:
    """An array.

    Args:
        value: as it is in this step.
        text: what drew it, for messages.
        read: gives it in the step that is about to run.
        made: makes an input, or another such array, of a value: ``(value, text, read)``.
        tensor: makes a tensor an input: ``(value, read, what makes a tensor of one)``.
    """

    __array_priority__ = 1000

    def __init__(self, value: Any, text: str, read: Callable[[], Any], made: Input, tensor: MakeTensor) -> None:
        self._value, self._text, self._read, self._made, self._tensor = value, text, read, made, tensor
        self._asked: list[CaptureError] = []

    # ------------------------------------------------------------------ what NumPy makes of it
    def _apply(self, name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        def now(value: Any) -> Any:
            return _mapped(lambda a: a._read(), value)  # noqa: SLF001 - of this class

        sample = function(*_mapped(lambda a: a._value, args), **_mapped(lambda a: a._value, kwargs))  # noqa: SLF001
        shown = {k: v for k, v in kwargs.items() if not isinstance(v, DrawnArray)}
        text = f"{name}{tuple(a for a in args if isinstance(a, (int, float)))}{shown or ''} of {self._text}"
        return self._made(sample, text, lambda: function(*now(args), **now(kwargs)))

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if "out" in kwargs:
            return self._refused()
        return self._apply(f"{ufunc.__name__}.{method}", getattr(ufunc, method), inputs, kwargs)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if "out" in kwargs:
            return self._refused()
        return self._apply(function.__name__, function, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in ("shape", "ndim", "size", "dtype"):
            return getattr(self._value, name)
        if name == "T":
            return self.transpose()
        if name == "tolist":
            return lambda: list(self)
        if name in METHODS:
            return lambda *args, **kwargs: self._apply(
                name, lambda a, *b, **k: getattr(a, name)(*b, **k), (self, *args), kwargs
            )
        return self._refused()

    def __getitem__(self, key: Any) -> Any:
        return self._apply(f"[{key!r}]", lambda a, k: a[k], (self, key), {})

    def __len__(self) -> int:
        return len(self._value)

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self._value)))

    def __neg__(self) -> Any:
        return self._apply("negative", lambda a: -a, (self,), {})

    def __abs__(self) -> Any:
        return self._apply("absolute", abs, (self,), {})

    # ------------------------------------------------------------------ what takes it out of NumPy
    def as_tensor(self, function: Callable[..., torch.Tensor], args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
        """``torch.from_numpy(array)`` and the like; an array that is drawn in each step is nobody else's."""
        return self._tensor(self._value, self._read, lambda value: function(value.copy(), *args, **kwargs))

    def as_index(self) -> torch.Tensor:
        """``tensor[array]``: torch asks first whether it is a number or a sequence, on the same line."""
        answered([error for error in self._asked if error.location == user_location()])
        self._asked.clear()
        return self.as_tensor(torch.as_tensor, (), {})

    def looked_into(self) -> None:
        """It goes where it would be looked into when the graph has run, and there is none of it then."""
        self._refused()

    def _refused(self, *_: Any, **__: Any) -> Any:
        error = CaptureError(
            f"{the_step()} looks into an array of random numbers ({self._text}), which no graph can follow; hand it to "
            "torch (torch.from_numpy), or draw with torch",
            user_location(),
        )
        self._asked.append(error)
        raise error

    __array__ = __setitem__ = __bool__ = __float__ = __int__ = __index__ = __contains__ = __str__ = __repr__ = _refused
    __iadd__ = __isub__ = __imul__ = __itruediv__ = __ifloordiv__ = __imod__ = __ipow__ = __imatmul__ = _refused
    __hash__ = object.__hash__


def from_numpy_by(plain: Callable[[Any], torch.Tensor]) -> Callable[[Any], torch.Tensor]:
    """``torch.from_numpy``, given torch's own, which also takes what stands for arrays."""

    def from_numpy(array: Any) -> torch.Tensor:
        if type(array) is LaterArray:
            return as_tensor(array, plain, {})
        return array.as_tensor(plain, (), {}) if isinstance(array, DrawnArray) else plain(array)

    return from_numpy


def _method(name: str) -> Callable[..., Any]:
    return lambda array, *args, **kwargs: getattr(array, name)(*args, **kwargs)


def _mapped(change: Callable[[DrawnArray], Any], value: Any) -> Any:
    if isinstance(value, DrawnArray):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)(_mapped(change, v) for v in value)
    return {k: _mapped(change, v) for k, v in value.items()} if type(value) is dict else value


def _binary(name: str, *, swapped: bool = False) -> Callable[[DrawnArray, Any], Any]:
    def operate(array: DrawnArray, other: Any) -> Any:
        if isinstance(other, torch.Tensor):
            return NotImplemented
        import numpy

        function = getattr(numpy, name)
        return array._apply(name, function, (other, array) if swapped else (array, other), {})  # noqa: SLF001

    return operate


for _name, _function in (*BINARY.items(), *COMPARED.items()):
    setattr(DrawnArray, f"__{_name}__", _binary(_function))
    if _name in BINARY:
        setattr(DrawnArray, f"__r{_name}__", _binary(_function, swapped=True))
