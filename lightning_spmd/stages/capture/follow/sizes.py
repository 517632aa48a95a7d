"""Steps of batches whose sizes vary: one tree of notes for all sizes, in which integers are formulas of the sizes.

Python runs with the true sizes, so a formula is never trusted: its value for a step is compared with what Python
passes, and a call that does not fit is another call. Only the sizes of results are given to Python. They come from
torch itself, which runs the noted calls with symbols for sizes, and hold under the conditions that it names.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from lightning_spmd import _private_api as private
from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.ir.sizes import Dimension, Formula, Size, Sizes
from lightning_spmd.stages.capture.follow.matching import keeps_shapes, same_constant
from lightning_spmd.stages.capture.follow.notes import (
    SOURCES,
    At,
    ForAll,
    Note,
    Place,
    formulas_in,
    in_step,
    is_formula,
    leaves_by_place,
    with_numbers,
)
from lightning_spmd.stages.capture.follow.placeholders import Moulds
from lightning_spmd.stages.capture.follow.values import Values
from lightning_spmd.stages.capture.user_code import located_at

_REMEMBERED = 16
"""Sizes whose numbers and placeholders are kept."""
_SAMPLES = 4
"""Sizes at which a call was seen that are kept, to find formulas of other calls."""
_FAILURES = 2
"""After this many paths without formulas each size has a tree of its own."""
_DIVISORS = range(2, 17)
_ROUNDED = ("({0}) // {1} * {1}", "-(-({0}) // {1}) * {1}", "({0}) % {1}", "-({0}) % {1}")
"""To a multiple, and what is left or lacks."""


class NotForAllSizes(Exception):
    """Control flow: a path has no formulas. The message is the reason, for users."""


class ForAllSizes:
    """A note for other sizes than the recorded ones.

    Args:
        sizes: which sizes vary.
        condition: Python of ``s0``, ``s1``, ...: for which sizes results are as large as said here.
        leaves: numbers among the arguments that are formulas, in order.
        specs: of the results, with formulas.
    """

    def __init__(self, sizes: Sizes, condition: str, leaves: Sequence[Any], specs: Sequence[TensorSpec]) -> None:
        self.sizes, self.condition, self.specs = sizes, condition, specs
        code = ", ".join(map(_code, (*leaves, *[(tuple(s.shape), tuple(s.stride)) for s in specs])))
        self.is_fixed = not any(isinstance(n, Size) for s in specs for n in (*s.shape, *s.stride)) and not leaves
        self._count, self._numbers = len(leaves), sizes.function(f"({code}{',' if code else ''})")

    def at(self, at: At) -> tuple[list[Any], list[TensorSpec], list[Tensor]] | None:
        """Numbers and results for these sizes; None if they are unknown."""
        if self.condition not in at.holds:
            at.holds[self.condition] = bool(Formula(self.condition).at(at.values))
        if not at.holds[self.condition]:
            return None
        numbers = self._numbers(*at.values)
        specs = [
            TensorSpec(shape, stride, spec.dtype, spec.device)
            for (shape, stride), spec in zip(numbers[self._count :], self.specs, strict=True)
        ]
        return list(numbers[: self._count]), specs, [at.moulds.of(spec) for spec in specs]


class ByCounts:
    """A note whose sizes are formulas of the counts of a step, of which sizes of the batch are the first."""

    is_fixed = False

    def at(self, at: At) -> None:
        """Nothing: the step sizes its results."""


class OpenTree:
    """The steps with batches that are alike but for some sizes.

    Args:
        places: these sizes.
        moulds: of placeholders.

    Attributes:
        root: the beginning of all of them.
        reason: why the last path that has none has no formulas.
        has_failed: no path is going to have any.
    """

    def __init__(self, places: Sequence[Dimension], moulds: Moulds) -> None:
        self._moulds = moulds
        self.sizes = Sizes(places, "True")
        self.root = Note(-1)
        self.root.marked(self.root)
        self.reason: str | None = None
        self._refused: set[int] = set()
        self._pinned: set[int] = set()
        self._known: OrderedDict[tuple[int, ...], At] = OrderedDict()
        self._confirmed: dict[int, set[tuple[int, ...]]] = {}

    @property
    def known(self) -> list[tuple[int, ...]]:
        """Some of the sizes of its steps."""
        return list(self._known)

    @property
    def has_failed(self) -> bool:
        """Whether each size has a tree of its own."""
        return len(self._refused) >= _FAILURES and not self._are_confirmed

    def begin(self, given: Sequence[Tensor]) -> At:
        """A step with these tensors of the batch begins."""
        self.sizes.begin(given)
        values = self.sizes.values
        at = self._known.setdefault(values, At(values, self._moulds))
        self._known.move_to_end(values)
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        if not at.known:  # where no mode of torch sees what is made
            note = self.root
            while note.children:
                note = note.children[-1]
                _known_at(note, at)
        return at

    def forget(self) -> None:
        """Forget numbers and placeholders of sizes; they are made anew."""
        for at in self._known.values():
            at.known.clear()

    def is_for_all(self, notes: Sequence[Note], path: int) -> bool:
        """Whether a path has formulas, and was seen with more than one size."""
        is_open = path not in self._pinned and all(note.for_all is not None for note in notes)
        return is_open and len(self._confirmed.get(path, ())) > 1

    def shortened(self, path: int, before: int) -> None:
        """A path was shortened: its formulas hold for the beginning, too.

        Args:
            path: the number of the beginning.
            before: that of the path.
        """
        self._confirmed.setdefault(path, set()).update(self._confirmed.get(before, ()))

    @property
    def why_not(self) -> str | None:
        """Why each size has a graph of its own, for users; None if some do not, or one alone was seen."""
        return self.reason if len(self._confirmed) > 1 and not self._are_confirmed else None

    @property
    def _are_confirmed(self) -> bool:
        return any(len(seen) > 1 for seen in self._confirmed.values())

    def counted(self, notes: Sequence[Note], path: int, at: At) -> None:
        """End a step with data-dependent sizes, all of whose calls have formulas."""
        seen = self._confirmed.setdefault(path, set())
        if len(seen) >= _SAMPLES:
            return
        seen.add(at.values)
        sizes = set(range(len(at.values)))
        for note in notes:
            if note.for_all is None:
                note.for_all, note.at = ByCounts(), at
            if path not in self._pinned and note.pins.keys() & sizes:
                place = f" at {note.source}" if note.source else ""
                self._pinned.add(path)
                self.reason = f"its very size is wanted by {note.name}{place}"

    def end(
        self,
        notes: Sequence[Note],
        path: int,
        at: At,
        others: Callable[[], Iterable[tuple[tuple[int, ...], Note]]],
        recording: Callable[[Any, list[Any]], Any],
        numbers: Callable[[Note], Mapping[Place, Any]],
    ) -> bool:
        """End a step: find formulas for recorded calls. Returns whether all have some.

        Args:
            notes: the path.
            path: its number.
            at: the sizes.
            others: trees of steps with such batches of one size each.
            recording: makes the calls on fake tensors of a mode, given sizes of the tensors of the batch.
            numbers: of a call that are others in other steps.
        """
        seen = self._confirmed.setdefault(path, set())
        if any(note.for_all is None for note in notes):
            if path in self._refused:
                return False
            cursors = _Cursors(list(others()))
            try:
                _Opening(self, notes, at, cursors).run(recording, numbers)
            except NotForAllSizes as error:
                self._refused.add(path)
                self.reason = str(error)
                return False
            seen.update(values for values, _ in cursors.now)
        if len(seen) < _SAMPLES:
            seen.add(at.values)
        if at.is_new:
            at.is_new = False
            for note in notes:
                if len(note.seen) < _SAMPLES and at.values not in note.seen:
                    note.seen.append(at.values)
        return True


def _known_at(note: Note, at: At) -> tuple[list[Any], list[TensorSpec], list[Tensor]] | None:
    """The note's numbers and results for these sizes."""
    if note.number not in at.known and note.for_all is not None:
        at.known[note.number] = note.for_all.at(at)
    return at.known.get(note.number)


