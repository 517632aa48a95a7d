"""What calls give for other data-dependent sizes than those with which they were noted.

A new path is made again on fake tensors with a few other counts, and once with symbols for counts. A number of Python's
that is as large as something of the step is taken for a formula, and is one if the path can be made with it for all of
these counts; in other steps what Python passes is compared with it. The sizes of results are formulas that fit their
values. What torch decided with symbols, in calls and in the loss's backward pass, says for which counts all that holds;
what a call returns, and whether it draws, must be for all of them what it was for those of the step.
"""

from __future__ import annotations

import functools
import itertools
import types
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from lightning_spmd import _private_api as private
from lightning_spmd.ir.counted import (
    GRAPHS,
    CountFits,
    Ties,
    are_fixed,
    is_stated,
    mixed,
    rests_alike,
    samples_within,
    tie_of,
    told_apart,
    with_ties,
)
from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.ir.sizes import Condition, Counts, Formula, Size
from lightning_spmd.ir.unify import Apart
from lightning_spmd.stages.capture.follow.counts import (
    compiled_specs,
    counts_in,
    formulas_of,
    pins_of,
    sizes_in,
    specs_for,
    tied,
    ties_of,
    told_in,
)
from lightning_spmd.stages.capture.follow.matching import keeps_shapes, same_constant
from lightning_spmd.stages.capture.follow.notes import (
    Given,
    Made,
    Note,
    Place,
    Source,
    formulas_in,
    is_formula,
    leaves_by_place,
    sized,
    sources_in,
    with_numbers,
)
from lightning_spmd.stages.capture.follow.recorder import first_line
from lightning_spmd.stages.capture.follow.sizes import Companions, candidates
from lightning_spmd.stages.capture.follow.step_state import StepState
from lightning_spmd.stages.capture.follow.told import (
    does_for_all,
    does_for_one,
    in_vain,
    told_from_now_on,
    waits_for_reads,
)
from lightning_spmd.stages.capture.follow.trial_runs import LIKE, OTHER_SIZES, Likeness, OnSymbols, Run, at_counts
from lightning_spmd.stages.capture.follow.whole_slices import SliceNumbers

_FAILED = object()
_MORE = 16
"""Sets of counts with which calls are tried that do not run on symbols."""
_SMALL = (2, 3, 4, 6, 9)
"""Sizes of batches with which these are tried as well."""
_FAR = 512
"""Up to where sizes of batches are tried so; of long ones up to eight times as far. Beyond there is another path."""
_SEEDS, _FEW_SEEDS = 24, 6
"""Sets of samples that are tried until formulas can be told apart."""
_NEARBY = 5
"""So many tries begin with the samples before. All but the last change only the counts that are to be others."""
_GOOD = 4
"""Of so many that tell them apart the one is taken in which the fewest rests are alike."""
_MOST_DECIDED = 4
"""Calls in which torch decides on counts as for hardly any others, before there is a path for these counts."""
_MOST_ASKED = 6
"""Tries to ask symbols for all that torch decides in a path: some ask for Python's implementations, or tie counts."""
_MOST_PINNED = 4
"""Numbers that Python tells for which alone there may be a path: one for more of them is hardly ever taken again."""
_MOST_AVOIDED = 16
"""Counts that samples do without for one call."""


_TOO_MANY_TRIES = "its numbers depend on those of rows or elements in too many ways"


class _Again(Exception):
    """Control flow: the path is to be made with other numbers or other counts."""


class _Pinned(Exception):
    """Control flow: a call has no form for other counts.

    Args:
        depth: of the call.
        reason: why.
        is_behind: the backward pass of what it gives has none.
        counts: those on which that depends, if not on all that the call meets.
    """

    def __init__(self, depth: int, reason: str, *, is_behind: bool = False, counts: Iterable[int] = ()) -> None:
        super().__init__(reason)
        self.depth, self.reason, self.is_behind, self.counts = depth, reason, is_behind, set(counts)


@dataclass
class _Found:
    """What was found of one call.

    Args:
        numbers: of its arguments that are formulas.
        specs: of its results, with formulas; None if they are the same for all counts.
        conditions: under which all that holds.
    """

    numbers: dict[Place, Any]
    specs: list[TensorSpec] | None
    conditions: list[Condition]


def companions_of(step: StepState, first_new: int) -> Companions:
    """Steps of which some may have made the calls of a step.

    Args:
        step: the step.
        first_new: the depth of its first call that no step made before.
    """
    others = () if step.tree is None else step.follower.others(step.tree.sizes.places)
    before = step.notes[first_new - 1] if first_new else step.root
    return Companions(others, before, all_calls=step.tree is not None)


