"""What a metric returns inside training_step: a value that exists only after the graph ran.

It may be logged, returned or printed; of what several metrics return in a dictionary, every entry may. Any other use
would work on nothing, so it is an error that names the line.
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import Any

from lightning_spmd.errors import CaptureError
from lightning_spmd.ir.first import first
from lightning_spmd.ir.steps import CallRef
from lightning_spmd.messages import the_step
from lightning_spmd.stages.capture.user_code import user_location

MadeOf = Callable[[tuple[Any, ...], dict[str, Any]], Any]
Mark = Callable[[Any, str], str | None]
_HARMLESS = ("detach", "clone", "cpu")
"""Methods without effect on what is only logged."""


class LaterValue:
    """The value of one metric.

    Args:
        reference: to what the recorded call returns, or to a part of it; None: it may not be logged either.
        metric: its name, for messages.
        made_of: records what is made of it: a call's arguments → what the call gives.
        mark: stands for a format of it in a text, or is None: ``(value, spec)``.
    """

    is_tree_leaf = True

    def __init__(
        self, reference: CallRef | None, metric: str, made_of: MadeOf | None = None, mark: Mark | None = None
    ) -> None:
        object.__setattr__(self, "_reference", reference)
        object.__setattr__(self, "_metric", metric)
        object.__setattr__(self, "_made_of", made_of)
        object.__setattr__(self, "_mark", mark)

    def misuse(self) -> CaptureError:
        """The error for any use but logging and returning."""
        return CaptureError(
            f"{self._word()} is used inside {the_step()}; it is made after the graph ran, so it can only be logged, "
            "printed or returned there",
            user_location(),
        )

    def _word(self) -> str:
        return f"the value of metric {object.__getattribute__(self, '_metric')!r}"

    def made(self, *args: Any, **kwargs: Any) -> Any:
        """What a function gives for it, after the graph ran."""
        made_of: MadeOf | None = object.__getattribute__(self, "_made_of")
        return self._used() if made_of is None else made_of(args, kwargs)

    def as_number(self, kind: type) -> Any:
        """``float(value)``."""
        return self.made("python", kind.__name__, self)

    def __format__(self, spec: str) -> str:
        mark: Mark | None = object.__getattribute__(self, "_mark")
        found = None if mark is None else mark(self, spec)
        return self._used() if found is None else found

    def _used(self, *_: Any, **__: Any) -> Any:
        raise self.misuse()

    def __getattr__(self, name: str) -> Any:
        if name in _HARMLESS:
            return lambda: self
        if name == "item":
            return lambda: self.made("method", name, self)
        return self._used()

    __hash__ = object.__hash__
    __setattr__ = __call__ = __float__ = __int__ = __index__ = __bool__ = __str__ = __repr__ = _used  # type: ignore[assignment]
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
        made_of, mark: as of one value.
    """

    def __init__(
        self, call: int, metric: str, names: list[str], made_of: MadeOf | None = None, mark: Mark | None = None
    ) -> None:
        super().__init__(CallRef(call), metric)
        values = {name: LaterValue(CallRef(call, name), f"{metric}[{name!r}]", made_of, mark) for name in names}
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
