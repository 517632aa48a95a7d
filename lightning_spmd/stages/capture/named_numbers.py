"""Which recorded number stands at which argument of a torch function, before torch's parser makes a plain one of it.

``torch._fused_adam_(..., lr=lr, weight_decay=wd)`` reaches the recorder with plain floats. Where both are 0, as at the
start of a warm-up, values do not tell which is which; C++ evaluates arguments in an order of its own (the last one
first, with GCC), so neither does the order in which they were asked for. Names do.
"""

from __future__ import annotations

from typing import Any

from torch.overrides import TorchFunctionMode

from lightning_spmd.stages.capture.host_scalar import HostScalar, scalar_of


class NumbersByName(TorchFunctionMode):
    """Remembers the recorded numbers among the arguments of the torch function that is called."""

    def __init__(self) -> None:
        super().__init__()
        self._function = ""
        self._args: tuple[Any, ...] = ()
        self._kwargs: dict[str, Any] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        numbers = any(map(scalar_of, args)) or any(map(scalar_of, kwargs.values()))
        self._function, self._args, self._kwargs = (
            (getattr(func, "__name__", ""), args, kwargs) if numbers else ("", (), {})
        )
        return func(*args, **kwargs)

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


def _is_plain(value: Any, scalar: HostScalar) -> bool:
    return type(value) in (int, float) and value == scalar.value