class CountFormulas:
    """Finds formulas for the new calls of one step.

    Args:
        step: the step; Python is done.

    Attributes:
        tried: how many choices of numbers a call was tried with, by depth.
        conditions: that samples must fulfill, by depth.
        usual: conditions on samples alone, by depth; None if they leave hardly any.
        ties: counts that must follow from others, by depth.
        skips: calls before the first count are taken for made.
        by_python: torch's implementations in Python go first with symbols: some in C++ take plain integers alone.
        formulas: that were met, and are to be told apart, with the depth where they were.
        dropped: conditions that hardly any counts fulfill, by depth.
        varying: depths of calls with numbers that are others in other steps.
        opaque: depths of calls that do not run on symbols, or decide on counts as for hardly any others, and these
            counts: a few more are tried.
        runs: of the pass before, by what they are for; they may go on in the next one.
        on_symbols: that of the pass before with symbols, which may, too.
    """

    def __init__(self, step: StepState) -> None:
        self._step = step
        self.tried: dict[int, int] = {}
        self.conditions: dict[int, list[Condition]] = {}
        self.usual: dict[int, list[Condition]] | None = {}
        self.ties: dict[int, dict[int, Formula]] = {}
        # which masks are the same depends on the writes into them
        self.skips = not step.opened and all(note.same is None for note in step.notes)
        self.by_python = False
        self.opaque: dict[int, set[int]] = {}
        self.dropped: dict[int, list[Condition]] = {}
        self.formulas: dict[Formula, int] = {}
        self.varying = set[int]()
        self.runs: dict[Any, Run] = {}
        self.on_symbols: OnSymbols | None = None
        self._samples: list[tuple[int, ...]] = []
        known = ((note.counts.stop, *(1 + i for i in note.told.values())) for note in step.notes)
        self._known = list(itertools.accumulate(map(max, known), max, initial=step.opened))  # before each call
        self._new = next((depth for depth, note in enumerate(step.notes) if not note.is_fitted), len(step.notes))

    def end(self) -> None:
        """End the step, of which calls or their loss are new."""
        step, tree = self._step, self._step.tree
        for note in step.notes[self._new :]:
            note.seen.append(tuple(step.counts[: self.known_before(note)]))
        if tree is None:
            self._find_and_close()
            return
        sizes, ends = tuple(step.counts[: step.opened]), self._met(are_alike=False)
        # counts that data decide are others in nearly every step; and if any path is for all sizes, this one may be
        is_alone = isinstance(ends, Note) and not (step.has_data_counts or tree.are_confirmed)
        if self._new < len(step.notes) and isinstance(ends, Note) and is_alone:
            place = f" at {ends.source}" if ends.source else ""
            tree.alone(step.path, sizes, f"the step makes other calls for other sizes: {ends.name}{place}")
            return
        self._find_and_close()
        same = self._met(are_alike=True)
        tree.ended(step.notes, step.path, sizes, () if isinstance(same, Note) else same)

    def _met(self, *, are_alike: bool) -> set[tuple[int, ...]] | Note:
        """Sizes of the batch of other steps that made the same calls, or the first that none of them made.

        Args:
            are_alike: with the numbers that formulas give.
        """
        step = self._step
        companions = companions_of(step, self._new)
        for note in step.notes:
            companions.go_on(note)
            if are_alike:
                companions.only_as(note, self.known_before(note))
            if note.depth >= self._new and not companions.now:
                return note
        return companions.sizes(step.opened)

    def _find_and_close(self) -> None:
        try:
            self._find()
        finally:
            for run in (*self.runs.values(), *(() if self.on_symbols is None else (self.on_symbols.run,))):
                run.close()

    def _find(self) -> None:
        """Find formulas for numbers and for sizes of results, from the counts that they depend on.

        A call that has no form for other counts (it makes a tensor for each of so many rows) is one for these alone.
        """
        step, new = self._step, self._new
        begin, last = new, None
        may_search = step.follower.may_search(len(step.notes))
        most = step.follower.searched + may_search
        for note in step.notes[new:]:
            vainly = note.told.values() if in_vain(step, note.func, note.source) else ()
            note.pins = {i: step.counts[i] for i in vainly}
        if new < len(step.notes) and (ties := self._ties()):
            step.notes[new].ties = {**ties, **step.notes[new].ties}
        if may_search <= 0 and new < len(step.notes):
            begin = self._pin(step.notes[new], set(range(len(step.counts))), _TOO_MANY_TRIES)
        else:
            self._ask(new)
        while begin <= len(step.notes):
            try:
                last = _Pass(self, step, begin, new)
                last.run()
                break
            except _Again:  # a condition of a call is none of those before it, which are not found anew
                if last is not None:
                    last.keep(last.at)
                    begin = max(begin, last.at)
                if step.follower.searched > most:
                    begin = self._pin(step.notes[begin - 1], set(range(len(step.counts))), _TOO_MANY_TRIES)
            except Apart as error:  # since the last pass has learned more of a call
                last, failed = None, last
                begin = self._apart(begin, failed, str(error))
            except _Pinned as error:
                note = step.notes[error.depth]
                if error.is_behind:
                    begin = self._pin(note, error.counts or set(range(self.known_behind(note))), error.reason)
                    continue
                operands = [_counts_of(step, source) for source in sources_in((note.args, note.kwargs))]
                fixed = pins_of(step.notes).keys()
                counts = error.counts or set(note.told.values()) - fixed  # what Python tells is the likeliest
                counts = counts or set(note.counts).union(*operands) - fixed
                begin = self._pin(note, counts or set(range(self.known_behind(note))), error.reason)
        for note in step.notes[new:]:
            note.is_fitted = True
        fixed = pins_of(step.notes)
        for note in step.notes:
            if note.told and not fixed.keys() & set(note.told.values()):
                does_for_all(step, note)

    def _ask(self, new: int) -> None:
        """Ask symbols what torch decides in all calls, that samples may be drawn once for all of it, and not for each.

        What they say rests on the likeliest numbers of each call. It is forgotten if no samples fulfill it, or from the
        first call on of which these numbers will not do.

        Args:
            new: the depth of the first new call.
        """
        for _ in range(_MOST_ASKED):
            try:
                _Pass(self, self._step, new, new).ask()
                self.samples()
                return
            except _Again:
                continue
            except (Apart, _Pinned):
                break
        self.forget(new)
        self.by_python, self._samples, self.on_symbols = False, [], None

    def forget(self, depth: int) -> None:
        """Forget what was learned of a call and those behind it."""
        for learned in filter(None, (self.conditions, self.usual, self.ties, self.dropped, self.opaque)):
            for at in [at for at in learned if at >= depth]:
                del learned[at]
        self.formulas = {formula: at for formula, at in self.formulas.items() if at < depth}

    def _apart(self, begin: int, last: _Pass | None, reason: str) -> int:
        """There are no samples for what is known of a call: it is one for this step's counts. Returns where to go on.

        Args:
            begin: of the last pass.
            last: that pass, in which something was learned of a call; None if nothing was.
            reason: why there are none.
        """
        depth, loss = begin if last is None else last.at, self._step.loss
        if depth == len(self._step.notes):
            depth = loss.depth if type(loss) is Made else depth - 1
        if last is not None:
            last.keep(depth)
        self.forget(depth)
        note = self._step.notes[depth]
        return self._pin(note, set(range(self.known_behind(note))), reason)

    def asked(self, end: int) -> list[tuple[int, Formula]]:
        """The conditions of the path up to a call, and of what is being looked at, with their depths."""
        noted = {note.depth: note.conditions for note in self._step.notes[:end]}
        each = [*noted.items(), *self.conditions.items()]
        return [(depth, condition.formula) for depth, conditions in each for condition in conditions]

    def _pin(self, note: Note, counts: set[int], reason: str) -> int:
        """A call is one for some counts of this step alone, if they are not yet. Returns where to go on."""
        step, depth = self._step, max(note.depth, self._new)  # what others know is right for them
        if note.depth in self.varying and all(before.whole is None for before in step.notes):
            told_from_now_on(step, note)
        groups = [{i, *formula.names()} for i, formula in self.all_ties().items()]
        counts = counts.union(*(group for group in groups if group & counts)) - pins_of(step.notes).keys()
        told = set(told_in(step.notes))
        if len(told.intersection(counts.union(pins_of(step.notes)))) > _MOST_PINNED:
            counts |= told - pins_of(step.notes).keys()
        if not counts:
            for later in step.notes[depth:]:
                later.apart = reason
            return len(step.notes) + 1
        for i in sorted(counts):  # where they are known: what Python sees before is right for others as well
            note = next((after for after in step.notes[depth:] if self.known_behind(after) > i), step.notes[-1])
            note.pins, note.take = {**note.pins, i: step.counts[i]}, None
        for read in (before for before in step.notes if before.reads and counts & set(before.counts)):
            step.follower.sizes_at[read.source] += 1
        for call in (before for before in step.notes if counts & set(before.told.values())):
            does_for_one(step, call)
        self.tried.pop(depth, None)
        self.opaque.pop(depth, None)
        self.dropped.pop(depth, None)
        return depth

    def _ties(self) -> dict[int, Formula]:
        """Sizes of the batch that were what others before them were in all steps."""
        step = self._step
        if step.tree is None:
            return {}
        places = step.tree.sizes.places
        rows = [tuple(step.counts[: step.opened]), *step.tree.known, *(v for v, _ in step.follower.others(places))]
        columns = list(zip(*rows, strict=True))
        firsts = [(i, columns.index(column)) for i, column in enumerate(columns)]
        return {i: Formula(f"s{first}") for i, first in firsts if first < i}

    def all_ties(self) -> dict[int, Formula]:
        """The counts that follow from others, with how."""
        found = ties_of(self._step.notes)
        for ties in self.ties.values():
            found |= ties
        return found

    def known_before(self, note: Note) -> int:
        """How many counts are known before a call is made, of which Python has told the last ones by its arguments."""
        return max((self._known[note.depth], *(1 + i for i in note.told.values())))

    def known_behind(self, note: Note) -> int:
        """How many counts are known once a call has been made."""
        return max(self.known_before(note), note.counts.stop)

    def samples(self) -> list[tuple[int, ...]]:
        """Counts to make the path with.

        Raises:
            Apart: there are hardly any that are treated alike.
        """
        path, known = (self._step.notes, len(self._step.counts), {}), (self.conditions, self.formulas, self.all_ties())
        try:
            self._samples = samples_of_path(*path, *known, self.usual or {}, self._samples)
        except Apart:
            if not self.usual:
                raise
            self.usual = None
            self._samples = samples_of_path(*path, *known, before=self._samples)
        return self._samples


