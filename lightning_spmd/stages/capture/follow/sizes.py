"""Steps of batches whose sizes vary: one tree of notes for all sizes, which are the first counts of a step.

Python runs with the true sizes, so a formula is never trusted: its value for a step is compared with what Python
passes, and a call that does not fit is another call. Only the sizes of results are given to Python
(``count_formulas.py``). They are looked for once a step of another size has made the same calls.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from lightning_spmd.ir.sizes import Dimension, Formula, Size, Sizes
from lightning_spmd.stages.capture.follow.matching import keeps_shapes, same_constant
from lightning_spmd.stages.capture.follow.notes import Note, Place, leaf_at, leaves_by_place

_REMEMBERED = 16
"""Sizes that are kept."""
_SAMPLES = 4
"""Sizes at which a path was seen that are kept."""
_FAILURES = 2
"""After this many paths that are for one size alone each size has a tree of its own."""
_DIVISORS = range(2, 17)
_ROUNDED = ("({0}) // {1} * {1}", "-(-({0}) // {1}) * {1}", "({0}) % {1}", "-({0}) % {1}")
"""To a multiple, and what is left or lacks."""

_NUMBERS = (int, Size, torch.Size)

Other = tuple[tuple[int, ...], Note]
"""A note of steps with other sizes of the batch, which its own counts come behind; none where they are among these."""


class OpenTree:
    """The steps with batches that are alike but for some sizes.

    Args:
        places: these sizes.

    Attributes:
        root: the beginning of all of them.
        reason: why the last path that is for one size alone is.
    """

    def __init__(self, places: Sequence[Dimension]) -> None:
        self.sizes = Sizes(places)
        self.root = Note(-1)
        self.root.marked(self.root)
        self.reason: str | None = None
        self._pinned: set[int] = set()
        self._known: OrderedDict[tuple[int, ...], None] = OrderedDict()
        self._confirmed: dict[int, set[tuple[int, ...]]] = {}

    @property
    def known(self) -> list[tuple[int, ...]]:
        """Some of the sizes of its steps."""
        return list(self._known)

    @property
    def has_failed(self) -> bool:
        """Whether each size has a tree of its own."""
        return len(self._pinned) >= _FAILURES and not self.are_confirmed

    def begin(self, given: Sequence[Tensor]) -> tuple[int, ...]:
        """A step with these tensors of the batch begins. Returns the sizes."""
        values = self.sizes.of(given)
        self._known[values] = None
        self._known.move_to_end(values)
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        return values

    def is_for_all(self, path: int) -> bool:
        """Whether a path has formulas, and was seen with more than one size."""
        return path not in self._pinned and len(self._confirmed.get(path, ())) > 1

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
        return self.reason if len(self._confirmed) > 1 and not self.are_confirmed else None

    @property
    def are_confirmed(self) -> bool:
        """Whether some path was seen with more than one size."""
        return any(len(seen) > 1 for seen in self._confirmed.values())

    def alone(self, path: int, values: tuple[int, ...], reason: str) -> None:
        """End a step whose calls no step of other sizes has made; not even to look for formulas is of use.

        Args:
            path: its number.
            values: the sizes.
            reason: why it is for these alone.
        """
        self._confirmed.setdefault(path, set()).add(values)
        self.reason = reason

    def ended(
        self, notes: Sequence[Note], path: int, values: tuple[int, ...], others: Iterable[tuple[int, ...]] = ()
    ) -> None:
        """End a step.

        Args:
            notes: the path.
            path: its number.
            values: the sizes.
            others: sizes of other steps that have made its calls with the numbers of its formulas.
        """
        seen = self._confirmed.setdefault(path, set())
        if len(seen) >= _SAMPLES:
            return
        seen.update((values, *others))
        sizes = set(range(len(values)))
        for note in notes if path not in self._pinned else ():
            if note.pins.keys() & sizes:
                place = f" at {note.source}" if note.source else ""
                self._pinned.add(path)
                self.reason = f"its very size is wanted by {note.name}{place}"


class Companions:
    """Steps that make the calls of a path with other numbers, as long as they do.

    Args:
        others: the roots of steps with other sizes of the batch.
        before: the last call that is known for all counts, behind which steps on other paths are looked at; None if
            none are.
        all_calls: those that have made no call behind it for themselves, or have not come to their end, are none.
    """

    def __init__(self, others: Iterable[Other], before: Note | None, *, all_calls: bool = True) -> None:
        self.now = [(sizes, note, dict[int, int]()) for sizes, note in others]
        self._branches = [] if before is None else [before]
        self._all_calls = all_calls

    def go_on(self, note: Note) -> None:
        """The path goes on with a call."""
        if self._branches and note.depth > self._branches[-1].depth:
            self.now.append(((), self._branches[-1], {}))
            self._branches = [] if self._all_calls else [note]
        self.now = [
            (sizes, child, told | {i: int(leaf_at((child.args, child.kwargs), at)) for at, i in note.told.items()})
            for sizes, before, told in self.now
            for child in before.children
            if child is not note and (sizes or child.seen or not self._all_calls) and is_like(child, note)
        ]

    def seen(self, known: int) -> Iterator[tuple[tuple[int, ...], Mapping[Place, Any]]]:
        """Counts of steps with the call that they came to, and the leaves of its arguments.

        Args:
            known: how many counts are known there.
        """
        for sizes, note, told in self.now:
            leaves = list(leaves_by_place((note.args, note.kwargs)))
            for seen in note.seen or [()]:
                if len(sizes) + len(seen) == known:
                    yield (*sizes, *seen), {place: with_sizes(leaf, seen) for place, leaf in leaves}
            first = (*sizes, *note.seen[0]) if note.seen else sizes
            # what this path is told as a count is a number like others on that one
            counts = [
                told.get(i, first[i] if i < min(told) <= len(first) else None) for i in range(known if told else 0)
            ]
            if counts and len(first) != known and all(count is not None for count in counts):
                yield tuple(counts), {place: _as_noted(leaf) for place, leaf in leaves}  # type: ignore[arg-type]

    def only_as(self, note: Note, known: int) -> None:
        """Drop the steps that gave this call other numbers than its formulas.

        Args:
            note: the call.
            known: how many counts are known there.
        """
        if keeps_shapes(note.func):
            return
        numbers = [(place, leaf) for place, leaf in leaves_by_place((note.args, note.kwargs)) if type(leaf) in _NUMBERS]
        mine = [(place, leaf) for place, leaf in numbers if place not in note.free]

        def is_as(one: tuple[tuple[int, ...], Note, dict[int, int]]) -> bool:
            alone = Companions((), None)
            alone.now = [one]
            return any(all(its.get(p) == with_sizes(n, counts) for p, n in mine) for counts, its in alone.seen(known))

        self.now = list(filter(is_as, self.now))

    def sizes(self, opened: int) -> set[tuple[int, ...]]:
        """The sizes of the batches of these steps.

        Args:
            opened: how many sizes vary.
        """
        return {sizes or seen[:opened] for sizes, note, _ in self.now for seen in note.seen or [()]} - {()}


def with_sizes(leaf: Any, values: Sequence[Any]) -> Any:
    """A number of a noted call for other sizes, which may be symbols."""
    if type(leaf) is Size:
        return leaf.formula.at(values)
    return torch.Size([with_sizes(n, values) for n in leaf]) if type(leaf) is torch.Size else leaf


def _as_noted(leaf: Any) -> Any:
    """A number of a noted call, as Python passed it."""
    return int(leaf) if type(leaf) is Size else torch.Size(map(int, leaf)) if type(leaf) is torch.Size else leaf


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


def candidates(tables: Mapping[str, list[int]], column: Sequence[int]) -> Iterable[Formula]:
    """Formulas that give a number in all steps that were seen, the plainest first.

    Args:
        tables: values of formulas that are known in these steps.
        column: the number.
    """
    # what symbols tell may divide by nothing in a step that was seen
    known = {code: t for code, t in tables.items() if 0 not in t and None not in t and len(set(t)) > 1}
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
