"""The first run of regions: each beside its operators, compared and measured."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from lightning_spmd._private_api import pytree
from lightning_spmd.ir.layout import has_layout
from lightning_spmd.ir.node_info import spec_of
from lightning_spmd.stages.runtime.regions.code import Code
from lightning_spmd.stages.runtime.regions.region import Region

ROUNDS = 7
"""Of both sides, of which the fastest counts."""

_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}
"""Of an element, as a part of the largest one: a few roundings, for a chain of operators is rounded once where eager
rounds after each, and sums are added in another order."""
_AS_GOOD = 8.0
"""Times the operators' own error that a result may be off by where terms cancel: a sum of gradients that is zero but
for roundings (the bias of attention's keys) is another number in any other order."""


@dataclass(frozen=True)
class Verdict:
    """What a rank saw of a region.

    Args:
        problem: why it cannot be used; empty where it can.
        eager: seconds of its operators.
        lowered: seconds of its code.
    """

    problem: str = ""
    eager: float = 0.0
    lowered: float = 0.0


def tried(region: Region, code: Code, verdicts: Callable[[Verdict], None]) -> Callable[..., Sequence[Tensor]]:
    """A function of a region's inputs that gives what its operators give, and tells how its code did.

    Args:
        region: whose operators.
        code: of the region.
        verdicts: told once, at the first run.
    """
    told: list[Verdict] = []

    def run(*inputs: Tensor) -> Sequence[Tensor]:
        expected = region.function(*inputs)
        if not told:
            told.append(_verdict(region, code, inputs, expected))
            verdicts(told[0])
        return expected

    return run


def _verdict(region: Region, code: Code, inputs: Sequence[Tensor], expected: Sequence[Tensor]) -> Verdict:
    try:
        problem = difference(region, inputs, expected, code(list(inputs)))
    except Exception as error:  # generated code may fail in every way, and the operators are there
        return Verdict(f"its code raised {type(error).__name__}: {str(error).partition(chr(10))[0]}")
    if problem:
        return Verdict(problem)
    sides: tuple[Callable[[], Any], ...] = (lambda: region.function(*inputs), lambda: code(list(inputs)))
    seconds: list[list[float]] = [[], []]
    for _ in range(ROUNDS):
        for side, times in zip(sides, seconds, strict=True):
            times.append(_seconds(side, inputs))
    return Verdict("", min(seconds[0]), min(seconds[1]))


def difference(region: Region, inputs: Sequence[Tensor], expected: Sequence[Tensor], got: Sequence[Tensor]) -> str:
    """What is wrong with a region's results; empty if nothing is."""
    storages = {t.untyped_storage().data_ptr() for t in inputs}
    exact = _Exact(region, inputs)
    for number, (node, right, result) in enumerate(zip(region.outputs, expected, got, strict=True)):
        what = f"its result {node.name}"
        if (result.dtype, result.shape, result.device) != (right.dtype, right.shape, right.device):
            return f"{what} is {result.dtype}{list(result.shape)}, not {right.dtype}{list(right.shape)}"
        if not has_layout(result, spec_of(node)):
            return f"{what} lies otherwise in memory: strides {result.stride()}, not {spec_of(node).stride}"
        place = result.untyped_storage().data_ptr()
        if place in storages:
            return f"{what} shares its storage with another value"
        storages.add(place)
        if result.untyped_storage().nbytes() > right.untyped_storage().nbytes() + 64:
            return f"{what} holds a larger storage than its own"
        if (far := _far_off(right, result)) and not exact.is_as_good(number, right, result):
            return f"{what} is {far}"
    return ""


class _Wide(fx.Interpreter):
    """Runs operators of any floating-point precision in double precision: casts to another one do nothing."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """One operator."""
        args, kwargs = pytree.tree_map(_wide, (args, kwargs))
        return super().call_function(target, args, kwargs)


def _wide(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value


class _Exact:
    """A region's results in double precision, computed on demand."""

    def __init__(self, region: Region, inputs: Sequence[Tensor]) -> None:
        self._region = region
        self._inputs = inputs

    @functools.cached_property
    def _results(self) -> Sequence[Tensor]:
        wide = [t.double() if t.is_floating_point() else t for t in self._inputs]
        try:
            return _Wide(self._region.module).run(*wide)
        except RuntimeError:  # there may be no memory for it
            return ()

    def is_as_good(self, number: int, right: Tensor, result: Tensor) -> bool:
        """Whether a result is about as near to the exact one as what the operators give."""
        if not self._results or not right.is_floating_point():
            return False
        exact = self._results[number].double()
        error, own = ((value.double() - exact).abs().max().item() for value in (result, right))
        return math.isfinite(own) and error <= _AS_GOOD * own


def _far_off(right: Tensor, result: Tensor) -> str:
    if right.dtype not in _TOLERANCE:
        return "" if torch.equal(right, result) else "another one"
    finite = torch.isfinite(right)
    if not torch.equal(finite, torch.isfinite(result)):
        return "not finite where it should be, or finite where it should not"
    if not torch.equal(right[~finite].nan_to_num(0.0), result[~finite].nan_to_num(0.0)):
        return "another infinity"
    one, other = right[finite].double(), result[finite].double()
    if one.numel() == 0:
        return ""
    largest = one.abs().max().item()
    error = (one - other).abs().max().item()
    tolerance = _TOLERANCE[right.dtype]
    return "" if error <= tolerance * max(largest, 1e-30) else f"off by {error:.3g} where the largest is {largest:.3g}"


def _seconds(side: Callable[[], Any], inputs: Sequence[Tensor]) -> float:
    on_device = any(t.is_cuda for t in inputs)
    if on_device:
        torch.cuda.synchronize()
    begun = time.perf_counter()
    side()
    if on_device:
        torch.cuda.synchronize()
    return time.perf_counter() - begun