def samples_of_path(
    notes: Sequence[Note],
    number: int,
    pins: Mapping[int, int],
    more: Mapping[int, Sequence[Condition]] = types.MappingProxyType({}),
    more_formulas: Mapping[Formula, int] = types.MappingProxyType({}),
    ties: Ties | None = None,
    usual: Mapping[int, Sequence[Condition]] = types.MappingProxyType({}),
    before: Sequence[tuple[int, ...]] = (),
) -> list[tuple[int, ...]]:
    """Counts for which a path is what it is.

    Args:
        notes: the path.
        number: of its counts.
        pins: those that are the same in all of them, beside those for which alone there is the path.
        more: further conditions, by depth.
        more_formulas: that are to be told apart as well, with their depths.
        ties: counts that follow from others, if not those of the path alone.
        usual: conditions on samples alone, by depth.
        before: counts for which it was nearly the same path; those that are known before it was not are kept.

    Raises:
        Apart: there are hardly any.
    """
    told = [(note.depth, condition.formula) for note in notes for condition in note.conditions]
    told += [(depth, condition.formula) for depth, conditions in more.items() for condition in conditions]
    asked = [(note.depth, condition.formula) for note in notes for condition in note.usual]
    asked += [(depth, condition.formula) for depth, conditions in usual.items() for condition in conditions]
    all_ties = tuple((ties_of(notes) if ties is None else ties).items())
    fixed = tuple({**pins, **pins_of(notes)}.items())
    formulas = tuple(dict.fromkeys(formulas_of(notes)))
    more_told = tuple([(depth, formula) for formula, depth in more_formulas.items()])
    unmet = [depth for depth, condition in (*told, *asked) if not all(condition.at(counts) for counts in before)]
    its = sorted((*formulas, *more_told), key=itemgetter(0)) if before else []
    values = {tuple([formula.at(counts) for counts in before[:GRAPHS]]): depth for depth, formula in reversed(its)}
    unmet += [depth for depth, formula in its if values[tuple([formula.at(c) for c in before[:GRAPHS]])] < depth]
    known_at = [(note.depth, i) for note in notes for i in (*note.counts, *note.told.values())]
    met_last = max((*unmet, *(depth for depth, _ in (*told, *asked))), default=0)
    to_change = tuple([i for depth, i in known_at if unmet and min(unmet) <= depth <= met_last])
    sizes = frozenset(size for note in notes for spec in note.specs for size in spec.shape)
    conditions = tuple(dict.fromkeys(told)), tuple(dict.fromkeys(formula for _, formula in asked))
    alike = defaultdict[Any, list[int]](list)
    for note in notes:
        for place, i in note.told.items():
            alike[note.func, place].append(i)
    groups = tuple(map(tuple, alike.values()))
    known = (formulas, more_told, all_ties, sizes, groups)
    return list(_samples(number, fixed, *conditions, *known, tuple(before), to_change))