def moved(note: Note, at: At | None) -> bool:
    """Set a note's numbers to those for these sizes. Returns whether they are known."""
    if at is None or note.for_all is None:
        return at is not None and note.at is not None and note.at.values == at.values
    if type(note.for_all) is ByCounts:
        note.at = at
        return True
    found = _known_at(note, at)
    if found is None:
        return False
    numbers, note.specs, moulds = found
    if not note.for_all.is_fixed or len(note.handed) != len(moulds):  # type: ignore[union-attr]
        note.now[:] = numbers
        note.moulds = moulds
        note.handed.clear()
    note.at = at
    return True


def with_sizes(leaf: Any, values: Sequence[Any]) -> Any:
    """A number of a noted call for other sizes, which may be symbols."""
    if type(leaf) is Size:
        return leaf.formula.at(values)
    return torch.Size([with_sizes(n, values) for n in leaf]) if type(leaf) is torch.Size else leaf


def _code(value: Any) -> str:
    if type(value) is Size:
        return str(value.formula)
    if type(value) is torch.Size:
        return f"torch.Size([{', '.join(map(_code, value))}])"
    if type(value) is tuple:
        return f"({''.join(f'{_code(n)}, ' for n in value)})"
    return repr(value)


# ---------------------------------------------------------------------- what other steps show
class _Cursors:
    """Positions of steps with other sizes, as long as they make the same calls.

    Args:
        now: each as its sizes and where it is.
    """

    def __init__(self, now: list[tuple[tuple[int, ...], Note]]) -> None:
        self.now = now
        self.ended = False  # by the last call

    def only(self, sizes: Sequence[tuple[int, ...]]) -> None:
        """Drop the steps that came to another call."""
        self.now = [entry for entry in self.now if entry[0] in sizes]

    def go_on(self, note: Note, before: Note) -> None:
        """The step makes this call, behind another one."""
        found: list[tuple[tuple[int, ...], Note]] = []
        for values, there in self.now:
            at_this = [c for c in there.children if c.for_all is None or values in c.seen]
            found += [(values, child) for child in reversed(at_this) if child is not note and is_like(child, note)][:1]
        for sibling in before.children:
            if sibling is not note and sibling.for_all is not None and is_like(sibling, note):
                known = {values for values, _ in found}
                found += [(values, sibling) for values in sibling.seen if values not in known]
        self.ended, self.now = bool(self.now) and not found, found


