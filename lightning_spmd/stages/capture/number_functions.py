"""Functions of ``math`` and NumPy that are given recorded numbers: recorded like arithmetic.

    math.isfinite(loss.item())      np.sqrt(1 - lam)      math.exp(loss)

Python's own ask for the plain number, for which a graph would have to hold, and NumPy's know no recorded one. So these
modules have stand-ins of them while a step is captured; so does a module that imported one (``recorded_builtins``).
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from lightning_spmd.stages.capture.host_scalar import HostScalar, ScalarRecorder, scalar_of
from lightning_spmd.stages.capture.number_types import replaced, seen_as_plain
from lightning_spmd.stages.capture.numpy_numbers import flagged, marked, numpy_function

_OF_MATH = (
    "sqrt", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "cbrt", "pow", "cos", "sin", "tan", "acos",
    "asin", "atan", "atan2", "cosh", "sinh", "tanh", "acosh", "asinh", "atanh", "hypot", "degrees", "radians", "fabs",
    "fmod", "remainder", "copysign", "erf", "erfc", "gamma", "lgamma", "isnan", "isinf", "isfinite", "isclose",
)  # fmt: skip
_OF_NUMPY = (
    "sqrt", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "cbrt", "power", "float_power", "cos", "sin",
    "tan", "arccos", "arcsin", "arctan", "arctan2", "cosh", "sinh", "tanh", "arccosh", "arcsinh", "arctanh", "hypot",
    "degrees", "radians", "deg2rad", "rad2deg", "fabs", "abs", "absolute", "fmod", "mod", "copysign", "square", "sign",
    "floor", "ceil", "trunc", "rint", "round", "around", "maximum", "minimum", "fmax", "fmin", "clip", "isnan",
    "isinf", "isfinite", "isclose",
)  # fmt: skip
_TOLERANCES = {"rel_tol": 1e-9, "abs_tol": 0.0}
"""Of ``math.isclose``, which takes them by name."""
_OF_LISTS = ("mean", "sum", "prod", "max", "min", "amax", "amin", "average", "median", "std", "var", "dot")
"""Of NumPy, what works on a list of recorded numbers as it is; what it gives is NumPy's."""
Functions = dict[int, tuple[Any, Any]]
"""Functions and what stands for them, by the id of each."""


@contextlib.contextmanager
def numbers_followed(recorder: ScalarRecorder, imported: Functions) -> Iterator[None]:
    """While capturing, recorded numbers pass for Python's own, and these functions of them are recorded.

    Args:
        recorder: where.
        imported: filled in, for modules that have such a function under a name of their own.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(seen_as_plain())
        for key, names in (("math", _OF_MATH), ("numpy", (*_OF_NUMPY, *_OF_LISTS))):
            module = sys.modules.get(key)
            for name in names:
                original = getattr(module, name, None)
                if original is not None:
                    plain = _plain(key, name)
                    follow = _Followed(recorder, original, plain, of_tensors=module is math)
                    imported[id(original)] = (original, follow)
                    stack.callback(setattr, module, name, original)
                    setattr(module, name, follow)
        stack.enter_context(replaced(torch.SymInt, "__invert__", lambda a: -a - 1))
        stack.enter_context(replaced(torch.SymBool, "__xor__", lambda a, b: bool(a) ^ b))
        stack.enter_context(replaced(torch.SymBool, "__rxor__", lambda a, b: b ^ bool(a)))
        for kind in (torch.SymInt, torch.SymFloat, torch.SymBool):
            stack.enter_context(replaced(kind, "__deepcopy__", lambda a, _: a))
        for kind in (torch.SymInt, torch.SymFloat):
            stack.enter_context(replaced(kind, "__divmod__", lambda a, b: (a // b, a % b)))
            stack.enter_context(replaced(kind, "__rdivmod__", lambda a, b: (b // a, b % a)))
        yield


class _Followed:
    """Stands for a function.

    Args:
        recorder: of the trace.
        original: the function.
        plain: the same as a function of numbers that gives a number of Python; None: it works on what it gets.
        of_tensors: whether it asks a tensor for its number.
    """

    def __init__(
        self,
        recorder: ScalarRecorder,
        original: Callable[..., Any],
        plain: Callable[..., Any] | None,
        *,
        of_tensors: bool,
    ) -> None:
        self._recorder, self._original, self._plain = recorder, original, plain
        self._of_tensors = of_tensors

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._of_tensors:
            args = tuple(a.item() if isinstance(a, torch.Tensor) and a.numel() == 1 else a for a in args)
        tolerances = {**_TOLERANCES, **kwargs}.values() if kwargs else ()
        given = (*args, *tolerances)
        nodes = [scalar_of(a) for a in given]
        plain = all(n is not None or type(a) in (int, float, bool) for a, n in zip(given, nodes, strict=True))
        if self._plain is None or not (plain and any(nodes) and kwargs.keys() <= _TOLERANCES.keys()):
            result = self._original(*args, **kwargs)
            return result if self._of_tensors or scalar_of(result) is None else flagged(result)
        wrapped = [n or HostScalar(a, None, self._recorder) for n, a in zip(nodes, given, strict=True)]
        found = self._recorder.scalar_call(self._plain, tuple(wrapped))
        return (found if self._of_tensors else marked(found)).as_symbol()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


@functools.cache
def _plain(module: str, name: str) -> Callable[..., Any] | None:
    """The function of numbers that a graph calls; the same one in each trace, and of the same name on each rank."""
    original = getattr(sys.modules[module], name)
    if module == "math":
        return original if name != "isclose" else _math_isclose

    return None if name in _OF_LISTS else numpy_function(name)


_isclose = math.isclose


def _math_isclose(a: float, b: float, relative: float = 1e-9, absolute: float = 0.0) -> bool:
    return _isclose(a, b, rel_tol=relative, abs_tol=absolute)
