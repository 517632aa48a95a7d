"""Plain tensors beside DTensors, where what torch shall do with them is beyond doubt, and torch raises an error.

Buffers are plain under ``zero3``, some biases under tensor parallelism; code of the user's has them in one list with
sharded weights (``AveragedModel``, ``clip_grad_norm_``), or compares one with the other (``BaseFinetuning``).
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

_EQUAL = torch.ops.aten.equal.default


def take_mixed_tensors() -> None:
    """Let ``_foreach`` operators and ``torch.equal`` take both from now on.

    ``_foreach`` operators handle each position of their lists by itself: those with plain tensors and those with
    DTensors are two calls. ``equal`` is true where it is true on every rank.
    """
    handlers = _handlers()
    if _EQUAL in handlers:
        return
    handlers[_EQUAL] = _equal
    names = [name.removeprefix("aten::") for name in torch._C._dispatch_get_all_op_names()]
    for name, _, overload in (n.partition(".") for n in names if n.startswith("_foreach_")):
        op = getattr(getattr(torch.ops.aten, name), overload or "default")
        handlers[op] = _by_position


def _handlers() -> dict[Any, Callable[..., Any]]:
    return DTensor._op_dispatcher._custom_op_handlers


def _as_torch_does(op: Any, args: Any, kwargs: Any) -> Any:
    handlers = _handlers()
    own = handlers.pop(op)
    try:
        return op(*args, **kwargs)
    finally:
        handlers[op] = own


def _equal(op: Any, args: tuple[Tensor, Tensor], kwargs: Any) -> bool:
    mesh, *_ = (t.device_mesh for t in args if isinstance(t, DTensor))
    everywhere = [Replicate()] * mesh.ndim
    both = [t if isinstance(t, DTensor) else DTensor.from_local(t, mesh, everywhere, run_check=False) for t in args]
    return both[0].shape == both[1].shape and _as_torch_does(op, both, kwargs)


def _by_position(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    lists = [a for a in (*args, *kwargs.values()) if isinstance(a, Sequence) and any(isinstance(t, Tensor) for t in a)]
    kinds = [{isinstance(t, DTensor) for t in position} for position in zip(*lists, strict=False)]
    in_parts = [True in kind for kind in kinds]
    if all(in_parts) or any(len(kind) > 1 for kind in kinds):
        return _as_torch_does(op, args, kwargs)

    def chosen(argument: Any, want: bool) -> Any:
        if isinstance(argument, Sequence):  # tensors, or a number for each
            return [a for a, is_part in zip(argument, in_parts, strict=True) if is_part is want]
        return argument.full_tensor() if isinstance(argument, DTensor) and not want else argument

    def call(want: bool) -> Any:
        of = functools.partial(chosen, want=want)
        found = op(*map(of, args), **{name: of(value) for name, value in kwargs.items()})
        return None if found is None else deque(found)

    results = {want: call(want) for want in dict.fromkeys(in_parts)}
    if None in results.values():  # in place
        return None
    return [results[is_part].popleft() for is_part in in_parts]
