"""GELU and its gradient on the host, as one polynomial each.

The compiler writes GELU with ``erf``, ``exp`` and ``tanh`` of its vector library, which take longer than everything
else in a chain of pointwise operators; torch's own kernel does better, but then a tensor moves once more. GELU is
``x / 2 + x * h(x)`` and its gradient ``1 / 2 + d(x)`` with odd functions h and d that are 1/2 from some number on.
Below that number they are ``x`` times a polynomial of ``x ** 2``, interpolated at Chebyshev's points. They differ
from the exact values by less than 3e-7 and 6e-7, as torch's own kernels do. Only GELU is written so: a ``tanh`` of
the user's own may be followed by a logarithm of ``1 - tanh(x) ** 2``, which such a difference would spoil.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten

_SCALE, _CUBIC = math.sqrt(2.0 / math.pi), 0.044715
"""Of GELU's approximation with tanh."""


def _half_erf(x: float) -> float:
    return 0.5 * math.erf(x * math.sqrt(0.5))


def _half_tanh(x: float) -> float:
    return 0.5 * math.tanh(_SCALE * (x + _CUBIC * x**3))


def _slope_of_erf(x: float) -> float:
    return _half_erf(x) + 0.5 * _SCALE * x * math.exp(-0.5 * x * x)


def _slope_of_tanh(x: float) -> float:
    steepness = (1.0 - 4.0 * _half_tanh(x) ** 2) * _SCALE * (1.0 + 3.0 * _CUBIC * x * x)
    return _half_tanh(x) + 0.5 * x * steepness


_FORWARD = {"none": (_half_erf, 5.3, 14), "tanh": (_half_tanh, 4.9, 14)}
"""The function, where it is 1/2 in float32, and the degree of its polynomial."""
_BACKWARD = {"none": (_slope_of_erf, 5.6, 16), "tanh": (_slope_of_tanh, 5.2, 18)}


def fast_gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """GELU (Hendrycks and Gimpel, 2016).

    Args:
        x: float32.
        approximate: ``"none"`` or ``"tanh"``.
    """
    function, reach, degree = _FORWARD[approximate]
    within = x * (0.5 + _odd(x, function, reach, degree))
    lost = x if approximate == "none" else x.clamp(max=0.0)  # of which infinities eager makes no number
    return torch.where(x.abs() < reach, within, x.clamp(min=0.0) + lost * 0.0)


def fast_gelu_backward(g: Tensor, x: Tensor, approximate: str = "none") -> Tensor:
    """The gradient of GELU's input.

    Args:
        g: gradient of its result, float32.
        x: its input, of the same shape.
        approximate: ``"none"`` or ``"tanh"``.
    """
    function, reach, degree = _BACKWARD[approximate]
    within = 0.5 + _odd(x, function, reach, degree)
    return g * torch.where(x.abs() < reach, within, x.clamp(0.0, 1.0) + x * 0.0)


def with_fast_gelu(table: dict[Any, Any]) -> dict[Any, Any]:
    """Decompositions of the compiler, with GELU of float32 tensors on the host as it is here."""
    forward, backward = table[_aten.gelu.default], table[_aten.gelu_backward.default]

    def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
        return (fast_gelu if _is_meant(x) else forward)(x, approximate=approximate)

    def gelu_backward(g: Tensor, x: Tensor, *, approximate: str = "none") -> Tensor:
        return (fast_gelu_backward if _is_meant(g, x) else backward)(g, x, approximate=approximate)

    return {**table, _aten.gelu.default: gelu, _aten.gelu_backward.default: gelu_backward}


# ---------------------------------------------------------------- pieces
def _odd(x: Tensor, function: Callable[[float], float], reach: float, degree: int) -> Tensor:
    """An odd function below its reach."""
    place = x * x * (2.0 / reach**2) - 1.0
    square = place * place
    coefficients = _coefficients(function, reach, degree)
    # two chains, neither of which waits for the other
    return x * (_polynomial(square, coefficients[::2]) + place * _polynomial(square, coefficients[1::2]))


def _polynomial(x: Tensor, coefficients: Sequence[float]) -> Tensor:
    """Coefficients begin with the constant one."""
    *others, one_before, last = coefficients
    value = x * last + one_before
    for coefficient in reversed(others):
        value = value * x + coefficient
    return value


@functools.cache
def _coefficients(function: Callable[[float], float], reach: float, degree: int) -> tuple[float, ...]:
    """Of the polynomial in ``2 * (x / reach) ** 2 - 1`` that is ``function(x) / x`` at Chebyshev's points."""
    count = degree + 1
    angles = [math.pi * (n + 0.5) / count for n in range(count)]
    points = [reach * math.sqrt(0.5 * (math.cos(angle) + 1.0)) for angle in angles]
    values = [function(x) / x for x in points]
    before, last = [1.0], [0.0, 1.0]
    powers = [0.0] * count
    for n in range(count):
        weight = sum(v * math.cos(n * angle) for v, angle in zip(values, angles, strict=True)) * (2.0 if n else 1.0)
        for power, coefficient in enumerate(before):
            powers[power] += weight / count * coefficient
        # Chebyshev's polynomials: the next is 2 x times this one, less the one before
        following = [0.0, *(2.0 * coefficient for coefficient in last)]
        for power, coefficient in enumerate(before):
            following[power] -= coefficient
        before, last = last, following
    return tuple(powers)


def _is_meant(*tensors: Tensor) -> bool:
    return all(one.device.type == "cpu" and one.dtype == torch.float32 for one in tensors)
