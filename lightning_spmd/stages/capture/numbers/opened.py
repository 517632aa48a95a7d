# pyright: basic
# (this module walks arguments of any type; every access follows a check that pyright cannot see)
"""Numbers of a step that torch took as plain ones: what a graph has of them becomes formulas again.

A rate of dropout, a margin, an exponent whose power has a gradient: C++ takes a plain number, and what it makes of it
(``1 - p``) are constants of the graph, which would do for this number alone. So the graph is made for a few other
numbers as well. Where the graphs are the same node for node, a constant in which they differ must be a simple formula
of one of the numbers that gives all of them to the last bit.

C++ decides on such numbers, too, and nobody sees it: dropout with a rate of 0 draws nothing. It does so at whole
numbers, halves and quarters. Between these a graph does for all numbers, at them for that one (``stretch_of``).
"""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
import random
import struct
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from operator import itemgetter
from typing import Any, NamedTuple

from torch import fx

from lightning_spmd import _private_api as private
from lightning_spmd.ir.same_value import same_plain
from lightning_spmd.ir.unify import Apart, same_target
from lightning_spmd.stages.capture.numbers.decisions import Decision
from lightning_spmd.stages.capture.numbers.host_scalar import Number

_SMALL = 4
"""Below, C++ may decide at whole numbers, halves and quarters; beyond there are stretches from 4 to 8, 8 to 16, ..."""
_LARGE = 2**53
_PARTS = ((0.0005, 0.005), (0.995, 0.9995), (0.3, 0.7))
"""Where in its stretch each sample of a number lies: what C++ decides elsewhere shows between the first two."""
_COMPUTED_WITH = {"FloatType", "NumberType", "TensorType"}
"""Kinds of arguments of operators that decide no shapes; a number may stand for a tensor."""
_LARGEST_BELOW = 4096
_WIDTH, _FAR = 1e-6, 1e300
_TRIES = 300
"""Numbers with which formulas are told apart."""


class Untold(Exception):
    """Formulas of a number give the same in all graphs, and not everywhere.

    Args:
        root: the number.
        value: of it, for which they give others.
    """

    def __init__(self, root: fx.Node, value: Number) -> None:
        super().__init__(f"formulas of {root} cannot be told apart")
        self.root, self.value = root, value


class Made(NamedTuple):
    """What was recorded of a step with some numbers.

    Args:
        graph: of it.
        decisions: that were made.
        numbers: of Python's in it, with their values.
    """

    graph: fx.Graph
    decisions: list[Decision]
    numbers: Mapping[fx.Node, Number]


def stretch_of(number: Number) -> Number:
    """The same for numbers of which C++ does the same, as far as it decides on them at all."""
    size = abs(number)
    if not size < _LARGE:  # NaN too
        return number
    if size >= _SMALL:
        return math.copysign(2 ** math.floor(math.log2(size)), number)
    is_special = type(number) is not float or (4 * number).is_integer()
    return number if is_special else math.floor(number) + 1 / 3


def stretches_of(*numbers: Number) -> tuple[Number, ...]:
    """Those of some numbers."""
    return tuple(map(stretch_of, numbers))


def is_open(number: Number) -> bool:
    """Whether others are treated like it."""
    return abs(number) < _LARGE and (abs(number) >= _SMALL or stretch_of(number) != number)


def samples_of(numbers: Sequence[Number]) -> list[tuple[Number, ...]]:
    """Other numbers of the same stretches.

    Those that are not whole are in the same order within each stretch, since calls may ask for that. Of whole ones
    there are too few: one is large where another one is small.

    Args:
        numbers: which all are open.
    """
    found = list[tuple[Number, ...]]()
    for row, (low, high) in enumerate(_PARTS):
        draws, chosen = random.Random(row), list(numbers)
        alike = defaultdict[Number, list[int]](list)
        for i, number in enumerate(numbers):
            if type(number) is float:
                alike[stretch_of(number)].append(i)
            else:
                least, most = (math.trunc(n) for n in _ends(number))
                ends = (least, most - 1) if number > 0 else (least + 1, most)
                chosen[i] = (*ends, draws.randint(*ends))[(row + i) % len(_PARTS)]
        for group in alike.values():
            drawn = sorted(_drawn(numbers[group[0]], draws, low, high) for _ in group)
            for i, number in zip(sorted(group, key=numbers.__getitem__), drawn, strict=True):
                chosen[i] = number
        found.append(tuple(chosen))
    return found


