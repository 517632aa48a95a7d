"""torch's default dtype, which some precisions change around a step, decides the result of some calls.

A graph runs outside of such a context: ``torch.rand(n)`` or ``labels * 0.5`` under ``precision="64-true"`` would be
single precision there, with other numbers. So the recorded call says what the default said: by its ``dtype``, or by
operands that have it already, which is what kernels make of integers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_spmd.stages.capture.record.fake_calls import flat, mapped


def decided_dtype(operands: Iterable[Any], out: Any) -> torch.dtype | None:
    """The dtype of a call's result if nothing but torch's default can have decided it, and that is not float32.

    Args:
        operands: all arguments.
        out: what the call gave.
    """
    if torch.get_default_dtype() is torch.float32:
        return None
    if any(isinstance(operand, torch.dtype) or _is_inexact(operand) for operand in operands):
        return None
    return next((made.dtype for made in flat(out) if _is_inexact(made)), None)


def saying(
    func: Any, args: Any, kwargs: dict[str, Any], dtype: torch.dtype, cast: Callable[[Tensor, torch.dtype], Tensor]
) -> tuple[Any, dict[str, Any]]:
    """The arguments of a call whose result has a dtype under any default.

    Args:
        func: the operator.
        args: its arguments.
        kwargs: those by name.
        dtype: of the result.
        cast: makes another dtype of a tensor.
    """
    if "dtype" in {argument.name for argument in func._schema.arguments}:  # noqa: SLF001 - how operators are described
        return args, {**kwargs, "dtype": dtype}

    def of_dtype(value: Any) -> Any:
        return cast(value, dtype) if isinstance(value, Tensor) else value

    return mapped(of_dtype, args), mapped(of_dtype, kwargs)


def _is_inexact(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
