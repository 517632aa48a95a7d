"""NumPy arrays of tensors inside a step: ``loss.detach().cpu().numpy()``, and what NumPy computes of them.

They exist only after the graph ran. What NumPy does with them is recorded and done then; they may be logged, printed,
appended and returned. A tensor that is made of one is the tensor that the array was made of.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_spmd.ir.steps import CallRef
from lightning_spmd.stages.capture.host_scalar import SYMBOLS
from lightning_spmd.stages.capture.later_value import LaterValue, MadeOf, Mark

BINARY = {
    "add": "add", "sub": "subtract", "mul": "multiply", "truediv": "true_divide", "floordiv": "floor_divide",
    "mod": "remainder", "pow": "power", "matmul": "matmul",
}  # fmt: skip
COMPARED = {"eq": "equal", "ne": "not_equal", "lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal"}
METHODS = frozenset(
    {
        "mean", "sum", "max", "min", "argmax", "argmin", "std", "var", "any", "all", "cumsum", "prod", "astype",
        "round", "reshape", "flatten", "ravel", "squeeze", "transpose", "swapaxes", "copy", "clip", "item", "tolist",
        "argsort",
    }
)  # fmt: skip


class LaterArray(LaterValue):
    """An array, a number or a list that NumPy gives after the graph ran.

    Args:
        reference: to what the recorded call gives.
        made_of, mark: as of :class:`LaterValue`.
        like: a tensor of the same sizes, if they are known.
    """

    def __init__(self, reference: CallRef, made_of: MadeOf, mark: Mark, like: Tensor | None = None) -> None:
        super().__init__(reference, "", made_of, mark)
        object.__setattr__(self, "_like", like)

    def _word(self) -> str:
        return "an array of NumPy, or a number made of one,"

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if method not in ("__call__", "reduce") or "out" in kwargs:
            return self._used()
        return self.made("ufunc", ufunc.__name__, method, *inputs, **kwargs)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        module = getattr(function, "__module__", "")
        if not str(module).startswith("numpy") or "out" in kwargs:
            return self._used()
        return self.made("function", f"{module}.{function.__name__}", args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in METHODS:
            return lambda *args, **kwargs: self.made("method", name, self, *args, **kwargs)
        if name == "T":
            return self.made("method", "transpose", self)
        like: Tensor | None = object.__getattribute__(self, "_like")
        if like is not None and name in ("shape", "ndim", "size"):
            return {"shape": tuple(like.shape), "ndim": like.ndim, "size": like.numel()}[name]
        return self._used()

    def __getitem__(self, key: Any) -> Any:
        return self.made("item", self, key)

    def __len__(self) -> int:
        like: Tensor | None = object.__getattribute__(self, "_like")
        return len(like) if like is not None else self._used()

    def __neg__(self) -> Any:
        return self.made("ufunc", "negative", "__call__", self)

    def _in_place(self, *_: Any) -> Any:
        return self._used()  # an array's memory is a tensor's, or has other names

    __iadd__ = __isub__ = __imul__ = __itruediv__ = __ifloordiv__ = __imod__ = __ipow__ = __imatmul__ = _in_place

    def __abs__(self) -> Any:
        return self.made("ufunc", "absolute", "__call__", self)

    def __round__(self, digits: int | None = None) -> Any:
        return self.made("python", "round", self, digits)


def as_tensor(array: LaterArray, function: Callable[..., Any], kwargs: dict[str, Any]) -> Tensor:
    """What ``torch.from_numpy(array)`` and the like give: the tensor that it is made of, or a copy."""
    like = memory_of(array)
    if like is None or not kwargs.keys() <= {"dtype", "device"}:
        raise array.misuse()
    tensor = like.detach().clone() if function is torch.tensor else like.detach()
    return tensor.to(kwargs.get("device") or tensor.device, kwargs.get("dtype") or tensor.dtype)


def memory_of(array: LaterArray) -> Tensor | None:
    """The tensor whose memory it has, if it is one's."""
    return object.__getattribute__(array, "_like")


def _binary(name: str, *, swapped: bool = False) -> Callable[[LaterArray, Any], Any]:
    def operate(array: LaterArray, other: Any) -> Any:
        if isinstance(other, Tensor):
            return NotImplemented
        if type(other) in SYMBOLS or isinstance(other, (int, float, LaterArray)) or hasattr(other, "__array__"):
            pair = (other, array) if swapped else (array, other)
            return array.made("ufunc", name, "__call__", *pair)
        return array._used()  # noqa: SLF001 - a method of this class

    return operate


for _name, _function in (*BINARY.items(), *COMPARED.items()):
    setattr(LaterArray, f"__{_name}__", _binary(_function))
    if _name in BINARY:
        setattr(LaterArray, f"__r{_name}__", _binary(_function, swapped=True))