def _drawn(number: Number, draws: random.Random, low: float = 0, high: float = 1) -> Number:
    """Another number of the same stretch, within a part of it."""
    least, most = _ends(number)
    # a root has all bits that floats of its size can have; ``uniform`` leaves out the last ones of small numbers
    drawn = least + (most - least) * math.sqrt(draws.uniform(low * low, high * high))
    return drawn if type(number) is float else math.trunc(drawn)


def _ends(number: Number) -> tuple[float, float]:
    if abs(number) < _SMALL:
        return math.floor(number), math.floor(number) + 1
    end = stretch_of(number)
    return (end, 2 * end) if end > 0 else (2 * end, end)


def roots_of(node: fx.Node, numbers: Mapping[fx.Node, Number]) -> list[fx.Node] | None:
    """The numbers from which one follows; None if it follows from others as well.

    Args:
        node: that gives it.
        numbers: of the step.
    """
    if node in numbers:
        return [node]
    if node.op != "call_function" or isinstance(node.target, private.OpOverload) or not node.all_input_nodes:
        return None
    found = [roots_of(operand, numbers) for operand in node.all_input_nodes]
    return None if None in found else list(dict.fromkeys(itertools.chain(*filter(None, found))))


def taken_as_plain(made: Made) -> list[fx.Node]:
    """The numbers of a step that its graph has as constants, and for which others would be treated alike."""
    found: dict[fx.Node, None] = {}
    for node, value, _ in made.decisions:
        if not isinstance(value, bool):
            found.update(dict.fromkeys(roots_of(node, made.numbers) or ()))
    return [root for root in found if is_open(made.numbers[root])]


def open_numbers(made: Made, others: Sequence[Made]) -> list[Decision]:
    """Put formulas in the place of constants that differ. Gives the decisions that hold from then on.

    Args:
        made: what was recorded, whose graph is changed.
        others: what was recorded with other numbers.

    Raises:
        Apart: the graphs have no common form; nothing was changed.
        Untold: with another number it would be known which one they have; likewise.
    """
    return _Opening([made, *others]).decisions()