def is_like(one: Note, other: Note) -> bool:
    """Whether two notes are the same but for numbers."""
    if (one.func, one.around, one.reads, one.met, one.results) != (
        other.func,
        other.around,
        other.reads,
        other.met,
        other.results,
    ):
        return False
    mine, its = (list(leaves_by_place((note.args, note.kwargs))) for note in (one, other))
    if [place for place, _ in mine] != [place for place, _ in its]:
        return False
    for (_, a), (_, b) in zip(mine, its, strict=True):
        a, b = (int(v) if type(v) is Size else v for v in (a, b))
        if type(a) is not type(b):
            return False
        if type(a) is torch.Size:
            if len(a) != len(b):
                return False
        elif type(a) not in (int, float) and not same_constant(a, b):
            return False
    return True


# ---------------------------------------------------------------------- formulas
def _numbers_in(results: Any) -> list[tuple[type, Any]]:
    """The numbers that a call gives, each with its class: symbols are of another."""
    leaves = (leaf for _, leaf in leaves_by_place(results))
    return [(type(leaf), leaf) for leaf in leaves if isinstance(leaf, int | float) or private.is_symbol(leaf)]


class _Opening:
    """Finds formulas for the numbers of a path.

    Args:
        tree: of the path.
        notes: the path.
        at: its sizes.
        cursors: steps of other sizes.
    """

    def __init__(self, tree: OpenTree, notes: Sequence[Note], at: At, cursors: _Cursors) -> None:
        self._tree, self._notes, self._at, self._cursors = tree, notes, at, cursors
        self._sizes = tree.sizes
        self._place = ""
        self._pool: dict[str, None] = {}

    def run(self, recording: Callable[[Any, list[Any]], Any], numbers: Callable[[Note], Mapping[Place, Any]]) -> None:
        """Find them.

        Raises:
            NotForAllSizes: there are none.
        """
        now = self._cursors.now
        try:
            self._run(recording, numbers, by_python=False)
        except NotForAllSizes as error:
            self._cursors.now = now
            try:
                self._run(recording, numbers, by_python=True)
            except NotForAllSizes:
                raise error from None

    def _run(
        self,
        recording: Callable[[Any, list[Any]], Any],
        numbers: Callable[[Note], Mapping[Place, Any]],
        *,
        by_python: bool,
    ) -> None:
        self._symbols = symbols = private.SymbolicSizes(lambda: self._place)
        self._made = [symbols.symbol(value) for value in self._at.values]
        self._pool = {f"s{i}": None for i in range(len(self._made))}
        mode = private.FakeTensorMode(allow_non_fake_inputs=True, shape_env=symbols.env)
        found: list[tuple[Note, Any, Any, list[Tensor]]] = []
        with private.symbols_as_numbers(by_python=by_python):
            run = recording(mode, [(place, size) for place, size in zip(self._sizes.places, self._made, strict=True)])
            run.values.number = lambda leaf: with_sizes(leaf, self._made)
            before = self._tree.root
            for note in self._notes:
                self._place = note.source
                self._cursors.go_on(note, before)
                if note.for_all is None and self._cursors.ended:
                    self._tree.reason = f"the step makes other calls for other sizes: {note.name}{self._where(note)}"
                before = note
                try:
                    with located_at(note.source):
                        found.append(self._note(note, run, numbers(note)))
                except NotForAllSizes:
                    raise
                except Exception as error:  # whatever torch's code does with what is no plain integer
                    text = str(error).splitlines()[0] if str(error) else type(error).__name__
                    raise NotForAllSizes(f"{note.name} does not run on symbols{self._where(note)}: {text}") from error
            if wanted := symbols.fixed():
                lines = sorted({line for line in wanted.values() if line})
                raise NotForAllSizes("its very size is wanted" + (f" at {', '.join(lines)}" if lines else ""))
            condition = symbols.conditions()
            opened = [self._opened(*entry, condition) for entry in found]
        for (note, args, kwargs, _), for_all in zip(found, opened, strict=True):
            if note.for_all is None:
                note.args, note.kwargs, note.for_all = args, kwargs, for_all
                note.now[:] = [in_step(leaf) for leaf in formulas_in(note).values()]
                note.take, note.trained = None, [fake.requires_grad for fake in note.fakes]

    def _where(self, note: Note) -> str:
        return f" at {note.source}" if note.source else ""

    def _note(self, note: Note, run: Any, numbers: Mapping[Place, Any]) -> tuple[Note, Any, Any, list[Tensor]]:
        """A call with formulas, made on symbols."""
        args, kwargs = note.args, note.kwargs
        if note.for_all is None:
            new = self._leaves(note, run.values)
            args, kwargs = with_numbers((args, kwargs), new)
            numbers = {place: value for place, value in numbers.items() if place not in new}
        with run.active():
            out = run.values.run(note.with_arguments(args, kwargs), numbers)
        made = [run.values.made[m] for m in note.made]
        if _numbers_in(out) != _numbers_in(note.results):  # a plain one is none that symbols give
            raise NotForAllSizes(f"{note.name} gives numbers{self._where(note)}")
        return note, args, kwargs, made

    def _opened(self, note: Note, args: Any, kwargs: Any, made: list[Tensor], condition: str) -> ForAll:
        if note.for_all is not None:
            return note.for_all
        specs = [
            TensorSpec(tuple(map(self._sized, t.shape)), tuple(map(self._sized, t.stride())), s.dtype, s.device)
            for t, s in zip(made, note.specs, strict=True)
        ]
        leaves = [leaf for _, leaf in leaves_by_place((args, kwargs)) if is_formula(leaf)]
        for_all = ForAllSizes(self._sizes, condition, leaves, specs)
        here = for_all.at(self._at)
        if here is None or here[1] != note.specs:
            raise NotForAllSizes(f"{note.name} gives something else when sizes are symbols{self._where(note)}")
        return for_all

    def _sized(self, size: Any) -> int:
        if not private.is_symbol(size):
            return int(size)
        number, code = int(private.seen_value(size)), self._symbols.code(size)
        return number if code is None else Size(number, Formula(code), self._sizes)

    # ------------------------------------------------------------------ of one call
    def _leaves(self, note: Note, values: Values) -> dict[Place, Any]:
        """The numbers of a call that follow from sizes, by place; those that do not are inputs from now on."""
        mine = dict(leaves_by_place((note.args, note.kwargs)))
        others: list[tuple[tuple[int, ...], dict[Place, Any]]] = []
        for sizes, other in self._cursors.now:
            if sizes != self._at.values:
                leaves = leaves_by_place((other.args, other.kwargs))
                others.append((sizes, {place: with_sizes(leaf, sizes) for place, leaf in leaves}))
        points = [self._at.values, *(sizes for sizes, _ in others)]
        near = self._near(note, mine.values(), values)
        found: dict[Place, Any] = {}
        for place, leaf in mine.items():
            kind = type(leaf)
            if kind not in (int, float, torch.Size):
                continue
            column = [leaf, *(leaves[place] for _, leaves in others)]
            if kind is torch.Size:
                parts = [self._fitted(entries, points, near) for entries in zip(*column, strict=True)]
                fitted: Any = None if None in parts else torch.Size(parts)  # type: ignore[arg-type]
            elif kind is float or keeps_shapes(note.func):
                if place in note.plain:
                    self._cursors.only(
                        [s for (s, _), v in zip(others, column[1:], strict=True) if same_constant(v, leaf)]
                    )
                elif not all(same_constant(other, leaf) for other in column[1:]):
                    note.free.add(place)
                continue
            else:
                fitted = self._fitted(column, points, near)
            if is_formula(fitted):
                found[place] = fitted
            elif fitted is None:  # it is what it is, and steps in which it is something else are others
                told = ", ".join(map(str, column))
                self._tree.reason = f"no formula of the sizes gives {told}, in {note.name}{self._where(note)}"
                self._cursors.only([s for (s, _), v in zip(others, column[1:], strict=True) if v == leaf])
        return found

    def _near(self, note: Note, leaves: Iterable[Any], values: Values) -> list[str]:
        """The formulas of the sizes of a call's tensors."""
        found: dict[str, None] = {}
        for leaf in leaves:
            tensor = values.of(leaf) if isinstance(leaf, SOURCES) else None
            for size in () if tensor is None else tensor.shape:
                code = self._symbols.code(size) if private.is_symbol(size) else None
                if code is not None:
                    found[code] = None
        self._pool.update(found)
        return list(found)

    def _fitted(self, column: Sequence[int], points: Sequence[tuple[int, ...]], near: list[str]) -> int | None:
        """The number itself if it is equal in all steps, else a formula that fits; None if there is none."""
        number = column[0]
        if all(other == number for other in column):
            if number < 2:
                return number
            for code in near:
                if self._values(code, points) == list(column):
                    return Size(number, Formula(code), self._sizes)
            return number
        codes = dict.fromkeys([*near, *self._pool])
        tables = {code: self._values(code, points) for code in codes}
        for formula in candidates(tables, column):
            return Size(number, formula, self._sizes)
        return None

    def _values(self, code: str, points: Sequence[tuple[int, ...]]) -> list[int]:
        return [self._sizes.evaluate(Formula(code), point) for point in points]


