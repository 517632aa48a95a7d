# ruff: noqa: D102 - the undocumented methods are the protocol of torch's SymNode, named and explained there
"""Python numbers that stay inputs: ``lr``, betas, step counters, ``batch_idx``, ``global_step``.

A :class:`HostScalar` sits inside a ``torch.SymFloat`` / ``torch.SymInt``. It holds the number of this very step, so all
arithmetic and every branch see the true value, and it records the arithmetic as graph nodes and the branches as guards:

    step_size = lr / (1 - beta1 ** step)      three nodes in the graph, evaluated anew each step in double precision
    if rho_t > 5: ...                         a predicate guard: recapture only when the decision flips

Operators with ``Scalar`` arguments receive the SymFloat itself; operators with ``float`` arguments (the fused
optimizers) make torch's argument parser ask for a plain float, and the recorder finds that float again among the
operator's arguments (see ``Recorder.reclaim``). Numbers taken in any other way (``float(x)``, formatting) freeze: they
become a guard on the value.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import fx

Number = bool | int | float


class _Recorder(Protocol):
    """Where arithmetic on scalars and decisions on their values are recorded."""

    def scalar_call(self, function: Callable[..., Any], operands: tuple[HostScalar, ...]) -> HostScalar: ...
    def decide(self, scalar: HostScalar) -> Number: ...
    def expose(self, scalar: HostScalar, *, from_parser: bool) -> None: ...


def sym_max(a: Number, b: Number) -> Number:
    """``max`` with torch's promotion to float, as SymFloat computes it."""
    return max(float(a), float(b)) if isinstance(a, float) or isinstance(b, float) else max(a, b)


def sym_min(a: Number, b: Number) -> Number:
    """``min`` with torch's promotion to float, as SymFloat computes it."""
    return min(float(a), float(b)) if isinstance(a, float) or isinstance(b, float) else min(a, b)


# torch asks SymNodes for these by name: `sym_sqrt`, `sym_cos`, ... (one for each function of `math` that it knows)
_OF_MATH = "sqrt cos sin tan cosh sinh tanh asin acos atan log2"
_OPERATORS: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in (
        "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "neg", "pos", "abs", "eq", "ne", "gt", "ge", "lt",
        "le", "and_", "or_", "lshift", "rshift",
    )},
    **{name: getattr(math, name) for name in ("floor", "ceil", "trunc")},
    **{f"sym_{name}": getattr(math, name) for name in _OF_MATH.split()},
    "float_truediv": operator.truediv,
    "int_truediv": operator.truediv,
    "int_floordiv": operator.floordiv,
    "python_mod": operator.mod,
    "float_pow": operator.pow,
    "pow_by_natural": operator.pow,
    "sym_not": operator.not_,
    "sym_float": float,
    "sym_max": sym_max,
    "sym_min": sym_min,
    "round": round,
    "sym_and": operator.and_,
    "sym_or": operator.or_,
    "bitwise_and": operator.and_,
    "bitwise_or": operator.or_,
    "bitwise_xor": operator.xor,
}  # fmt: skip


class HostScalar:
    """The node of a SymInt/SymFloat/SymBool: the value of this step plus the graph node that computes it.

    Args:
        value: the number that this step's Python code has.
        node: graph node that yields it, or None for a constant.
        recorder: where arithmetic and decisions are recorded.
    """

    def __init__(self, value: Number, node: fx.Node | None, recorder: _Recorder) -> None:
        self.value = value
        self.node = node
        self.recorder = recorder

    def as_symbol(self) -> torch.SymInt | torch.SymFloat | torch.SymBool:
        """This number as the torch type that operators and Python code accept."""
        if isinstance(self.value, bool):
            return torch.SymBool(self)
        return torch.SymInt(self) if isinstance(self.value, int) else torch.SymFloat(self)

    def argument(self) -> fx.Node | Number:
        """What stands for this number in a recorded call."""
        return self.value if self.node is None else self.node

    def __getattr__(self, name: str) -> Callable[..., HostScalar]:
        function = _OPERATORS.get(name)
        if function is None:
            raise AttributeError(f"a recorded number has no operation {name!r}")

        def call(*others: Any) -> HostScalar:
            numbers = [o if isinstance(o, HostScalar) else HostScalar(o, None, self.recorder) for o in others]
            return self.recorder.scalar_call(function, (self, *numbers))

        return call

    # --- the protocol of torch.fx.experimental.sym_node.SymNode
    def is_int(self) -> bool:
        return isinstance(self.value, int) and not isinstance(self.value, bool)

    def is_float(self) -> bool:
        return isinstance(self.value, float)

    def is_bool(self) -> bool:
        return isinstance(self.value, bool)

    def is_symbolic(self) -> bool:
        return True

    def is_nested_int(self) -> bool:
        return False

    def maybe_as_int(self) -> None:
        return None

    constant_int = constant_bool = maybe_as_int

    def has_hint(self) -> bool:
        return True

    @property
    def hint(self) -> Number:
        return self.value

    def require_hint(self, fallback: Number | None = None) -> Number:
        return self.value

    def is_constant(self) -> bool:
        return False

    def clone(self) -> HostScalar:
        return self

    def wrap_int(self, number: Number) -> HostScalar:
        return HostScalar(number, None, self.recorder)

    wrap_float = wrap_bool = wrap_int

    def is_integer(self) -> HostScalar:
        return self.recorder.scalar_call(lambda x: float(x).is_integer(), (self,))

    def expect_true(self, file: str, line: int) -> bool:
        return bool(self.value)  # torch's own sanity checks (`base >= 0` of a power): no decision

    def guard_bool(self, file: str, line: int) -> bool:
        return self.bool_()

    def guard_or_false(self, file: str, line: int) -> bool:
        return self.bool_()

    guard_or_true = guard_size_oblivious = statically_known_true = guard_or_false

    def guard_int(self, file: str, line: int) -> int:
        self.recorder.expose(self, from_parser="python_arg_parser" in file or bool(line))
        return int(self.value)

    def guard_float(self, file: str, line: int) -> float:
        self.recorder.expose(self, from_parser="python_arg_parser" in file or bool(line))
        return float(self.value)

    def bool_(self) -> bool:
        if self.is_bool():
            return bool(self.recorder.decide(self))
        return bool(self.recorder.decide(self.recorder.scalar_call(operator.ne, (self, self.wrap_int(0)))))

    def int_(self) -> int:
        return int(self.recorder.decide(self))

    def str(self) -> str:
        return str(self.recorder.decide(self))

    def _graph_repr(self) -> str:  # what str() and f-strings of a SymInt call
        return str(self.recorder.decide(self))


SYMBOLS = frozenset({torch.SymInt, torch.SymFloat, torch.SymBool})


def scalar_of(value: Any) -> HostScalar | None:
    """The HostScalar inside a SymInt/SymFloat/SymBool, or None for anything else."""
    if type(value) not in SYMBOLS:
        return None
    node = value.node
    return node if isinstance(node, HostScalar) else None