class _Opening:
    """The graphs side by side."""

    def __init__(self, made: Sequence[Made]) -> None:
        self._made, self._graph = made[0], made[0].graph
        rows = [list(one.graph.nodes) for one in made]
        if len({len(nodes) for nodes in rows}) > 1:
            raise Apart("other operators are chosen for other numbers")
        self._index = {node: i for nodes in rows for i, node in enumerate(nodes)}
        self._plain = self._numbers_taken(made)
        bases = itertools.product(self._plain.items(), _BASES)
        known = [_Known(node, base, [_after(number, base) for number in column]) for (node, column), base in bases]
        self._known = sorted(((_direction(one.column), i, one) for i, one in enumerate(known)), key=itemgetter(0))
        changes = [self._arguments(nodes) for nodes in zip(*rows, strict=True)]
        self._written: dict[Any, fx.Node] = {}
        for node, found in zip(rows[0], changes, strict=True):
            if found is not None:
                with self._graph.inserting_before(node):
                    node.args, node.kwargs = (self._with_formulas(part, node) for part in found)

    def _numbers_taken(self, made: Sequence[Made]) -> dict[fx.Node, tuple[Number, ...]]:
        """The numbers that were taken as plain ones, with their values in all graphs."""
        found: dict[fx.Node, tuple[Number, ...]] = {}
        for each in itertools.zip_longest(*[one.decisions for one in made]):
            if None in each or len({self._index[node] for node, _, _ in each}) > 1:
                raise Apart("other decisions are made for other numbers")
            values = tuple(value for _, value, _ in each)
            if len(set(map(type, values))) > 1 or (type(values[0]) is bool and len(set(values)) > 1):
                raise Apart("a decision is another one for other numbers")
            if type(values[0]) is not bool and len(set(values)) > 1:
                found[each[0][0]] = values
        return found

    def _arguments(self, nodes: Sequence[fx.Node]) -> tuple[Any, Any] | None:
        """The arguments of a node with formulas; None if they are the same in all graphs."""
        first = nodes[0]
        if any(node.op != first.op or not same_target(node.target, first.target) for node in nodes[1:]):
            raise Apart("other operators are chosen for other numbers")
        found = list[_Formula]()
        schema = getattr(first.target, "_schema", None)
        kinds = {} if schema is None else {a.name: _kind_of(a.type) for a in schema.arguments}
        names = list(kinds)
        args = tuple(
            self._joined(parts, kinds.get(names[i] if i < len(names) else ""), found)
            for i, parts in enumerate(_columns([node.args for node in nodes]))
        )
        if len({tuple(node.kwargs) for node in nodes}) > 1:
            raise Apart("an operator has other arguments for other numbers")
        kwargs = {key: self._joined([n.kwargs[key] for n in nodes], kinds.get(key), found) for key in first.kwargs}
        return (args, kwargs) if found else None

    def _joined(self, parts: Sequence[Any], kind: str | None, found: list[_Formula]) -> Any:
        first = parts[0]
        if isinstance(first, fx.Node):
            if any(not isinstance(p, fx.Node) or self._index[p] != self._index[first] for p in parts):
                raise Apart("an operand is another one for other numbers")
            return first
        if type(first) in (list, tuple):
            if any(type(part) is not type(first) for part in parts):
                raise Apart("an argument is of another kind for other numbers")
            return type(first)(self._joined(entries, kind, found) for entries in _columns(parts))
        if all(same_plain(part, first) for part in parts[1:]):
            return first
        if kind not in _COMPUTED_WITH or {*map(type, parts)} not in ({int}, {float}):
            raise Apart("an argument is another one for other numbers")
        found.append(self._formula(parts))
        return found[-1]

    def _formula(self, values: Sequence[Number]) -> _Formula:
        inverse = [quotient(1, value) for value in values]
        near = {i: one for column in (values, inverse) for i, one in self._near(_direction(column))}
        found = [
            _Formula(known.node, (*known.steps, *last))
            for _, known in sorted(near.items(), key=itemgetter(0))
            for last in _last_steps(values[0], known.column[0])
            if all(_is_same(_after(number, last), value) for number, value in zip(known.column, values, strict=True))
        ]
        numbers = self._made.numbers
        if len({tuple(roots_of(formula.of, numbers) or ()) for formula in found}) != 1:
            raise Apart(f"no formula, or no only one, of a number gives {', '.join(map(str, values))}")
        first, *others = (formula for formula in found if formula.of is found[0].of)
        draws, root = random.Random(0), numbers.get(first.of)
        for value in () if root is None else (_drawn(root, draws) for _ in range(_TRIES)):
            if any(not _is_same(_after(value, its.steps), _after(value, first.steps)) for its in others):
                raise Untold(first.of, value)
        return first

    def _near(self, direction: float) -> Iterator[tuple[int, _Known]]:
        """What may be as another number but for a factor, and what is added, in order."""
        width = _WIDTH * max(1, abs(direction))
        begin = bisect_left(self._known, direction - width, key=itemgetter(0))
        for its, i, known in self._known[begin:]:
            if its > direction + width:
                break
            yield i, known

    def _with_formulas(self, value: Any, before: fx.Node) -> Any:
        if isinstance(value, _Formula):
            return self._node_of(value.of, value.steps, before)
        if type(value) in (list, tuple):
            return type(value)(self._with_formulas(part, before) for part in value)
        if isinstance(value, dict):
            return {key: self._with_formulas(part, before) for key, part in value.items()}
        return value

    def _node_of(self, of: fx.Node, steps: tuple[_Step, ...], before: fx.Node) -> fx.Node:
        """The node of a number that follows from another one."""
        if not steps:
            return of
        if (of, steps) not in self._written:
            *rest, last = steps
            operand = self._node_of(of, tuple(rest), before)
            made = self._graph.call_function(last.function, last.operands(operand))
            value = last.function(*last.operands(operand.meta["val"]))
            made.meta.update(val=value, info=before.meta["info"])
            self._written[of, steps] = made
        return self._written[of, steps]

    def decisions(self) -> list[Decision]:
        """The decisions, of which those for one number are now for all that are treated alike."""
        found, numbers = list[Decision](), self._made.numbers
        for node, value, place in self._made.decisions:
            if node in self._plain:
                asked = list(dict.fromkeys([*(roots_of(node, numbers) or ()), node]))
                stretches = stretches_of(*(one.meta["val"] for one in asked))
                node = self._graph.call_function(stretches_of, tuple(asked))
                node.meta.update(val=stretches, info=asked[-1].meta.get("info"))
                value: Any = stretches
            found.append((node, value, place))
        return found


