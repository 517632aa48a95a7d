"""Sizes of a batch as symbols: one trace serves all sizes that the step treats alike.

The step is traced as always, but some sizes of the batch are symbols of torch's ShapeEnv with this step's values. So
sizes in the arguments of operators come out as formulas, and every decision on a size, the user's or torch's own,
becomes a condition on the sizes for which the formulas hold.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from lightning_spmd import _private_api as private
from lightning_spmd.ir.layout import layout_of, strides_as
from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.ir.sizes import Dimension
from lightning_spmd.stages.capture.user_code import user_location


class OtherSizes:
    """A batch seen with other sizes than it has.

    Args:
        sizes: them, by place; other dimensions are as they are.
    """

    def __init__(self, sizes: Mapping[Dimension, int]) -> None:
        self.sizes = dict(sizes)

    def begin(self) -> Any:
        """A fake mode for one trace."""
        return private.FakeTensorMode(allow_non_fake_inputs=True)

    def spec(self, position: int, spec: TensorSpec) -> TensorSpec:
        """The spec of a tensor leaf, which lies in memory as it does with its own sizes."""
        if not any(place[0] == position for place in self.sizes):
            return spec
        shape = tuple(self._size((position, dim), size) for dim, size in enumerate(spec.shape))
        strides = strides_as(layout_of(spec.shape, spec.stride), shape)
        return TensorSpec(shape, strides, spec.dtype, spec.device)

    def _size(self, place: Dimension, size: int) -> Any:
        return self.sizes.get(place, size)

    @property
    def numbers(self) -> list[Any]:
        """The sizes as the step sees them, in order."""
        return [self._size(place, size) for place, size in self.sizes.items()]

    def active(self) -> contextlib.AbstractContextManager[None]:
        """Entered while tracing."""
        return contextlib.nullcontext()


class SymbolicBatch(OtherSizes):
    """A batch some of whose sizes are symbols, with the values that they have.

    Args:
        sizes: them, by place.
        by_python: torch's implementations in Python go before those in C++, some of which take plain integers alone.

    Attributes:
        symbols: them, of the last trace.
    """

    def __init__(self, sizes: Mapping[Dimension, int], *, by_python: bool = False) -> None:
        super().__init__(sizes)
        self._by_python = by_python

    def begin(self) -> Any:
        """A fake mode with new symbols, for one trace."""
        self.symbols = private.SymbolicSizes(lambda: user_location() or "")
        self._made = {place: self.symbols.symbol(value) for place, value in self.sizes.items()}
        return private.FakeTensorMode(allow_non_fake_inputs=True, shape_env=self.symbols.env)

    def _size(self, place: Dimension, size: int) -> Any:
        return self._made.get(place, size)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Entered while tracing."""
        with private.symbols_as_numbers(by_python=self._by_python):
            yield


class Symbol:
    """Stands for a number that follows from symbols in the arguments of recorded calls; fx warns of raw ones.

    Args:
        value: the number.
    """

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def as_argument(value: Any) -> Any:
    """A number as it stands in a recorded call."""
    return Symbol(value) if private.is_symbol(value) else value
