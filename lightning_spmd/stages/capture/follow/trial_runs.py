"""The path of a step on fake tensors, for other counts than its own or for symbols, and what its calls do there."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_spmd import _private_api as private
from lightning_spmd.ir.counted import Ties, with_ties
from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.ir.sizes import Condition, Formula
from lightning_spmd.stages.capture.follow.notes import Made, Note, leaves_by_place, tensors_in
from lightning_spmd.stages.capture.follow.recorder import Recording, told_of
from lightning_spmd.stages.capture.follow.sizes import with_sizes
from lightning_spmd.stages.capture.follow.step_state import StepState
from lightning_spmd.stages.capture.follow.told import AT_SYMBOLS
from lightning_spmd.stages.capture.follow.whole_slices import SliceNumbers, slice_numbers, slices_that_matter
from lightning_spmd.stages.capture.optimizer.own_backward import leaves_of

_SLICES = torch.ops.aten.slice.Tensor, torch.ops.aten.alias.default
"""Indexing slices, and gives another tensor of the same memory where all slices take all."""
_SHARE, _SHARE_OF_SYMBOLS = 0.5, 4.0
"""Of what it takes to record a call, that is what it takes to make it again, and with symbols."""
_OF_A_CALL = 8
"""So many operators take no longer than one call; backward passes within a step have more."""
LIKE, OTHER_OPERATORS, OTHER_SIZES = object(), object(), object()
"""How far what a run does is alike."""


def at_counts(numbers: Sequence[Any], counts: Sequence[Any]) -> tuple[Any, ...]:
    """Numbers with formulas for some counts."""
    return tuple([n.at(counts) if isinstance(n, Formula) else n for n in numbers])


class Run:
    """The path on fake tensors.

    Args:
        step: the step.
        counts: numbers or symbols.
        mode: of the fake tensors.
        instead: what is called in place of some functions.

    Attributes:
        kind: of the last call: which of its operands it returned, with which its results share memory if anything is
            written in the step, whether it drew random numbers, and what it asked for sizes. Dropout returns its
            operand if that is empty, and ``bincount`` asks for none.
        gradients: that the last backward pass gave to calls that were taken for made.
        at: the depth of the next call.
        ended: the depth of the call at which it ended.
    """

    def __init__(
        self,
        step: StepState,
        counts: Sequence[Any],
        mode: Any = None,
        instead: Mapping[Any, Callable[..., Any]] = types.MappingProxyType({}),
    ) -> None:
        self._step, self.counts = step, counts
        self.kind: Any = None
        self.gradients: list[Tensor] = []
        self.at = 0
        self.ended: int | None = None
        self._assumed: list[Tensor] = []
        self._writes = any(note.writes for note in step.notes)
        self._share = _SHARE if mode is None else _SHARE_OF_SYMBOLS
        places = () if step.tree is None else step.tree.sizes.places
        self._recording = Recording(step, None, mode, list(zip(places, counts, strict=False)))
        self._recording.values.instead |= instead
        self._recording.values.number = lambda leaf: with_sizes(leaf, counts)

    def make(self, note: Note) -> list[Tensor]:
        """Make the next call. Returns its results."""
        recording, numbers, self.at = self._recording, self._step.numbers_of(note), note.depth + 1
        self._step.follower.recorded += _SHARE
        recording.below.seen, draws, count = [], recording.below.draws, recording.below.count
        with self._step.beside():
            recording.below.sized.begin(told_of(note, self.counts))
            with recording.active():
                out = recording.values.run(note, numbers)
            given = [] if note.reads else tensors_in(recording.values.arguments(note, numbers))
        self._step.follower.searched += self._share * max(1, (recording.below.count - count) / _OF_A_CALL)
        operands = {id(tensor): i for i, tensor in reversed(list(enumerate(given)))}
        memory = {private.storage_of(tensor): i for i, tensor in reversed(list(enumerate(given)))}
        made = tensors_in(out)
        shares = [memory.get(private.storage_of(tensor)) for tensor in made] if self._writes else []
        asked = tuple(recording.below.sized.asked)
        self.kind = [operands.get(id(tensor)) for tensor in made], shares, recording.below.draws != draws, asked
        return [recording.values.made[source] for source in note.made]

    def assume(self, results: Iterable[tuple[Note, Sequence[TensorSpec]]]) -> None:
        """Take calls for made, with results of these sizes."""
        values = self._recording.values
        with self._step.beside(), self._recording.active():
            for note, specs in results:
                for source, spec, trained in zip(note.made, specs, note.trained, strict=True):
                    shape, stride = (at_counts(numbers, self.counts) for numbers in (spec.shape, spec.stride))
                    made = torch.empty_strided(shape, stride, dtype=spec.dtype, device=spec.device)
                    values.made[source] = made.requires_grad_(trained)
                    self._assumed.append(made)
                    # nobody may write into leaves; a copy has no gaps, and to ask symbols for strides is to decide
                    if trained and all(type(n) is int for n in (*shape, *stride)):
                        copied = made.clone()
                        values.made[source] = copied if copied.stride() == stride else made
                values.done = note.depth + 1

    def backward(self, loss: Made) -> list[Tensor]:
        """The backward pass of a loss. Returns all results in it."""
        recording, self.at = self._recording, len(self._step.notes) + 1
        value, recording.below.seen = recording.values.of(loss), []
        with self._step.beside(), recording.active(), torch.autograd.set_multithreading_enabled(False):
            leaves = leaves_of([value])
            given = zip(leaves, torch.autograd.grad(value, leaves, allow_unused=True), strict=True)
            assumed = set(map(id, self._assumed))
            self.gradients = [gradient for leaf, gradient in given if gradient is not None and id(leaf) in assumed]
        return [tensor for *_, out in recording.below.seen for tensor in tensors_in(out)]

    def operators(self) -> tuple[list[Any], list[int]]:
        """The operators of the last call or backward pass with where they got their operands, and all numbers."""
        names, numbers, met, number = list[Any](), list[int](), dict[int, int](), itertools.count()
        for func, args, kwargs, out in self._recording.below.seen or ():
            operands = [met.setdefault(id(tensor), next(number, 0)) for tensor in tensors_in((args, kwargs))]
            made = tensors_in(out)
            met |= zip(map(id, made), number, strict=False)
            given = [leaf for _, leaf in leaves_by_place((args, kwargs)) if type(leaf) is int]
            names.append((func, operands, [tensor.ndim for tensor in made], len(given)))
            numbers += [*given, *(size for tensor in made for size in tensor.shape)]
        return names, numbers

    def computing(self) -> list[Any]:
        """The operators of the last call that give no views."""
        return [func for func, *_ in self.operators()[0] if not getattr(func, "is_view", False)]

    def slices_less(self, others: Sequence[Run]) -> bool:
        """Whether the last call is that of other runs, but that slices took all and were left out."""
        tables = [run.but_slices() for run in (self, *others)]
        (mine, ours, numbers), *theirs = tables
        if any(names != mine or ours >= slices for names, slices, _ in theirs):
            return False
        columns = zip(*(its for _, _, its in theirs), strict=True)
        return all(len(set(its)) > 1 or its[0] == own for own, its in zip(numbers, columns, strict=True))

    def but_slices(self) -> tuple[list[Any], int, list[int]]:
        """The operators of the last call that do not slice, how many do, and the numbers of the others."""
        names, numbers = self.operators()
        rest, left = list[int](), iter(numbers)
        for func, _, dimensions, given in names:
            its = list(itertools.islice(left, given + sum(dimensions)))
            rest += [] if func in _SLICES else its
        functions = [func for func, *_ in names]
        return [func for func in functions if func not in _SLICES], functions.count(_SLICES[0]), rest

    def slices(self, results: Iterable[Tensor] = ()) -> dict[int, SliceNumbers]:
        """The slices whose gradients matter (``whole_slices``) in the last call or backward pass, by number.

        Args:
            results: of it, that others get.
        """
        below = self._recording.below
        seen, below.seen = below.seen or [], None
        with self._step.beside(), self._recording.active(), torch.no_grad():
            found = {i: slice_numbers(seen, i) for i in slices_that_matter(seen, results)}
        below.seen = seen
        return found

    def end(self, depth: int) -> None:
        """It is another path from a call on."""
        self.ended = depth if self.ended is None else self.ended

    def close(self) -> None:
        """End what still waits in it."""
        self._recording.values.engine.close()


class OnSymbols:
    """The path with symbols, as far as it was made.

    Args:
        step: the step.
        open_: the counts that are symbols.
        pins: those that have one value.
        ties: those that follow from others.
        key: what it was made for.

    Attributes:
        made: of the calls so far, by depth: with which numbers, what torch decided, and Python of the sizes; None: it
            was taken for made.
    """

    def __init__(self, step: StepState, open_: Sequence[int], pins: Mapping[int, int], ties: Ties, key: Any) -> None:
        self.key, self.sizes = key, private.SymbolicSizes()
        made = {i: self.sizes.symbol(max(step.counts[i], 2)) for i in open_}
        mode = private.FakeTensorMode(allow_non_fake_inputs=True, shape_env=self.sizes.env)
        counts = with_ties([made.get(i, 0) for i in range(len(step.counts))], pins, ties)
        self.run = Run(step, counts, mode, AT_SYMBOLS)
        self.made: dict[int, tuple[str, list[Condition], set[str | None]] | None] = {}


def result_now(step: StepState, source: Made) -> Tensor:
    """A result with its strides in this step: a copy of one row keeps the gaps between rows, of more it does not."""
    run = Run(step, tuple(step.counts))
    try:
        return [run.make(note) for note in step.notes[: source.depth + 1]][-1][source.index]
    finally:
        run.close()


class Likeness:
    """Tells whether what is done for some counts is what is done for the samples.

    Args:
        names: of operators, with where they get their operands; None if the samples are not alike.
        numbers: in it: numbers, formulas, or None for what is not known.
    """

    def __init__(self, names: list[Any] | None, numbers: list[Formula | int | None]) -> None:
        self._names, self._numbers = names, numbers
        self.formulas = {number for number in numbers if isinstance(number, Formula)}

    def of(self, run: Run) -> Any:
        """How far the last call, or backward pass, of a run is alike."""
        names, numbers = run.operators()
        wanted = [n if n is None else n.at(run.counts) if isinstance(n, Formula) else n for n in self._numbers]
        if names != self._names:  # what would be smaller than nothing cannot be made
            return OTHER_SIZES if any((f.at(run.counts) or 0) < 0 for f in self.formulas) else OTHER_OPERATORS
        are_like = all(want is None or want == number for want, number in zip(wanted, numbers, strict=True))
        return LIKE if are_like else OTHER_SIZES