@functools.lru_cache(maxsize=256)  # each try for a path asks, and each of its graphs
def _samples(
    number: int,
    fixed: tuple[tuple[int, int], ...],
    told: tuple[tuple[int, Formula], ...],
    usual: tuple[Formula, ...],
    formulas: tuple[tuple[int, Formula], ...],
    more_formulas: tuple[tuple[int, Formula], ...],
    all_ties: tuple[tuple[int, Formula], ...],
    sizes: frozenset[int],
    alike: tuple[tuple[int, ...], ...],
    before: tuple[tuple[int, ...], ...],
    to_change: tuple[int, ...],
) -> list[tuple[int, ...]]:
    pins, ties = dict(fixed), dict(all_ties)
    told = tuple([(depth, condition) for depth, condition in told if condition.names() - pins.keys()])
    conditions = [*dict.fromkeys(condition for _, condition in told)]
    conditions += [condition for condition in usual if condition.names() - pins.keys()]
    its = [formula for _, formula in formulas]
    good = list[tuple[int, list[tuple[int, ...]]]]()
    # a search asks often, and where counts are many, those that are alike in one set of samples are in most others
    seeds = range(-_NEARBY, max(_FEW_SEEDS, min(_SEEDS, 4 * _SEEDS // max(1, number)))) if before else range(_SEEDS)
    for seed in seeds:
        first, among = before if seed < 0 else (), to_change if seed < -1 else None
        try:
            found = samples_within(number, pins, conditions, ties, seed, sizes, alike, first, among)
        except Apart:
            if not seed:
                raise
            continue
        if told_apart([*formulas, *more_formulas], found, pins, ties, told):
            good.append((rests_alike(its, found, pins, ties), found))
            enough = rests_alike(its, before, pins, ties) if seed < 0 else 0
            if good[-1][0] <= enough or len(good) == _GOOD:
                break
    if not good:
        raise Apart("formulas of the numbers of rows or elements cannot be told apart")
    samples = min(good, key=itemgetter(0))[1]
    if (formula := _constant(its, samples, pins, [condition for _, condition in told])) is not None:
        raise Apart(f"{formula} is the same number for all counts that are tried")
    return samples


def _constant(
    formulas: Iterable[Formula],
    samples: Sequence[Sequence[int]],
    pins: Mapping[int, int],
    conditions: Iterable[Formula],
) -> Formula | None:
    """A formula that would not be seen in graphs: it has one value in all of them, and more in steps."""
    asked = set(map(str, conditions))
    for formula in formulas:
        value, *others = {formula.at(sample) for sample in samples[:GRAPHS]}
        if not others and formula.names() - pins.keys() and not is_stated(formula, value, asked):
            return formula
    return None


class _Pass:
    """One try: all calls of the path, side by side for all counts.

    Args:
        every: what is known from tries before.
        step: the step.
        begin: the depth of the first call without formulas.
        first_new: of the first call that no step made before.

    Attributes:
        at: the depth of the call that is looked at; that of none: the backward pass is.
    """

    def __init__(self, every: CountFormulas, step: StepState, begin: int, first_new: int) -> None:
        self._every, self._step, self._begin = every, step, begin
        self.at = begin
        number = len(step.counts)
        # these change between passes alone
        pins, ties = self._pins, self._ties = pins_of(step.notes), every.all_ties()
        samples = every.samples()
        self._fits = CountFits(Counts(number), samples, rounds=True)
        self._told = told_in(step.notes)
        told = set(self._told)
        of_data = set(range(step.opened, number)) - told
        # how many, of which counts; numbers that Python tells are one the end of another one
        self._how_few = [(few, {i}) for i in sorted(told - pins.keys() - ties.keys()) for few in (0, 1)]
        self._open = [i for i in range(number) if i not in pins and i not in ties]
        self._how_few += [(few, of_data) for few in (0, 1) if self._open]
        known = [{**dict.fromkeys(counts, few), **pins} for few, counts in self._how_few]
        its = [with_ties([few.get(i, count) for i, count in enumerate(step.counts)], pins, ties) for few in known]
        known = [condition for _, condition in every.asked(begin)]
        self._bound = max(_FAR, 8 * max(step.counts[: step.opened], default=0))
        # what C++ decides shows in Python's implementations as little as where nothing runs on symbols
        more = list[list[int]]()
        if every.opaque or every.by_python:
            more = [*self._extremes(samples[0], pins, ties, known), *mixed(number, _MORE, pins, ties, known)]
        self._untold = set[int]()  # what torch decided there is not looked at: hardly any counts are decided alike
        for depth, dropped in every.dropped.items():
            alike = mixed(number, _MORE // 4, pins, ties, [*known, *(condition.formula for condition in dropped)])
            is_open = any(condition.formula.names() - pins.keys() for condition in dropped)
            self._untold |= {depth} if is_open and len(alike) < 2 else set()
            more += alike
        self._found: dict[int, _Found] = {}
        self._behind: tuple[Note, list[Condition], Sequence[Formula]] | None = None
        self._calls: list[Note] = []
        self._specs: dict[Source, TensorSpec] = {}  # of results, and of what is told, with formulas
        self._pool: dict[str, None] = {}
        self._companions = companions_of(step, first_new)
        first = next((note.depth for note in step.notes if note.counts or note.told), 0)
        self._makes_from = first if every.skips else 0
        self._skipped = self._before_counts()
        self._kept: dict[Any, Run] = {}
        self._runs = [Run(step, sample) for sample in (samples if self._open else samples[:1])]
        for run in self._runs:
            run.assume(self._skipped)
        key = self._makes_from, pins, ties, every.by_python, set(every.opaque)
        if every.on_symbols is None or every.on_symbols.key != key:
            if every.on_symbols is not None:
                every.on_symbols.run.close()
            every.on_symbols = OnSymbols(step, self._open, pins, ties, key)
            every.on_symbols.run.assume(self._skipped)
        self._on_symbols = every.on_symbols
        self._own = self._run("own", step.counts) if self._open else self._runs[0]
        self._few = [self._run(str(few), counts) for few, counts in zip(self._how_few, its, strict=True)]
        self._more = [self._run("more", counts) for counts in dict.fromkeys(map(tuple, more))]
        for run in every.runs.values():
            run.close()
        every.runs = self._kept

    def _run(self, use: str, counts: Sequence[int]) -> Run:
        """A run with some counts, that of the pass before if it has not come further than this one begins."""
        pins, key = self._pins, (self._makes_from, use, tuple(counts))
        run = self._every.runs.get(key)
        is_behind = run is None or max(run.at, 0 if run.ended is None else run.ended + 1) > self._begin
        if run is None or is_behind or any(run.counts[i] != count for i, count in pins.items()):
            run = Run(self._step, counts)
            run.assume(self._skipped)
            run.at = self._makes_from
        else:
            del self._every.runs[key]
        self._kept[key] = run
        return run

    def _extremes(
        self, sample: Sequence[int], pins: Mapping[int, int], ties: Ties, conditions: Sequence[Formula]
    ) -> list[list[int]]:
        """Counts with small and large sizes of the batch, and with those of other steps."""
        step, number = self._step, self._step.opened

        def with_sizes_of(sizes: Sequence[int]) -> list[int]:
            return with_ties([*sizes, *sample[number:]], pins, ties)

        few, many = _SMALL[0], self._bound
        while many > few and not all(condition.at(with_sizes_of([many] * number)) for condition in conditions):
            many //= 2
        sizes = [*(() if step.tree is None else step.tree.known), *([n] * number for n in (*_SMALL, many) if number)]
        for i in range(number if number > 1 else 0):  # one small beside large ones, and the reverse
            sizes += ([one if i == j else other for j in range(number)] for one, other in ((few, many), (many, few)))
        return list(map(with_sizes_of, sizes))

    def _before_counts(self) -> list[tuple[Note, list[TensorSpec]]]:
        """The calls that are not made whose results are wanted: by later calls, or as the loss."""
        notes, loss = self._step.notes, self._step.loss
        before, rest = notes[: self._makes_from], notes[self._makes_from :]
        wanted = {loss.depth} if type(loss) is Made else set[int]()
        wanted |= {s.depth for note in rest for s in sources_in((note.args, note.kwargs)) if type(s) is Made}
        for note in before:
            self._specs.update(zip(note.made, note.specs, strict=True))
            if note.depth >= self._begin:
                self._found[note.depth] = _Found({}, None, [])
        return [(note, note.specs) for note in before if note.depth in wanted]

    def run(self) -> None:
        """Find formulas of all calls.

        Raises:
            _Again: it is to be tried again.
            _Pinned: a call has none.
        """
        end = len(self._step.notes)
        try:
            for note in self._step.notes:
                self._companions.go_on(note)
                if note.depth >= self._makes_from:
                    self._note(note)
            loss = self._step.loss
            if type(loss) is Made and (loss.depth >= self._begin or self._step.notes[loss.depth].behind is None):
                self._backward(loss)
        except _Pinned as error:
            end = error.depth
            raise
        except _Again:
            end = 0
            raise
        finally:
            for run in self._runs:
                run.close()
            self.keep(end)
            if self._behind is not None and end:
                note, conditions, note.behind = self._behind
                ties = self._ties_at().get(len(self._step.notes), {})
                note.ties, note.take = {**note.ties, **ties}, None
                note.conditions = [*note.conditions, *map(tied, ties.items()), *conditions]

    def ask(self) -> None:
        """Learn what torch decides with symbols in calls with their likeliest numbers, as far as that is known.

        Raises:
            _Again: it is to be tried again.
            _Pinned: torch decides in many calls as for hardly any other counts.
        """
        every, step, symbolic = self._every, self._step, self._on_symbols.run
        number = len(step.counts)

        def learn(depth: int, numbers: str, make: Callable[[], Sequence[Tensor]]) -> None:
            decided, codes = self._decided(depth, make)
            self._on_symbols.made[depth] = numbers, decided, codes
            ties = (tie_of(condition, number, self._told) for condition in decided)
            for tie in (tie for tie in ties if tie is not None and tie[0] not in self._ties):
                self._tie(depth, tie)
            formulas = [self._renamed(code) for code in filter(None, codes) if _is_plain(code)]
            every.conditions[depth] = decided
            if every.usual is not None:
                every.usual[depth] = [Condition(Formula(f"({formula}) >= 2")) for formula in formulas]
            every.formulas |= {formula: depth for formula in formulas if formula not in every.formulas}

        for note in step.notes:
            self._companions.go_on(note)
            if note.depth < self._makes_from:
                continue
            if note.depth in every.opaque:  # symbols do not run through it
                return
            numbers = dict[Place, Any]()
            if note.depth >= self._begin:
                self._open_numbers(note)
                numbers = self._choices(note)[0]
            args, kwargs = with_numbers((note.args, note.kwargs), numbers)
            call, made = note.with_arguments(args, kwargs), list[Tensor]()

            def make(call: Note = call, made: list[Tensor] = made) -> list[Tensor]:
                made += symbolic.make(call)
                return made

            learn(note.depth, repr_of(numbers), make)
            for source, tensor in zip(note.made, made, strict=True):
                shape: Any = tuple(map(self._of_symbols, tensor.shape))
                if None in shape:
                    return
                self._specs[source] = TensorSpec(shape, (), tensor.dtype, tensor.device)
                self._pool.update((str(n), None) for n in shape if isinstance(n, Formula))
        if type(step.loss) is Made:
            loss = step.loss
            learn(len(step.notes), "", lambda: symbolic.backward(loss))

    def _of_symbols(self, size: Any) -> Formula | int | None:
        """A size with symbols as a formula; None if graphs cannot compute it."""
        code = self._on_symbols.sizes.code(size) if private.is_symbol(size) else None
        if code is None:
            return int(size)
        return self._renamed(code) if _is_plain(code) else None

    def keep(self, end: int) -> None:
        """Keep what was found of the calls before one."""
        ties_at = self._ties_at()
        for depth, found in self._found.items():
            if depth < end:
                self._keep(self._step.notes[depth], found, ties_at.get(depth, {}))

    def _ties_at(self) -> dict[int, dict[int, Formula]]:
        """At which calls ties are asked for: formulas of all calls behind what a tied count is known at may use it."""
        found: dict[int, dict[int, Formula]] = {}
        for depth, ties in self._every.ties.items():
            for count, formula in ties.items():
                notes = (note for note in self._step.notes[:depth] if note.depth in self._found)
                at = next((note.depth for note in notes if self._every.known_behind(note) > count), depth)
                found.setdefault(at, {})[count] = formula
        return found

    def _keep(self, note: Note, found: _Found, ties: dict[int, Formula]) -> None:
        if found.numbers:
            note.args, note.kwargs = with_numbers((note.args, note.kwargs), found.numbers)
            note.take = None
        note.open = found.specs
        if found.specs is not None:
            note.sizes, note.needs = compiled_specs(found.specs), tuple(sorted(counts_in(found.specs)))
            note.sized_for, note.spare = tuple([self._step.counts[i] for i in note.needs]), {}
        note.ties = {**note.ties, **ties}
        note.usual = (self._every.usual or {}).get(note.depth, ())
        note.is_fitted, note.conditions = True, [*map(tied, note.ties.items()), *found.conditions]

    def _with_all(self) -> None:
        """What fails may have needed calls that were skipped: a hook on a result, its gradient.

        Raises:
            _Again: they are not from now on.
        """
        if self._makes_from:
            self._every.skips = self._every.by_python = False
            self._every.opaque.clear()
            self._every.dropped.clear()
            raise _Again

    def _note(self, note: Note) -> None:
        depth = self.at = note.depth
        is_new = depth >= self._begin
        if is_new:
            self._open_numbers(note)
        choices = self._choices(note) if is_new else [dict[Place, Any]()]
        numbers = choices[min(self._every.tried.get(depth, 0), len(choices) - 1)]
        args, kwargs = with_numbers((note.args, note.kwargs), numbers)
        call = note.with_arguments(args, kwargs)
        is_opaque = depth in self._every.opaque
        symbolic = self._on_symbols.run
        conditions = list[Condition]()
        if self._open and not is_opaque:
            conditions = self._conditions(depth, repr_of(numbers), lambda: symbolic.make(call))
        tried = self._every.tried.get(depth, 0) + 1
        if tried < len(choices) and any(are_fixed(condition, len(self._step.counts)) for condition in conditions):
            raise self._otherwise(depth, choices, f"{note.name} is that of some numbers alone")
        try:
            made = [run.make(call) for run in self._runs]
        except Exception as error:
            self._with_all()
            reason = f"{note.name} is not made for any number of rows or elements ({first_line(error)})"
            raise self._otherwise(depth, choices, reason) from None
        for size in sizes_in(numbers.values()):
            self._learn(size.formula)
        if is_new:
            counts = {i for size in sizes_in(numbers.values()) for i in size.formula.names()}
            self._take_usual(depth, counts or self._open_before(self._every.known_before(note)))
        kind, another = self._runs[0].kind, f"{note.name} is another one for some numbers of rows or elements"
        usual = self._runs[0].computing()
        if is_new and any(run.kind != kind or run.computing() != usual for run in self._runs):
            raise self._otherwise(depth, choices, another)
        specs = [[TensorSpec.of(tensor) for tensor in tensors] for tensors in made]
        try:
            found = specs_for(note, specs, self._fits) if is_new else note.open
        except Apart as error:
            reason = f"what {note.name} gives is as large as the data say in a way of its own ({error})"
            raise self._otherwise(depth, choices, reason) from None
        if is_new:
            self._take_more_than_one(depth, found or ())
        known = found or specs[0]
        for run in self._more:
            if not all(condition.holds(run.counts) for condition in conditions):
                run.end(depth)
        few, more = self._shapes_with(self._few, call), self._shapes_with(self._more, call)
        own = self._shapes_with([self._own], call)
        if any(got is _FAILED or (is_new and run.kind != kind) for run, got in own.items()):
            raise self._otherwise(depth, choices, another)
        self._calls.append(call)
        wanted = {run: [at_counts(spec.shape, run.counts) for spec in known] for run in (*few, *more)}
        for run in [run for run, got in more.items() if got == wanted[run] and run.slices_less(self._runs)]:
            run.end(depth)  # what takes all is looked at by itself
            del more[run]
        if is_opaque or self._every.by_python:
            likeness = self._likeness()
            unlike = [r for r, got in more.items() if got != wanted[r] or r.kind != kind or likeness.of(r) is not LIKE]
            if is_new and (unlike or depth in self._untold):
                raise self._otherwise(depth, choices, another)
            for run in unlike:  # for these counts a known call is another one
                run.end(depth)
            sizes = [i for i in self._open if i < self._step.opened]
            conditions += [Condition(Formula(f"s{i} <= {self._bound}")) for i in sizes if is_new]
        if is_new:
            conditions += self._slices_of(note, made)
            told = self._few[:-2]
            alike = [  # of few rows a sum may be left out; by Python's numbers kernels are chosen
                run
                for run, got in few.items()
                if got == wanted[run] and run.kind == kind and (run not in told or run.computing() == usual)
            ]
            others = [index for index, run in enumerate(self._few) if run in few and run not in alike]
            if others:
                counts = self._counts_of(note, numbers, found)
                conditions += self._more_than_few(others, counts)
                for index in others:
                    its = [i for i in counts if i in self._how_few[index][1]]
                    self._take_more(index, its)
            shapes = [at_counts(spec.shape, self._step.counts) for spec in known]
            if shapes != [spec.shape for spec in note.specs] or not all(c.holds(self._step.counts) for c in conditions):
                reason = f"what {note.name} gives is as large as the data say in a way of its own"
                raise self._otherwise(depth, choices, reason)
            in_numbers = [size.formula for size in sizes_in(numbers.values())]
            in_specs = [n for spec in found or () for n in (*spec.shape, *spec.stride) if isinstance(n, Formula)]
            known_now = self._every.known_behind(note)
            if any(i >= known_now for formula in (*in_numbers, *in_specs) for i in formula.names()):
                raise self._otherwise(depth, choices, f"{note.name} is before what it depends on")
            if self._are_constant((*in_numbers, *in_specs), conditions):
                raise self._otherwise(depth, choices, f"{note.name} gets the same number for all counts that are tried")
            self._found[depth] = _Found(numbers, found, conditions)
        if self._open and is_opaque and depth not in self._on_symbols.made:
            self._on_symbols.made[depth] = None
            try:
                symbolic.assume([(call, known)])
            except Exception:  # symbols stand for two at least: what follows from them may be less than nothing
                raise self._otherwise(depth, choices, f"{note.name} is not made for more rows or elements") from None
        for source, spec in zip(note.made, known, strict=True):
            self._specs[source] = spec
        if note.func is sized:
            (source, *shape), spec = call.args, note.met[call.args[0].number].spec
            formulas: tuple[Any, ...] = tuple([size.formula if type(size) is Size else size for size in shape])
            self._specs[source] = TensorSpec(formulas, (), spec.dtype, spec.device)
        for spec in known:
            self._pool.update((str(n), None) for n in spec.shape if isinstance(n, Formula))

    def _more_than_few(self, others: Iterable[int], counts: Iterable[int]) -> list[Condition]:
        """That counts are more than those with which a call is another one.

        Args:
            others: runs with few, by number, in which it is.
            counts: on which the call depends.
        """
        least: dict[int, int] = {}
        for few, of in map(self._how_few.__getitem__, others):
            least |= {i: max(few + 1, least.get(i, 0)) for i in counts if i in of}
        return [Condition(Formula(f"s{i} >= {few}")) for i, few in least.items()]

    def _counts_of(self, note: Note, numbers: Mapping[Place, Any], specs: Sequence[TensorSpec] | None) -> list[int]:
        """The counts on which a call depends that may differ in other steps."""
        found = {i for size in sizes_in(numbers.values()) for i in size.formula.names()}.union(note.counts)
        operands = [self._specs[s] for s in sources_in((note.args, note.kwargs)) if s in self._specs]
        return sorted(found | counts_in(operands) | counts_in(specs or ()) - self._pins.keys())

    def _are_constant(self, formulas: Iterable[Formula], conditions: Iterable[Condition]) -> bool:
        """Whether a formula would not be seen in graphs.

        Args:
            formulas: of the call or backward pass that was made last.
            conditions: for it.
        """
        counts = [run.counts for run in self._runs]
        formulas = list(formulas)
        if _constant(formulas, counts, self._pins, ()) is None:
            return False
        found = [condition.formula for one in self._found.values() for condition in one.conditions]
        asked = [condition for _, condition in self._every.asked(self._begin)]
        asked += (*found, *(condition.formula for condition in conditions))
        return _constant(formulas, counts, self._pins, asked) is not None

    def _take_more(self, index: int, counts: Sequence[int]) -> None:
        """A run with few goes on with some counts that are no longer as few, if others still are.

        Args:
            index: of the run.
            counts: which.
        """
        run, many = self._few[index], {i: self._runs[0].counts[i] for i in counts}
        run.end(self.at)
        few, of = self._how_few[index]
        if not counts or not any(run.counts[i] == few for i in of.difference(counts)):
            return
        found = Run(self._step, [many.get(i, count) for i, count in enumerate(run.counts)])
        try:
            found.assume(self._skipped)
            for call in self._calls:
                found.make(call)
        except Exception:
            return
        self._few[index] = found
        self._kept |= {key: found for key, its in self._kept.items() if its is run}

    def _open_before(self, known: int) -> set[int]:
        """Those of the first counts that differ in other steps."""
        return {i for i in self._open if i < known}

    def _take_usual(self, depth: int, counts: Iterable[int]) -> None:
        """Where the samples do not have the same operators, take other samples.

        Raises:
            _Again: there are others.
        """
        names, every = [run.operators()[0] for run in self._runs], self._every
        often = max(names, key=names.count)
        rare = [run.counts for run, its in zip(self._runs, names, strict=True) if its != often]
        avoided = [Condition(Formula(f"s{i} != {sample[i]}")) for sample in rare for i in sorted(counts)]
        if avoided and every.usual is not None and len(found := every.usual.get(depth, [])) < _MOST_AVOIDED:
            every.usual[depth] = [*found, *avoided]
            raise _Again

    def _take_more_than_one(self, depth: int, specs: Iterable[TensorSpec]) -> None:
        """Where a result has no or one element in a sample, take other samples: torch may treat these otherwise.

        Raises:
            _Again: there are others.
        """
        every, counts = self._every, [run.counts for run in self._runs]
        sizes = dict.fromkeys(n for spec in specs for n in spec.shape if isinstance(n, Formula))
        small = [size for size in sizes if any((size.at(sample) or 0) < 2 for sample in counts)]
        wanted = [Condition(Formula(f"({size}) >= 2")) for size in small]
        if wanted and every.usual is not None and len(found := every.usual.get(depth, [])) < _MOST_AVOIDED:
            every.usual[depth] = [*found, *wanted]
            raise _Again

    def _otherwise(self, depth: int, choices: Sequence[Any], reason: str) -> Exception:
        """What to raise where a choice of numbers will not do."""
        tried = self._every.tried[depth] = self._every.tried.get(depth, 0) + 1
        self._on_symbols.key = None
        self._every.forget(depth)
        return _Again() if tried < len(choices) else _Pinned(depth, reason)

    def _shapes_with(self, runs: Iterable[Run], call: Note) -> dict[Run, Any]:
        """The shapes of a call's results, for each run that stands there; one that fails ends."""
        found = dict[Run, Any]()
        known = [condition for one in self._found.values() for condition in one.conditions]
        for run in [run for run in runs if run.ended is None and run.at == call.depth]:
            try:
                made = run.make(call)
            except Exception:
                run.end(call.depth)
                found[run] = _FAILED
                continue
            if all(condition.holds(run.counts) for condition in known):
                found[run] = [tuple(tensor.shape) for tensor in made]
            else:
                run.end(call.depth)
        return found

    # ------------------------------------------------------------------ for which counts
    def _conditions(self, depth: int, numbers: str, make: Callable[[], Sequence[Tensor]]) -> list[Condition]:
        """What torch decides on counts in a call.

        Args:
            depth: of the call.
            numbers: of it that are formulas, as text.
            make: makes it with symbols.
        """
        on_symbols = self._on_symbols
        if (before := on_symbols.made.get(depth)) is None:
            key, on_symbols.key = on_symbols.key, None
            before = on_symbols.made[depth] = numbers, *self._decided(depth, make)
            on_symbols.key = key
        elif depth >= self._begin and before[0] != numbers:
            on_symbols.key = None
            raise _Again
        conditions = list(before[1])
        for code in filter(None, before[2]):
            if _is_plain(code):
                formula = self._renamed(code)
                conditions += self._on_this_side(formula)
                self._learn(formula)
        # those of sizes are only seen with samples on the other side
        conditions += [c for c in self._every.conditions.get(depth, ()) if c not in conditions]
        found = filter(None, [tie_of(condition, len(self._step.counts), self._told) for condition in conditions])
        if (tie := next((tie for tie in found if tie[0] not in self._ties), None)) is not None:
            self._tie(depth, tie)
        if not all(condition.holds(run.counts) for condition in conditions for run in self._runs):
            self._every.conditions[depth] = conditions
            try:
                self._every.samples()
            except Apart:
                self._every.dropped[depth] = self._every.conditions.pop(depth)
                self._do_without(depth, {i for condition in conditions for i in condition.formula.names()})
            raise _Again
        return conditions

    def _decided(self, depth: int, make: Callable[[], Sequence[Tensor]]) -> tuple[list[Condition], set[str | None]]:
        """What torch decides in a call with symbols, and Python of the sizes that it gives."""
        symbols = self._on_symbols.sizes
        before = symbols.decisions
        try:
            with private.symbols_as_numbers(by_python=self._every.by_python):
                made = make()
            decided = symbols.decided(before)
            codes = {symbols.code(n) for t in made for n in (*t.shape, *t.stride()) if private.is_symbol(n)}
            conditions = [Condition(self._renamed(code)) for code, needed in decided if needed]
            are_fulfilled = all(condition.holds(self._step.counts) for condition in conditions)
        except Exception:  # whatever torch's code does with what is no plain integer
            if self._every.by_python:
                self._every.opaque[depth] = set()
            self._every.by_python = not self._every.by_python
            raise _Again from None
        if symbols.fixed() and not self._every.by_python:
            self._every.by_python = True
            raise _Again
        if symbols.fixed() or not are_fulfilled:
            others = {i for c in conditions if not c.holds(self._step.counts) for i in c.formula.names()}
            self._do_without(depth, others.union(self._open[i] for i in symbols.fixed()))
            raise _Again
        return conditions, codes

    def _do_without(self, depth: int, counts: set[int]) -> None:
        """A call is tried with a few more counts, since torch decides on these as for hardly any others.

        Raises:
            _Pinned: it did so in many calls; there is another path for other counts.
        """
        opaque = self._every.opaque
        opaque[depth] = counts
        decided = {at: counts for at, counts in opaque.items() if counts}
        if len(decided) > _MOST_DECIDED and (counts := set().union(*decided.values()) - self._pins.keys()):
            for at in decided:
                del opaque[at]
                self._every.dropped.pop(at, None)
            raise _Pinned(
                min(decided), "calls are made as for hardly any other number of rows or elements", counts=counts
            )

    def _on_this_side(self, formula: Formula) -> list[Condition]:
        """Of a size that is one number for all samples (``min(8, s0)``): whether it is that number in this step."""
        (number, *others) = {formula.at(run.counts) for run in self._runs}
        if others or formula.names() <= self._pins.keys():
            return []
        is_it = formula.at(self._step.counts) == number
        return [Condition(Formula(f"({formula}) {'==' if is_it else '!='} {number}"))]

    def _tie(self, depth: int, tie: tuple[int, Formula]) -> None:
        """A count follows from others behind a call.

        Raises:
            _Again: as it does from now on.
        """
        self._every.ties[depth] = {**self._every.ties.get(depth, {}), **dict([tie])}
        raise _Again

    def _slices_of(
        self, note: Note, results: Sequence[Sequence[Tensor]], *, is_behind: bool = False
    ) -> list[Condition]:
        """That no slice whose gradient matters takes all, in the call or backward pass that was made last.

        Args:
            note: the call, or that which gives the loss.
            results: of it that others get, for each sample.
            is_behind: it is the backward pass of what that gives.
        """
        tables = [run.slices(out) for run, out in zip(self._runs, results, strict=True)]
        found, reason = list[Condition](), f"{note.name} or what it gives takes all of a tensor"
        if any(table.keys() != tables[0].keys() for table in tables):
            raise _Pinned(note.depth, reason, is_behind=is_behind)
        for index in tables[0]:
            numbers = [self._formula(its) for its in zip(*[table[index] for table in tables], strict=True)]
            condition = SliceNumbers(*numbers).condition()
            if condition is None:
                continue
            if not condition.holds(self._step.counts):
                self._take_for_one(SliceNumbers(*numbers), len(self._step.notes) if is_behind else note.depth)
                raise _Pinned(note.depth, reason, is_behind=is_behind, counts=condition.formula.names())
            found.append(condition)
        return found

    def _take_for_one(self, slice_: SliceNumbers, depth: int) -> None:
        """Where a slice takes all since it ends where the tensor does, tie these counts.

        Raises:
            _Again: they are tied.
        """
        ends = Condition(Formula(f"{slice_.end} == {slice_.size}"))
        if slice_.start != 0 or not ends.holds(self._step.counts):
            return
        if (tie := tie_of(ends, len(self._step.counts))) is not None:
            self._tie(depth, tie)

    def _learn(self, formula: Formula) -> None:
        """A formula of the path, which the samples are to tell from others."""
        if formula in self._every.formulas:
            self._fits.learn(formula)
            return
        self._every.formulas[formula] = self.at
        pins, ties = self._pins, self._ties
        samples = [run.counts for run in self._runs]
        formulas = [(depth, formula) for formula, depth in self._every.formulas.items()]
        if not told_apart(formulas, samples, pins, ties, self._every.asked(self.at)):
            raise _Again
        self._fits.learn(formula)

    def _renamed(self, code: str) -> Formula:
        """Python of symbols as Python of counts."""
        return Formula(code).with_names([f"s{i}" for i in self._open])

    # ------------------------------------------------------------------ the backward pass
    def _backward(self, loss: Made) -> None:
        """Look at what torch decides in the backward pass of a loss; the optimizer meets no counts."""
        every, step = self._every, self._step
        depth, note = len(step.notes), step.notes[loss.depth]
        self.at = depth
        try:
            for run in self._runs:
                run.backward(loss)
        except Exception as error:
            self._with_all()
            reason = f"the backward pass of {note.name} is not made for any number of rows ({first_line(error)})"
            raise _Pinned(loss.depth, reason, is_behind=True) from None
        self._take_usual(depth, self._open_before(every.known_behind(note)))
        reason = f"the backward pass of {note.name} is another one for some numbers of rows or elements"
        if len({tuple(run.computing()) for run in self._runs}) > 1:
            raise _Pinned(loss.depth, reason, is_behind=True)
        slices = self._slices_of(note, [run.gradients for run in self._runs], is_behind=True)
        learned = set(every.formulas)
        conditions = list[Condition]()
        if self._open and depth not in every.opaque:
            conditions = self._conditions(depth, "", lambda: self._on_symbols.run.backward(loss))
        conditions += slices
        likeness = self._likeness()

        def likeness_of(run: Run) -> Any:
            try:
                run.backward(loss)
            except Exception:
                return _FAILED
            return likeness.of(run)

        others = [run for run in self._more if run.ended is None and all(c.holds(run.counts) for c in slices)]
        likes = [likeness_of(run) is LIKE for run in others]
        if not all(likes) or depth in self._untold:
            raise _Pinned(loss.depth, reason, is_behind=True)
        # a sum of one row may be left out: that it is there does no harm
        few = [run.ended is None and likeness_of(run) in (_FAILED, OTHER_SIZES) for run in self._few]
        free = self._open_before(every.known_behind(note))
        conditions += self._more_than_few([i for i, is_another in enumerate(few) if is_another], free)
        found = sorted(likeness.formulas | every.formulas.keys() - learned, key=str)
        if self._are_constant(found, conditions) or not all(condition.holds(step.counts) for condition in conditions):
            raise _Pinned(loss.depth, reason, is_behind=True)
        self._behind = note, conditions, found

    def _likeness(self) -> Likeness:
        """What the samples have done last."""
        (names, *numbers), *others = [run.operators() for run in self._runs]
        is_one = all(other == names for other, _ in others)
        numbers += [other for _, other in others]
        return Likeness(names if is_one else None, [self._formula(n) for n in zip(*numbers, strict=is_one)])

    def _formula(self, values: tuple[int, ...]) -> Formula | int | None:
        """A size in all samples; None: it is none that is known."""
        try:
            return values[0] if len(set(values)) == 1 else self._fits.formula(values)
        except Apart:
            return None

    # ------------------------------------------------------------------ numbers of Python's
    def _open_numbers(self, note: Note) -> None:
        """Numbers that no size depends on are inputs where other steps have others."""
        known = self._every.known_before(note)
        for place, leaf in leaves_by_place((note.args, note.kwargs)):
            if type(leaf) in (int, float) and keeps_shapes(note.func) and place not in note.plain:
                theirs = (its[place] for _, its in self._companions.seen(known) if type(its.get(place)) is type(leaf))
                if not all(same_constant(number, leaf) for number in theirs):
                    note.free.add(place)

    def _choices(self, note: Note) -> list[dict[Place, Any]]:
        """Which numbers of a call may be formulas, the likeliest choice first."""
        operands = [s for s in sources_in((note.args, note.kwargs)) if s in self._specs]
        near = {str(n): None for s in operands for n in self._specs[s].shape if isinstance(n, Formula)}
        places = () if self._step.tree is None else self._step.tree.sizes.places
        given = {s.position for s in sources_in((note.args, note.kwargs)) if type(s) is Given}
        near.update((f"s{i}", None) for i, (position, _) in enumerate(places) if position in given)
        told = (formulas_in(before).values() for before in self._step.notes[: note.depth] if before.told)
        near.update((str(size.formula), None) for size in sizes_in(itertools.chain(*told)))
        own = formulas_in(note) if note.told else {}
        known = self._every.known_before(note)
        pool = {**{f"s{i}": None for i in range(known)}, **self._pool}
        guesses = [near, {}, pool] if operands or given else [pool, {}]
        if in_vain(self._step, note.func, note.source):  # Python draws them: what they equal, they equal by chance
            guesses = [{}]
        found: list[dict[Place, Any]] = []
        for guess in guesses:
            choice = {**own, **self._choice(note, known, pool, guess)}
            if repr_of(choice) not in map(repr_of, found):
                found.append(choice)
        return found

    def _choice(self, note: Note, known: int, pool: Iterable[str], guess: Iterable[str]) -> dict[Place, Any]:
        points, columns = [tuple(self._step.counts[:known])], dict[Place, list[Any]]()
        for place, leaf in leaves_by_place((note.args, note.kwargs)):
            is_number = type(leaf) in (int, torch.Size) and not is_formula(leaf)
            if is_number and not (place in note.free or place in note.plain or keeps_shapes(note.func)):
                columns[place] = [leaf]
        for seen, leaves in self._companions.seen(known) if columns else ():
            if not columns.keys() <= leaves.keys():  # numbers of another make
                continue
            points.append(seen)
            for place, column in columns.items():
                column.append(leaves[place])
        if any(len(set(column)) > 1 for column in columns.values()):
            self._every.varying.add(note.depth)
        found: dict[Place, Any] = {}
        for place, column in columns.items():
            codes = [*pool, *(str(size.formula) for size in sizes_in(found.values()))]
            if type(column[0]) is torch.Size:
                parts = [self._fitted(part, points, codes, guess) for part in zip(*column, strict=True)]
                if any(type(part) is Size for part in parts):
                    found[place] = torch.Size(parts)
            elif type(number := self._fitted(column, points, codes, guess)) is Size:
                found[place] = number
            elif len(set(column)) > 1 and not waits_for_reads(self._step):
                told_from_now_on(self._step, note)
        return found

    def _fitted(
        self, column: Sequence[int], points: Sequence[tuple[int, ...]], pool: Iterable[str], guess: Iterable[str]
    ) -> int:
        """A number, or its formula."""
        number, counts = column[0], self._step.follower.counts
        varies = len(set(column)) > 1
        if varies:
            tables = {code: [Formula(code).at(point) for point in points] for code in pool}
            for formula in candidates(tables, column):
                return Size(number, formula, counts)
            for code, table in tables.items():  # another branch of ``max(1, n)``
                alike = {seen for seen, known in zip(column, table, strict=True) if seen == known}
                if table[0] == number and len(alike) > 1:
                    return Size(number, Formula(code), counts)
        if number > 1 and (varies or len(set(points)) == 1):  # what varies otherwise may do so behind a decision
            for code in guess:
                if Formula(code).at(points[0]) == number:
                    return Size(number, Formula(code), counts)
        return number


def _counts_of(step: StepState, source: Source) -> set[int]:
    """The counts on which the size of an operand depends, if calls gave or told it."""
    if type(source) is Made:
        return set(step.notes[source.depth].needs)
    told = (formulas_in(note) for note in step.notes if note.func is sized and note.args[0] == source)
    return {i for leaves in told for size in sizes_in(leaves.values()) for i in size.formula.names()}


def _is_plain(code: str) -> bool:
    """Whether graphs can compute a size of symbols."""
    return "math." not in code and "torch." not in code


def repr_of(choice: Mapping[Place, Any]) -> str:
    """A choice of numbers as text."""

    def text(leaf: Any) -> str:
        return str([text(n) for n in leaf]) if type(leaf) is torch.Size else str(getattr(leaf, "formula", leaf))

    return str([(place, text(leaf)) for place, leaf in choice.items()])
