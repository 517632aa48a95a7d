# pyright: basic
# (this module walks arguments of any type; every access follows a check that pyright cannot see)
"""One graph for batches of many sizes: numbers in it that are formulas of the sizes, and their values in a step.

Such a number is a :class:`Size` in the arguments of nodes: an integer with the value for the sizes that the graph was
made for, and a formula. The runtime asks for the step's values (``Sizes.now``); all other code sees integers.
"""

from __future__ import annotations

import functools
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx
from typing_extensions import override

from lightning_spmd.ir.default_dtype import switches_of
from lightning_spmd.ir.node_info import TensorSpec, info_of, named, tell_place

Dimension = tuple[int, int]
"""A tensor leaf of the batch by its position among them, and a dimension of it."""
_SIZE = re.compile(r"\bs(\d+)\b")
_REMEMBERED = 1024
"""Sizes of batches whose numbers are kept: a few hundred bytes each."""


@dataclass(frozen=True)
class Formula:
    """A number that follows from the sizes of a batch.

    Args:
        code: Python of ``s0``, ``s1``, ..., the sizes in the order of ``Sizes.places``.
        factor: a fraction to multiply with; the result is whole.
    """

    code: str
    factor: tuple[int, int] = (1, 1)

    def __str__(self) -> str:
        above, below = self.factor
        if self.factor == (1, 1):
            return self.code
        return f"({self.code}) * {above} // {below}"

    def of(self, counts: str) -> str:
        """Python of a list of the sizes.

        Args:
            counts: its name.
        """
        return _SIZE.sub(lambda match: f"{counts}[{match[1]}]", str(self))

    def at(self, sizes: Sequence[int]) -> Any:
        """Its value for some sizes, all those that it needs and maybe more; None where it would divide by none."""
        try:
            return compiled(self)(sizes)
        except ZeroDivisionError:
            return None

    def names(self) -> set[int]:
        """The sizes that it needs, by number."""
        return set(map(int, _SIZE.findall(self.code)))

    def with_names(self, names: Sequence[str]) -> Formula:
        """The same of other numbers.

        Args:
            names: Python for each of its own.
        """
        return Formula(_SIZE.sub(lambda match: names[int(match[1])], self.code), self.factor)


@functools.cache
def compiled(formula: Formula) -> Callable[[Sequence[int]], Any]:
    """A function that gives its value for some sizes."""
    return eval(f"lambda sizes: {formula.of('sizes')}", {"math": math, "torch": torch})


class Condition:
    """What must hold of counts.

    Args:
        formula: whether it does.
    """

    def __init__(self, formula: Formula) -> None:
        self.formula, self.last = formula, max(formula.names())

    def holds(self, counts: Sequence[int]) -> bool:
        """Whether it does, as far as the counts are known."""
        return self.last >= len(counts) or bool(self.formula.at(counts))


class _Sized:
    """A number of a graph that follows from the sizes of the batch.

    Args:
        value: for the sizes with which the graph was made.
        formula: in any step.
        sizes: of which batches.
    """

    formula: Formula
    sizes: Sizes

    def __new__(cls, value: Any, formula: Formula, sizes: Sizes) -> Any:
        """The number."""
        made: Any = super().__new__(cls, value)  # type: ignore[call-arg]
        made.formula, made.sizes = formula, sizes
        return made


class Size(_Sized, int):
    """An integer of that kind."""


class SizeFloat(_Sized, float):
    """A float of that kind."""


def sized(value: int | float, formula: Formula, sizes: Sizes) -> Size | SizeFloat:
    """A number with its formula."""
    return Size(value, formula, sizes) if isinstance(value, int) else SizeFloat(value, formula, sizes)


def plain(value: Any) -> Any:
    """A number without its formula."""
    return int(value) if isinstance(value, Size) else float(value) if isinstance(value, SizeFloat) else value


class Sizes:
    """The sizes of a batch that one graph leaves open.

    Args:
        places: positions of the open sizes in the batch.
        more: how many numbers formulas may have beside these.
    """

    def __init__(self, places: Sequence[Dimension], more: int = 0) -> None:
        self.places = tuple(places)
        self._names = ", ".join(f"s{i}" for i in range(len(self.places) + more))
        self._functions: dict[str, Callable[..., Any]] = {}
        self._values: tuple[int, ...] = ()

    def of(self, tensors: Sequence[Tensor]) -> tuple[int, ...]:
        """The open sizes of a batch, given its tensor leaves."""
        return tuple([tensors[position].shape[dim] for position, dim in self.places])

    def evaluate(self, formula: Formula, values: Sequence[int]) -> Any:
        """A number for these sizes."""
        return self.function(str(formula))(*values)

    def begin(self, tensors: Sequence[Tensor]) -> None:
        """A step with this batch begins."""
        self._values = self.of(tensors)

    def hear(self) -> None:
        """Take the numbers that Python has told."""

    @property
    def values(self) -> tuple[int, ...]:
        """The sizes of the step that runs."""
        return self._values

    def now(self, formulas: Sequence[Formula]) -> Callable[[], tuple[Any, ...]]:
        """A function that returns the numbers of the current step."""
        compute = self.function(f"({''.join(f'{formula}, ' for formula in formulas)})")
        known: OrderedDict[tuple[int, ...], tuple[Any, ...]] = OrderedDict()

        def numbers() -> tuple[Any, ...]:
            found = known.get(self._values)
            if found is None:
                found = known[self._values] = compute(*self._values)
                _bounded(known)
            return found

        return numbers

    def number(self, formula: Formula) -> Any:
        """A number of the step that runs."""
        return self.evaluate(formula, self.values)

    def function(self, code: str) -> Callable[..., Any]:
        """Python of ``s0``, ``s1``, ... as a function of the sizes."""
        if code not in self._functions:
            self._functions[code] = eval(f"lambda {self._names}: {code}", {"math": math, "torch": torch})
        return self._functions[code]


