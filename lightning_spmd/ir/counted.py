"""One graph for all counts that data say (``x[mask]``, ``nonzero``): formulas of its numbers, found by their values.

A graph is made for a few sets of counts that no step had, primes that are far from each other and from all sizes of
a model. A number of it that is another one in each is a multiple of a count, a sum of counts that follow each other, or
a product of two, with a number added. Nothing else is looked for.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from torch import fx

from lightning_spmd.ir.first import first
from lightning_spmd.ir.reads import HandOver
from lightning_spmd.ir.sizes import Condition, Counts, Formula, Size, SizeFloat, compiled, mapped
from lightning_spmd.ir.steps import ShardedStep
from lightning_spmd.ir.unify import Apart, Fits, joined

GRAPHS = 3
"""So many graphs are compared."""
_LARGEST_ADDED = 1 << 16
_DIVISORS = range(2, 17)
_TRIES = 200
"""Tries for each other set of counts."""
_OTHERS = 24
"""Sets of counts with which formulas are told apart."""
_HARDLY_ANY = "hardly any other number of rows or elements is treated alike"
_SCALE_OF_PARTS = 10007
"""Beyond the samples of the counts themselves, for a few hundred of them."""
_DRAWS = 2000
"""Tries for each set of counts of which graphs are made."""
_PATIENCE = 30
"""So many for each count without less missing end the search for what is asked of samples alone."""

Ties = Mapping[int, Formula]
"""Counts that follow from others in all steps, with how."""
_NONE: Ties = {}


@functools.lru_cache(maxsize=256)
def samples_of(number: int, scale: int = 101, seed: int = 0) -> tuple[tuple[int, ...], ...]:
    """Sets of counts, far from each other; in the first they rise and in the second they fall.

    What depends on which of two is larger, as the length of ``pad_sequence`` does, has no formula in both. What is
    rounded in a division has none in the first three.

    Args:
        number: of counts.
        scale: about the least of them.
        seed: another one gives other sets.
    """
    rows = GRAPHS + 1
    # multiples may be treated in a way of their own: by kernels, and where a part that is one is the whole
    plain = [
        n
        for n in range(scale, scale + (32 << 2 * (seed // 6)) * rows * number)
        if all(n % divisor for divisor in (3, 4, 5, 7))
    ]
    chosen = random.Random(seed).sample(plain, rows * number)
    sets = [chosen[row * number : (row + 1) * number] for row in range(rows)]
    sets[0].sort()
    sets[1].sort(reverse=True)
    used = set(chosen)
    for i, (one, other, third) in enumerate(zip(*sets[:3], strict=True)):
        if not _differ_in_rests(one, other, third):
            sets[2][i] = first((n for n in plain if n not in used and _differ_in_rests(one, other, n)), "other rests")
            used.add(sets[2][i])
    return tuple(map(tuple, sets))


def _differ_in_rests(*numbers: int) -> bool:
    return all(len({n % divisor for n in numbers}) > 1 for divisor in _DIVISORS)


def samples_within(
    number: int,
    pins: Mapping[int, int],
    conditions: Iterable[Formula],
    ties: Ties = _NONE,
    seed: int = 0,
    others: Collection[int] = (),
    alike: Collection[Sequence[int]] = (),
    before: Sequence[tuple[int, ...]] = (),
    among: Collection[int] | None = None,
) -> list[tuple[int, ...]]:
    """Such sets of counts that fulfill conditions, changed one by one, at random, until they do.

    What is asked of samples beside the conditions is given up where it cannot be had: equal counts would be one number
    of a graph, and so would a count and another size.

    Args:
        number: of counts.
        pins: those that have one value in all sets.
        conditions: which they fulfill.
        ties: counts that follow from others.
        seed: another one gives other sets.
        others: sizes that are no counts.
        alike: groups of counts of which equal ones are one number of a graph most likely.
        before: sets to begin with, if not those of the seed.
        among: the counts that are changed, if not all.

    Raises:
        Apart: there are hardly any.
    """
    ties = {i: formula for i, formula in ties.items() if i not in pins}
    conditions = list(dict.fromkeys(conditions))
    draws, found = random.Random(seed), list[tuple[int, ...]]()
    free = [i for i in range(number) if i not in pins and i not in ties]
    apart, groups = _of_their_own(number, pins, ties), [group for group in alike if len(group) > 1]
    unmet, changing = _unmet(conditions), [i for i in range(number) if i not in pins]
    taken = [(i, set[int]()) for i in free]
    alike_so_far: list[tuple[int, int, int]] = []

    def missed(counts: Sequence[int]) -> tuple[int, int]:
        """How much is not as it must be, and if nothing is, how much not as it should be."""
        needed = sum(unmet(counts))
        for i in changing:
            needed += counts[i] < 2
        again = 0
        for i, its in taken:
            again += counts[i] in its
        if len(found) < GRAPHS:  # which are compared with each other
            needed += again
        if needed:
            return needed, 0
        different = {counts[i] for i in apart}
        rests = {i for i, divisor, rest in alike_so_far if counts[i] % divisor == rest}
        merged = sum(len(group) - len({counts[i] for i in group}) for group in groups)
        equal = len(apart) - len(different) + 2 * merged
        return 0, again + len(rests) + 2 * equal + len(different.intersection(others))

    for likely in before or samples_of(number, seed=seed):
        if len(found) == GRAPHS - 1:
            alike_so_far = [
                (i, d, found[0][i] % d) for i in free for d in _DIVISORS if len({s[i] % d for s in found}) == 1
            ]
        elif len(found) == GRAPHS:
            alike_so_far = []
        for i, its in taken:
            its.update(one[i] for one in found)
        counts, lacks = _changed(likely, pins, ties, draws, conditions, unmet, missed, _DRAWS, among)
        if lacks[0]:
            raise Apart(_HARDLY_ANY)
        found.append(tuple(counts))
    return found


def _of_their_own(number: int, pins: Mapping[int, int], ties: Ties) -> list[int]:
    """The counts that differ from others in some steps."""
    same = {f"s{i}" for i in range(number)}
    return [i for i in range(number) if i not in pins and not (i in ties and str(ties[i]) in same)]


def _changed(
    likely: Sequence[int],
    pins: Mapping[int, int],
    ties: Ties,
    draws: random.Random,
    conditions: Sequence[Formula],
    unmet: Callable[[Sequence[int]], list[bool]],
    missed: Callable[[Sequence[int]], tuple[int, int]],
    tries: int,
    among: Collection[int] | None = None,
) -> tuple[list[int], tuple[int, int]]:
    """Counts with what they miss, where one after the other was changed for as long as that left no more missing.

    Args:
        likely: to begin with.
        pins: those that are not changed.
        ties: those that follow from others.
        draws: chooses.
        conditions: what is about those that are not fulfilled is changed first.
        unmet: which these are.
        missed: how much is not as it must be, and how much not as it should be.
        tries: to have all that must be.
        among: the counts that are changed, if not all.
    """
    counts, those = with_ties(likely, pins, ties), range(len(likely)) if among is None else among
    free = [i for i in those if i not in pins and i not in ties]
    names = [formula.names().intersection(free) for formula in conditions]
    lacks, about, patience = missed(counts), list[int](), 0
    is_new = True
    for _ in range(tries if free else 0):
        if lacks == (0, 0) or patience > _PATIENCE * len(free):
            break
        if is_new and lacks[0]:
            about = [i for some, lacks_it in zip(names, unmet(counts), strict=True) if lacks_it for i in some]
        elif is_new:
            about = [i for i in free if counts.count(counts[i]) > 1]
        moved = list(counts)
        for _ in range(draws.choice((1, 1, 2))):  # of what is rounded two must be others at once
            i = draws.choice(about if about and draws.random() < 0.8 else free)
            size, near = round(2 ** draws.uniform(1, draws.uniform(1.5, 9))), counts[i] + draws.randint(-3, 3)
            moved[i] = draws.choice((likely[i], max(2, near), size))
        moved = with_ties(moved, pins, ties) if ties else moved
        found = missed(moved)
        patience = 0 if lacks[0] or found < lacks else patience + 1
        if is_new := found <= lacks:
            counts, lacks = moved, found
    return counts, lacks


def _unmet(conditions: Sequence[Formula]) -> Callable[[Sequence[int]], list[bool]]:
    """Which conditions some counts do not fulfill."""
    each = compiled(Formula(f"[{', '.join(f'not ({condition})' for condition in conditions)}]"))

    def unmet(counts: Sequence[int]) -> list[bool]:
        try:
            return each(counts)
        except ZeroDivisionError:
            return [True] * len(conditions)

    return unmet


def with_ties(counts: Sequence[Any], pins: Mapping[int, int], ties: Ties) -> list[Any]:
    """Counts, those that follow from others with what follows.

    Args:
        counts: numbers or symbols.
        pins: those that have one value.
        ties: those that follow from others.
    """
    found = [pins.get(i, count) for i, count in enumerate(counts)]
    rest = {i: formula for i, formula in ties.items() if i not in pins and i < len(found)}
    while rest:
        known = first((i for i, formula in rest.items() if rest.keys().isdisjoint(formula.names())), "tie")
        found[known] = rest.pop(known).at(found)
    return found


def tie_of(condition: Condition, number: int, told: Collection[int] = ()) -> tuple[int, Formula] | None:
    """The count that follows from others if a condition holds, and how; None if it does not say so.

    Args:
        condition: ``s0 == s1 + s2``.
        number: of counts. The last one of the condition follows, so that where it is known all others are.
        told: those that Python tells, which may also follow from numbers: the parts of a tensor of one size.
    """
    sides = condition.formula.code.split(" == ")
    if len(sides) != 2 or condition.formula.factor != (1, 1):
        return None
    names = sorted(condition.formula.names())
    difference, draws, last = Formula(f"({sides[0]}) - ({sides[1]})"), random.Random(0), condition.last
    rest = difference.at([0] * number) or 0
    if len(names) < 2 or (rest and last not in told):
        return None  # a number beside them may be a count of this step that was taken for a constant
    for one, other in (sides, reversed(sides)):
        if one == f"s{last}" and last not in Formula(other).names():
            return last, Formula(other)
    factors = {i: (difference.at([int(i == j) for j in range(number)]) or 0) - rest for i in names}
    points = [[draws.randrange(2, 1000) for _ in range(number)] for _ in range(8)]
    if any(difference.at(p) != rest + sum(f * p[i] for i, f in factors.items()) for p in points):
        return None  # more than a sum
    below = -factors.pop(last)
    if not below or any(f % below for f in (*factors.values(), rest)):
        return None
    terms = [f"s{i}" if f == below else f"{f // below}*s{i}" for i, f in factors.items()]
    return last, Formula(" + ".join([*terms, *([str(rest // below)] if rest else [])]))


def are_fixed(condition: Condition, number: int) -> bool:
    """Whether counts together are a constant (``s0 + s1 == 20``), which may be numbers of the step that were not known.

    Args:
        condition: of counts.
        number: of these.
    """
    sides = condition.formula.code.split(" == ")
    return len(sides) == 2 and bool(Formula(f"({sides[0]}) - ({sides[1]})").at([0] * number))


def mixed(
    number: int, sets: int, pins: Mapping[int, int], ties: Ties, conditions: Iterable[Formula] = ()
) -> list[list[int]]:
    """Sets of counts, small and large ones in all orders.

    Args:
        number: of counts.
        sets: how many.
        pins: those that have one value in all sets.
        ties: counts that follow from others.
        conditions: that they fulfill; there are fewer if hardly any do.
    """
    return list(map(list, _mixed(number, sets, tuple(pins.items()), tuple(ties.items()), tuple(conditions))))


@functools.lru_cache(maxsize=64)  # formulas are told apart one after the other
def _mixed(
    number: int,
    sets: int,
    pins: tuple[tuple[int, int], ...],
    ties: tuple[tuple[int, Formula], ...],
    conditions: tuple[Formula, ...],
) -> list[list[int]]:
    found, unmet = list[list[int]](), _unmet(conditions)

    def missed(counts: Sequence[int]) -> tuple[int, int]:
        return sum(unmet(counts)) + (counts in found), 0

    for draws in map(random.Random, range(2 * sets)):
        largest = draws.uniform(1.5, 9) if conditions else 9  # small ones all at once fulfill most of them
        likely = [round(2 ** draws.uniform(1, largest)) for _ in range(number)]
        counts, lacks = _changed(likely, dict(pins), dict(ties), draws, conditions, unmet, missed, _TRIES)
        if not lacks[0]:
            found.append(counts)
        if len(found) == sets:
            break
    return found


def told_apart(
    formulas: Iterable[tuple[int, Formula]],
    samples: Sequence[Sequence[int]],
    pins: Mapping[int, int],
    ties: Ties,
    conditions: Sequence[tuple[int, Formula]] = (),
) -> bool:
    """Whether the samples tell formulas apart, as ``(s0 + s1) // 2`` and ``(s0 + s1 + 1) // 2``, and from constants.

    Args:
        formulas: all of them, each with the depth of its call.
        samples: the counts for which graphs are made.
        pins: counts that have one value in all steps.
        ties: counts that follow from others.
        conditions: that steps fulfill from a depth on: formulas are one there if they are the same number for all that
            do. Samples fulfill those of all calls; formulas of calls before are for other counts as well.
    """
    known: dict[tuple[int | None, ...], Formula] = {}
    stated = {str(condition) for _, condition in conditions}
    for depth, formula in sorted(formulas, key=lambda pair: pair[0]):
        values = tuple(formula.at(sample) for sample in samples[:GRAPHS])
        if len(set(values)) == 1 and not is_stated(formula, values[0], stated) and formula.names() - pins.keys():
            known.setdefault(values, Formula(str(values[0])))
        other = known.setdefault(values, formula)
        if other is formula:
            continue
        asked = [condition for at, condition in conditions if at <= depth]
        others = mixed(len(samples[0]), _OTHERS, pins, ties, asked)
        if len(others) < _OTHERS // 2:
            others = mixed(len(samples[0]), _OTHERS, pins, ties)
        if any(formula.at(counts) != other.at(counts) for counts in others):
            return False
    return True


def is_stated(formula: Formula, value: int | None, conditions: Collection[str]) -> bool:
    """Whether conditions say that a formula has one value in all steps."""
    return f"{formula} == {value}" in conditions or f"({formula}) == {value}" in conditions


def rests_alike(
    formulas: Iterable[Formula], samples: Sequence[Sequence[int]], pins: Mapping[int, int], ties: Ties
) -> int:
    """Of how many formulas halves, thirds or quarters would be on a line in the graphs, though they are not."""
    others, found = mixed(len(samples[0]), _OTHERS, pins, ties), 0
    for formula in formulas:
        here, there = ([formula.at(sample) for sample in some] for some in (samples[:GRAPHS], others))
        if all(type(n) is int for n in (*here, *there)):
            found += any(len({n % d for n in here}) == 1 < len({n % d for n in there}) for d in (2, 3, 4))
    return found


def with_parts(samples: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Sets of counts, each with as many numbers behind it: how many of each this rank holds where ranks hold parts."""
    number = len(samples[0])
    parts = samples_of(number, _SCALE_OF_PARTS)
    return [(*sample, *own) for sample, own in zip(samples, parts, strict=False)]


