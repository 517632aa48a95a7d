"""torch's default dtype, which some precisions change around a step, decides the result of a factory without ``dtype``.

A graph runs outside of such a context: ``torch.rand(n)`` under ``precision="64-true"`` would be single precision there,
with other numbers. So the recorded call gets the dtype.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def with_dtype(func: Any, operands: Iterable[Any], kwargs: dict[str, Any], out: Any) -> dict[str, Any]:
    """``kwargs`` of a recorded call, with the dtype that the default decided.

    Args:
        func: the operator.
        operands: all arguments.
        kwargs: those by name, as they are recorded.
        out: what the call gave.
    """
    if torch.get_default_dtype() is torch.float32 or not isinstance(out, Tensor) or not out.is_floating_point():
        return kwargs
    names = {argument.name for argument in func._schema.arguments}  # noqa: SLF001 - how operators are described
    if "dtype" not in names or kwargs.get("dtype") is not None or any(isinstance(a, Tensor) for a in operands):
        return kwargs
    return {**kwargs, "dtype": out.dtype}
