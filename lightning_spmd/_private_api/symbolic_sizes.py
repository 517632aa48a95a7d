"""Underscore names and internals of torch's symbolic sizes (``torch.fx.experimental``)."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator
from typing import Any

import sympy
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy.printers import PythonPrinter

_LOG = logging.getLogger("torch._subclasses.fake_tensor")
_LARGEST = 2**30
"""No size of a batch is larger; a product of two is below the largest integer, too."""
_SYMBOLS = frozenset({torch.SymInt, torch.SymFloat, torch.SymBool})


class _Watched(ShapeEnv):
    """A ShapeEnv that remembers which symbols were taken for the numbers that they are in this trace."""

    def __init__(self) -> None:
        super().__init__(duck_shape=False)
        self.fixed = set[Any]()

    def _set_replacement(self, a: Any, tgt: Any, msg: str) -> None:
        if tgt.is_number:
            self.fixed.add(a)
        super()._set_replacement(a, tgt, msg)


class SymbolicSizes:
    """Symbols for sizes, and what a trace made of them."""

    def __init__(self) -> None:
        self.env = _Watched()
        self._symbols: list[Any] = []

    def symbol(self, value: int) -> torch.SymInt:
        """The next symbol, of a size that has this value now (2 at least)."""
        source = ConstantSource(f"size{len(self._symbols)}")
        symbol = self.env.create_symbol(value, source, DimDynamic.DYNAMIC)
        # torch's indexing leaves out a whole slice (the first index of ``x[:, None]``) only if it knows that no size is
        # greater than the end of ``:``, which is the largest integer
        self.env.constrain_symbol_range(symbol, compiler_min=2, compiler_max=_LARGEST)
        made: Any = self.env.create_symintnode(symbol, hint=value, source=source)
        self._symbols.append(symbol)
        return made

    def decided(self, before: int) -> list[tuple[str, set[int]]]:
        """What has been decided behind so many decisions: Python of ``s0``, ``s1``, ..., with the numbers of these."""
        numbers = {symbol: i for i, symbol in enumerate(self._symbols)}
        names = {symbol: sympy.Symbol(f"s{i}", integer=True, positive=True) for symbol, i in numbers.items()}
        found: list[tuple[str, set[int]]] = []
        for guard in self.env.guards[before:]:
            if isinstance(guard.expr, sympy.Eq) and guard.expr.has(sympy.Float):
                continue  # a number that C++ takes, and no decision
            needed = {numbers[symbol] for symbol in guard.expr.free_symbols}
            found.append((PythonPrinter().doprint(guard.expr.xreplace(names)), needed))
        return found

    @property
    def decisions(self) -> int:
        """How many decisions were made so far."""
        return len(self.env.guards)

    def fixed(self) -> list[int]:
        """The symbols whose very number was wanted, by their own."""
        return [i for i, symbol in enumerate(self._symbols) if symbol in self.env.fixed]

    def code(self, value: Any) -> str | None:
        """A number that follows from symbols as Python of ``s0``, ``s1``, ...; None for a constant.

        Raises:
            ValueError: its roundings may come in another order than they did in the program.
        """
        formula = self.env.simplify(value.node.expr)
        if formula.is_number:
            return None
        for part in sympy.preorder_traversal(formula):
            rounds = isinstance(part, (sympy.Add, sympy.Mul)) and not part.is_integer and len(part.args) > 2
            if rounds or (isinstance(part, sympy.Pow) and not part.exp.is_Integer):
                raise ValueError(str(formula))
        names = {symbol: sympy.Symbol(f"s{i}", integer=True, positive=True) for i, symbol in enumerate(self._symbols)}
        return PythonPrinter().doprint(formula.xreplace(names))


def is_symbol(value: Any) -> bool:
    """Whether a number of a program is one that follows from symbols of a :class:`SymbolicSizes`."""
    return type(value) in _SYMBOLS and type(value.node) is SymNode


@contextlib.contextmanager
def symbols_as_numbers(*, by_python: bool) -> Iterator[None]:
    """A context for tracing: ``math.sqrt`` and functions of torch follow symbols, a symbol as text is its number.

    Args:
        by_python: torch's implementations in Python go first: some of those in C++ take plain integers alone.
    """
    root, text, level = math.sqrt, SymNode._graph_repr, _LOG.level

    def follow(x: Any) -> Any:
        return torch.sym_sqrt(x) if is_symbol(x) else root(x)

    def number(node: Any) -> str:
        if node.is_int():
            return str(node.guard_int("", 0))
        return str(node.guard_float("", 0) if node.is_float() else node.guard_bool("", 0))

    math.sqrt, SymNode._graph_repr = follow, number  # pyright: ignore[reportAttributeAccessIssue]
    _LOG.setLevel(logging.CRITICAL)  # what cannot be done is told once, in the user's words
    try:
        with enable_python_dispatcher() if by_python else contextlib.nullcontext():
            yield
    finally:
        math.sqrt, SymNode._graph_repr = root, text
        _LOG.setLevel(level)
