"""What a metric returns inside training_step: a value that exists only after the graph ran.

It may be logged, returned or printed; of what several metrics return in a dictionary, every entry may. Any other use
would work on nothing, so it is an error that names the line.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import Any

from lightning_spmd.errors import CaptureError
from lightning_spmd.ir.first import first
from lightning_spmd.ir.steps import CallRef
from lightning_spmd.messages import the_step
from lightning_spmd.stages.capture.user_code import user_location

_HARMLESS = ("detach", "clone", "cpu")
"""Methods without effect on what is only logged."""


class LaterValue:
    """The value of one metric.

    Args:
        reference: to what the recorded call returns, or to a part of it; None: it may not be logged either.
        metric: its name, for messages.
    """

    is_tree_leaf = True

    def __init__(self, reference: CallRef | None, metric: str) -> None:
        object.__setattr__(self, "_reference", reference)
        object.__setattr__(self, "_metric", metric)

    def misuse(self) -> CaptureError:
        """The error for any use but logging and returning."""
        return CaptureError(
            f"the value of metric {object.__getattribute__(self, '_metric')!r} is used inside {the_step()}; metrics "
            "are updated after the graph ran, so their values can only be logged or returned there",
            user_location(),
        )

    def _used(self, *_: Any, **__: Any) -> Any:
        raise self.misuse()

    def __getattr__(self, name: str) -> Any:
        if name in _HARMLESS:
            return lambda: self
        return self._used()

    __hash__ = object.__hash__
    __setattr__ = __call__ = __float__ = __int__ = __index__ = __bool__ = __str__ = __repr__ = __format__ = _used  # type: ignore[assignment]
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __pow__ = __rpow__ = (
        _used
    )
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __matmul__ = __rmatmul__ = __neg__ = __abs__ = __round__ = _used
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __iter__ = __len__ = __getitem__ = __contains__ = _used  # type: ignore[assignment]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        later = first((a for a in (*args, *(kwargs or {}).values()) if isinstance(a, LaterValue)), "metric's value")
        raise later.misuse()


class LaterValues(LaterValue, Mapping[str, LaterValue]):  # type: ignore[misc]
    """The values of a collection of metrics, by name.

    Args:
        call: position of the recorded call.
        metric: the collection's name.
        names: of its values, as the collection itself would name them.
    """

    def __init__(self, call: int, metric: str, names: list[str]) -> None:
        super().__init__(CallRef(call), metric)
        values = {name: LaterValue(CallRef(call, name), f"{metric}[{name!r}]") for name in names}
        object.__setattr__(self, "_values", values)

    def _held(self) -> dict[str, LaterValue]:
        return object.__getattribute__(self, "_values")

    def __getitem__(self, name: str) -> LaterValue:
        return self._held()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._held())

    def __len__(self) -> int:
        return len(self._held())

    def __contains__(self, name: object) -> bool:
        return name in self._held()

    def __bool__(self) -> bool:
        return bool(self._held())

    def keys(self) -> KeysView[str]:
        """The names."""
        return self._held().keys()

    def values(self) -> ValuesView[LaterValue]:
        """The values, in the collection's order."""
        return self._held().values()

    def items(self) -> ItemsView[str, LaterValue]:
        """Both."""
        return self._held().items()

    def get(self, name: str, default: Any = None) -> Any:
        """One of them."""
        return self._held().get(name, default)


def reference_to(value: LaterValue) -> CallRef:
    """What stands for it in recorded calls.

    Raises:
        CaptureError: it may not be logged either.
    """
    reference: CallRef | None = object.__getattribute__(value, "_reference")
    if reference is None:
        raise value.misuse()
    return reference