def candidates(tables: Mapping[str, list[int]], column: Sequence[int]) -> Iterable[Formula]:
    """Formulas that give a number in all steps that were seen, the plainest first.

    Args:
        tables: values of formulas that are known in these steps.
        column: the number.
    """
    known = {code: table for code, table in tables.items() if 0 not in table and len(set(table)) > 1}
    for code, table in known.items():
        if table == list(column):
            yield Formula(code)
    pairs = [(a, b) for a in known for b in known]
    products = {f"({a}) * ({b})": [x * y for x, y in zip(known[a], known[b], strict=True)] for a, b in pairs}
    for some in (known, products):
        for code, table in some.items():
            ratios = {Fraction(v, k) for v, k in zip(column, table, strict=True)}
            if len(ratios) == 1:
                ratio = ratios.pop()
                yield Formula(code, (ratio.numerator, ratio.denominator))
        for code, table in some.items():
            differences = {v - k for v, k in zip(column, table, strict=True)}
            if len(differences) == 1:
                yield Formula(f"({code}) + {differences.pop()}")
        for code, table in some.items():
            sums = {v + k for v, k in zip(column, table, strict=True)}
            if len(sums) == 1:
                yield Formula(f"{sums.pop()} - ({code})")
    for a, b in pairs:
        if all(x - y == v for v, x, y in zip(column, known[a], known[b], strict=True)):
            yield Formula(f"({a}) - ({b})")
    for code, table in known.items():
        if (line := _line(table, column)) is not None:
            yield Formula(f"({code}) * {line[0]} + {line[1]}")
        for divisor in _DIVISORS:
            for add in sorted(range(-divisor, divisor + 1), key=abs):
                if all((k + add) // divisor == v for v, k in zip(column, table, strict=True)):
                    yield Formula(f"(({code}) + {add}) // {divisor}")
        for divisor in (*_DIVISORS, 20, 32, 64, 100, 128):
            for rounded in _ROUNDED:
                if all(Formula(rounded.format("s0", divisor)).at([k]) == v for v, k in zip(column, table, strict=True)):
                    yield Formula(rounded.format(code, divisor))
            for factor in range(2, divisor):
                if all(k * factor // divisor == v for v, k in zip(column, table, strict=True)):
                    yield Formula(f"({code}) * {factor} // {divisor}")


def _line(table: Sequence[int], column: Sequence[int]) -> tuple[int, int] | None:
    """The factor and what is added, where numbers are on a line."""
    a, b = next(((i, j) for i, k in enumerate(table) for j, m in enumerate(table) if k != m), (0, 0))
    if a == b or (column[a] - column[b]) % (table[a] - table[b]):
        return None
    factor = (column[a] - column[b]) // (table[a] - table[b])
    added = column[a] - factor * table[a]
    return (factor, added) if all(factor * k + added == v for v, k in zip(column, table, strict=True)) else None