class CountFits(Fits):
    """Finds the formula of a number, given its value in each sample.

    Args:
        counts: of the graph.
        samples: the counts for which each was made.
        rounds: quotients are looked for, too: what is found is compared for other counts, or known to be no other.
    """

    def __init__(self, counts: Counts, samples: Sequence[tuple[int, ...]], *, rounds: bool = False) -> None:
        super().__init__(counts, samples, self._of_whole_numbers)
        self.counts = counts
        self._columns, self._rounds = list(zip(*samples, strict=True)), rounds
        self._sums: dict[tuple[Fraction, ...], tuple[int, int]] | None = None
        self._learned: dict[tuple[int, ...], Formula] = {}

    def learn(self, formula: Formula) -> None:
        """Know a formula that may be of another kind than those that are looked for."""
        self._learned.setdefault(tuple(formula.at(sample) for sample in self.samples), formula)

    def _of_whole_numbers(self, values: tuple[int, ...]) -> Formula | str:
        found = self._learned.get(values) or self._of_one(values) or self._of_a_sum(values) or self._of_two(values)
        found = found or (self._of_a_quotient(values) if self._rounds else None)
        return found or f"no formula of the counts gives {values}"

    def _of_one(self, values: tuple[int, ...]) -> Formula | None:
        by_addition: Formula | None = None
        counts = [(column, f"s{i}") for i, column in enumerate(self._columns)]
        for column, code in itertools.chain(counts, ((c, str(f)) for c, f in self._learned.items())):
            found = _linear(values, column, code)
            if found is not None and found[1] == 0:
                return found[0]
            by_addition = by_addition or (None if found is None else found[0])
        return by_addition

    def _of_two(self, values: tuple[int, ...]) -> Formula | None:
        known = [(column, f"s{i}") for i, column in enumerate(self._columns)]
        known += [(column, f"({formula})") for column, formula in self._learned.items() if all(column)]
        for (one, code), (other, its) in itertools.combinations_with_replacement(known, 2):
            product = tuple(a * b for a, b in zip(one, other, strict=True))
            found = _linear(values, product, f"{code} * {its}")
            if found is not None:
                return found[0]
        places = dict(known)
        for column, code in known:  # an end, or what is left
            for rest, sign in ((zip(values, column, strict=True), "+"), (zip(column, values, strict=True), "-")):
                if (other := places.get(tuple(a - b for a, b in rest))) is not None:
                    return Formula(f"{code} {sign} {other}")
        for i, column in enumerate(self._columns):  # pairs of rows
            for added in (1, -1):
                product = tuple(n * (n + added) for n in column)
                if (found := _linear(values, product, f"s{i} * (s{i} + {added})")) is not None:
                    return found[0]
        return None

    def _of_a_quotient(self, values: tuple[int, ...]) -> Formula | None:
        for (i, column), divisor in itertools.product(enumerate(self._columns), _DIVISORS):
            for added in range(-2 * divisor, 2 * divisor + 1):
                if all((n + added) // divisor == value for n, value in zip(column, values, strict=True)):
                    return Formula(f"(s{i} + {added}) // {divisor}")
        return None

    def _of_a_sum(self, values: tuple[int, ...]) -> Formula | None:
        if self._sums is None:
            self._sums = {}
            for i in range(len(self._columns)):
                total = list(self._columns[i])
                for j in range(i + 1, len(self._columns)):
                    total = [a + b for a, b in zip(total, self._columns[j], strict=True)]
                    self._sums.setdefault(_direction(total), (i, j))
        pair = self._sums.get(_direction(values))
        if pair is None:
            return None
        i, j = pair
        totals = tuple(sum(row[i : j + 1]) for row in self.samples)
        found = _linear(values, totals, "(" + " + ".join(f"s{k}" for k in range(i, j + 1)) + ")")
        return None if found is None else found[0]


def _direction(values: Sequence[int]) -> tuple[Fraction, ...]:
    """What is the same of numbers that differ by a factor and what is added."""
    first, *rest = [b - a for a, b in zip(values, values[1:], strict=False)]
    return tuple(Fraction(r, first) for r in rest) if first else ()


def _linear(values: Sequence[int], known: Sequence[int], code: str) -> tuple[Formula, int] | None:
    """A number as a multiple of another one, and what is added."""
    other = next((i for i, number in enumerate(known) if number != known[0]), None)
    if other is None:
        return None
    factor = Fraction(values[other] - values[0], known[other] - known[0])
    added = values[0] - factor * known[0]
    if (
        factor == 0
        or added.denominator != 1
        or any(factor * k + added != v for k, v in zip(known, values, strict=True))
    ):
        return None
    if added == 0:
        return Formula(code, (factor.numerator, factor.denominator)), 0
    if factor.denominator != 1 or abs(added) > _LARGEST_ADDED:
        return None
    return Formula(f"(({code}) * {factor.numerator} + {added.numerator})"), added.numerator


def for_all_counts(steps: Sequence[ShardedStep], fits: CountFits) -> ShardedStep:
    """One graph for all counts.

    Args:
        steps: graphs of one captured step.
        fits: finds formulas.

    Raises:
        Apart: they have no common form.
    """
    step = joined(steps, fits)
    _check_order(step.graph_module.graph, {*range(fits.counts.opened), *fits.counts.told})
    return step


def _check_order(graph: fx.Graph, known: set[int]) -> None:
    """Raise if a number is needed before what it follows from is counted.

    Args:
        graph: the graph.
        known: the counts that are known when it begins, with those that Python tells behind reads.

    Raises:
        Apart: it is.
    """
    known -= {i for node in graph.nodes if isinstance(node.target, HandOver) for i in node.target.counted()}
    for node in graph.nodes:
        needed: list[Size | SizeFloat] = []
        mapped(needed.append, (node.args, node.kwargs))
        if any(not number.formula.names() <= known for number in needed):
            raise Apart(f"{node.name} comes before its size is counted")
        if isinstance(node.target, HandOver):
            known.update(node.target.counted())