def in_single_precision(number: Number) -> float:
    """The float32 that is nearest to a number."""
    return struct.unpack("f", struct.pack("f", number))[0]


def quotient(one: Number, other: Number) -> float:
    """One number by another one, as C divides: what was rounded to 0 before is no error."""
    if other:
        return one / other
    return math.copysign(math.inf, one) * math.copysign(1, other) if one else math.nan


class _Step(NamedTuple):
    """A function of one number.

    Args:
        function: of one or two.
        other: the other one; None of one alone.
        is_left: the other one comes first.
    """

    function: Callable[..., Any]
    other: Number | None = None
    is_left: bool = False

    def operands(self, number: Any) -> tuple[Any, ...]:
        """With which the function is called."""
        if self.other is None:
            return (number,)
        return (self.other, number) if self.is_left else (number, self.other)


class _Known(NamedTuple):
    """What some steps make of a number in each graph.

    Args:
        node: that gives it.
        steps: they.
        column: what they make.
    """

    node: fx.Node
    steps: tuple[_Step, ...]
    column: Sequence[Number]


class _Formula(NamedTuple):
    """A number that follows from another one.

    Args:
        of: what gives that.
        steps: of the computation.
    """

    of: fx.Node
    steps: tuple[_Step, ...]


_REST = _Step(operator.sub, 1, is_left=True)
_INVERSE = _Step(quotient, 1, is_left=True)
_SINGLE, _LESS = _Step(in_single_precision), _Step(operator.sub, 1)
_ROOT, _LOGARITHM, _SQUARE = _Step(math.sqrt), _Step(math.log), _Step(operator.pow, 2)
_BASES = (
    (), (_REST,), (_LESS,), (_INVERSE,), (_REST, _INVERSE), (_SQUARE,), (_ROOT,), (_LOGARITHM,), (_SINGLE,),
    (_SINGLE, _INVERSE),
)  # fmt: skip
"""What is computed of a number first: of a rate what is kept, and what that is divided by."""


def _direction(column: Sequence[Number]) -> float:
    """The same of numbers that differ by a factor and what is added."""
    first, second, third, *_ = column
    direction = quotient(second - first, third - first)
    return direction if math.isfinite(direction) else _FAR


def _after(number: Number, steps: Sequence[_Step]) -> Number:
    """What some steps make of a number; NaN if they make nothing of it."""
    with contextlib.suppress(ArithmeticError, ValueError, struct.error):
        for step in steps:
            number = step.function(*step.operands(number))
        return number
    return math.nan


def _is_same(number: Number, other: Number) -> bool:
    return type(number) is type(other) and (number == other or (number != number and other != other))


def _last_steps(value: Number, known: Number) -> Iterator[tuple[_Step, ...]]:
    """What may make a number of another one: nothing, or one step with a third one, whole ones first."""
    yield from ((), (_Step(operator.neg),), (_Step(float),))
    found = list[tuple[bool, _Step]]()
    ways = (
        (operator.add, False, lambda: value - known), (operator.sub, True, lambda: value + known),
        (operator.mul, False, lambda: value / known), (quotient, False, lambda: known / value),
        (quotient, True, lambda: value * known),
    )  # fmt: skip
    for function, is_left, other in ways:
        with contextlib.suppress(ArithmeticError, ValueError):
            number = Fraction(other()).limit_denominator(_LARGEST_BELOW)
            is_whole = number.denominator == 1
            found.append((not is_whole, _Step(function, number.numerator if is_whole else float(number), is_left)))
    yield from ((step,) for _, step in sorted(found, key=itemgetter(0)))


def _columns(parts: Sequence[Sequence[Any]]) -> Iterator[tuple[Any, ...]]:
    if len({len(part) for part in parts}) > 1:
        raise Apart("an operator has other arguments for other numbers")
    return zip(*parts, strict=True)


def _kind_of(type_: Any) -> str:
    """The kind of an argument, or of the entries of a list."""
    while hasattr(type_, "getElementType") and type_.kind() in ("OptionalType", "ListType"):
        type_ = type_.getElementType()
    return type_.kind()