class Counts(Sizes):
    """Sizes that a run finds out on its way: how many elements of a tensor a mask chooses.

    Args:
        number: of them, with the sizes of the batch.
        by_rank: whether there is a second one for each, behind all of these: how many of the elements this rank holds.
        places: positions of sizes of the batch, which are the first of them.
        told: those that Python tells.
        live: gives all counts of the step that runs, as far as Python knows them.
        sizes: of the batch, which are the first counts, where there are no places.

    Attributes:
        opened: so many of the first ones are sizes of the batch.
        are_apart: no graph does for all of them; each step's have their own.
    """

    def __init__(
        self,
        number: int,
        *,
        by_rank: bool = False,
        places: Sequence[Dimension] = (),
        told: Sequence[int] = (),
        live: Callable[[], Sequence[int]] = tuple,
        sizes: Sequence[int] = (),
    ) -> None:
        total = 2 * number if by_rank else number
        super().__init__(places, total - len(places))
        self.length, self.are_apart = number, False
        self.told, self._live = told, live
        self.current = [0] * total
        self.opened = len(sizes)
        self.put(0, sizes)

    def put(self, first: int, values: Sequence[int]) -> None:
        """Set some of the counts.

        Args:
            first: index of the first one.
            values: their values.
        """
        self.current[first : first + len(values)] = values

    @override
    def begin(self, tensors: Sequence[Tensor]) -> None:
        """A step begins, of which the batch is known."""
        self.put(0, self.of(tensors))
        self.hear()

    @override
    def hear(self) -> None:
        known = self._live()
        for i in self.told:
            if i < len(known):
                self.current[i] = known[i]

    @property
    @override
    def values(self) -> tuple[int, ...]:
        """What the run knows."""
        return tuple(self.current)


class CountsOfStep(Sizes):
    """Such sizes of the step that runs, as far as Python was told.

    Attributes:
        told: they.
    """

    def __init__(self) -> None:
        super().__init__(())
        self.told: Sequence[int] = ()

    @override
    def evaluate(self, formula: Formula, values: Sequence[int]) -> Any:
        """A number for these counts."""
        return formula.at(values)

    @property
    @override
    def values(self) -> tuple[int, ...]:
        """What Python was told."""
        return tuple(self.told)


def _bounded(kept: OrderedDict[Any, Any]) -> None:
    if len(kept) > _REMEMBERED:
        kept.popitem(last=False)


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Nested arguments with ``function`` of each number that has a formula."""
    if isinstance(value, (Size, SizeFloat)):
        return function(value)
    if isinstance(value, (list, tuple)):
        entries = cast(Sequence[Any], value)
        if not any(isinstance(e, (Size, SizeFloat, list, tuple, dict, slice, TensorSpec)) for e in entries):
            return value
        new = [mapped(function, entry) for entry in entries]
        return type(value)(*new) if hasattr(value, "_fields") else new if isinstance(value, list) else tuple(new)
    if isinstance(value, dict):
        return {key: mapped(function, entry) for key, entry in cast(dict[Any, Any], value).items()}
    if isinstance(value, slice):
        return slice(*(mapped(function, entry) for entry in (value.start, value.stop, value.step)))
    if isinstance(value, TensorSpec):
        shape, stride = mapped(function, value.shape), mapped(function, value.stride)
        return TensorSpec(shape, stride, value.dtype, value.device)
    return value


def has_sizes(graph: fx.Graph) -> bool:
    """Whether a graph has numbers that follow from the sizes of a batch."""
    found: list[Any] = []
    for node in graph.nodes:
        mapped(found.append, (node.args, node.kwargs))
    return bool(found)


def in_this_step(value: Any) -> Any:
    """A nested argument or a spec with the numbers of the step that runs."""
    return mapped(lambda number: number.sizes.number(number.formula), value)


class SizedInterpreter(fx.Interpreter):
    """Runs a graph node by node, with the numbers of the step that runs; errors name the node's place."""

    def __init__(self, graph_module: fx.GraphModule) -> None:
        super().__init__(graph_module)
        self.extra_traceback = False  # of fx, which names neither module nor line

    def run_node(self, n: fx.Node) -> Any:
        """One node."""
        try:
            with switches_of(info_of(n)):
                return super().run_node(n)
        except Exception as error:
            tell_place(error, named(n))
            raise

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> Any:
        """The arguments of a node."""
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        return in_this_step(args), in_this_step(kwargs)
