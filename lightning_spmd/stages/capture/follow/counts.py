"""Results that are as large as the data say (``x[mask]``, ``nonzero``): a call and a read of the size at once.

Such a call is computed in a form that has the size as an argument (``data_sizes``). The sizes of a step are its
*counts*, in the order in which the step meets them. All later sizes are formulas of counts. To find them, the notes are
run again on fake tensors with a few other counts, zero and one among them; a size that differs gets the formula that
fits its values (``ir.counted``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_spmd import _private_api as private
from lightning_spmd.ir.counted import CountFits
from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.ir.sizes import Condition, Formula, Size
from lightning_spmd.ir.unify import Apart
from lightning_spmd.stages.capture.follow.engine import EngineCall
from lightning_spmd.stages.capture.follow.matching import keeps_shapes
from lightning_spmd.stages.capture.follow.notes import Note, formulas_in, leaf_at
from lightning_spmd.stages.capture.follow.worlds import CallByHand
from lightning_spmd.stages.capture.sizes.data_sizes import DataSizes

Told = Mapping[int, Sequence[int]]
"""The numbers of one call, by slot (``DataSizes.slot``)."""


class CountsWanted(Exception):
    """Control flow: the result of a call on fake tensors has a data-dependent size that was not read yet."""


class FormsOnFakes:
    """Calls on fake tensors with given counts.

    Args:
        call: performs one.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self._told: Told = {}
        self.asked: list[tuple[int, int]] = []
        self.forms = DataSizes(call, self._numbers)

    def begin(self, told: Told) -> None:
        """Begin the next call of the step, with these numbers."""
        self._told, self.asked, self.forms.slot = told, [], 0

    def _numbers(self, *tensors: Tensor) -> list[int]:
        slot = self.forms.slot
        if slot not in self._told:
            raise CountsWanted
        self.asked.append((slot, len(tensors)))
        return list(self._told[slot])


class _Counting(private.TorchDispatchMode):
    """Collects the counts of calls on real tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, list[int]] = {}
        self._forms = DataSizes(lambda func, *args, **kwargs: func(*args, **kwargs), self._numbers, knows_again=False)

    def _numbers(self, *tensors: Tensor) -> list[int]:
        found = self.found[self._forms.slot] = [int(tensor) for tensor in tensors]
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        form = self._forms.form_of(func, args, kwargs or {})
        return func(*args, **(kwargs or {})) if form is None else form()


def counted(func: Any, args: Any, kwargs: Any) -> Told:
    """The counts of a call on real tensors. The call may write into them."""
    with private.disable_dispatch_modes(), _Counting() as counting:
        func(*args, **kwargs)
    return counting.found


def specs_for(note: Note, made: Sequence[Sequence[TensorSpec]], fits: CountFits) -> list[TensorSpec] | None:
    """The specs of a call's results, with formulas for sizes that differ; None if none does.

    Args:
        note: the call.
        made: the specs of its results, for each sample.
        fits: finds formulas.

    Raises:
        Apart: a size has none.
    """
    if all(specs == made[0] for specs in made[1:]):
        return None

    def number(values: tuple[int, ...]) -> Any:
        if len(set(values)) == 1:
            return values[0]
        formula = fits.formula(values)
        fits.learn(formula)  # strides are multiples of sizes
        return formula

    found: list[TensorSpec] = []
    for specs in zip(*made, strict=True):
        if len({len(spec.shape) for spec in specs}) > 1:
            raise Apart(f"what {note.name} gives has more or fewer dimensions")
        shape = tuple(number(sizes) for sizes in zip(*(s.shape for s in specs), strict=True))
        stride = tuple(number(steps) for steps in zip(*(s.stride for s in specs), strict=True))
        found.append(TensorSpec(shape, stride, specs[0].dtype, specs[0].device))
    return found


def pins_of(notes: Iterable[Note]) -> dict[int, int]:
    """The counts that must be equal in all steps on a path."""
    return {i: count for note in notes for i, count in note.pins.items()}


def tied(tie: tuple[int, Formula]) -> Condition:
    """The condition that a count follows from others."""
    count, formula = tie
    return Condition(Formula(f"s{count} == {formula}"))


def ties_of(notes: Iterable[Note]) -> dict[int, Formula]:
    """The counts that follow from others in all steps on a path, with how."""
    return {i: formula for note in notes for i, formula in note.ties.items()}


def told_in(notes: Iterable[Note]) -> list[int]:
    """The counts that Python tells on a path, or a part of one."""
    return [i for note in notes for i in note.told.values()]


def may_have(counts: Sequence[int], pins: Mapping[int, int], conditions: Iterable[Condition]) -> bool:
    """Whether the counts of a step, as far as they are known, are those that are required."""
    are_pinned = all(i >= len(counts) or counts[i] == count for i, count in pins.items())
    return are_pinned and all(condition.holds(counts) for condition in conditions)


def sizes_in(leaves: Iterable[Any]) -> Iterator[Size]:
    """The numbers with formulas in leaves of arguments."""
    for leaf in leaves:
        yield from (part for part in (leaf if type(leaf) is torch.Size else (leaf,)) if type(part) is Size)


def formulas_of(notes: Iterable[Note]) -> Iterator[tuple[int, Formula]]:
    """The formulas of numbers and of sizes on a path, and in the backward passes of its losses, with their depths."""
    notes = list(notes)
    for note in notes:
        yield from ((note.depth, size.formula) for size in sizes_in(formulas_in(note).values()))
        yield from ((len(notes), formula) for formula in note.behind or ())
        sizes = [number for spec in note.open or () for number in (*spec.shape, *spec.stride)]
        yield from ((note.depth, number) for number in sizes if isinstance(number, Formula))


def counts_in(specs: Sequence[TensorSpec]) -> frozenset[int]:
    """The counts on which sizes depend."""
    numbers = [number for spec in specs for number in (*spec.shape, *spec.stride)]
    return frozenset(i for number in numbers if isinstance(number, Formula) for i in number.names())


def with_open_number(notes: Iterable[Note]) -> Note | None:
    """The first call with a whole number that is another one in other steps, and decides what is done with tensors.

    A window (``x[:, start : start + 8]``) would be elsewhere, or nowhere, in what graphs for all counts are made with,
    and what torch decides on sizes was looked at with another number. Of a number that is not whole such a decision is
    one of the graph's, and each step looks at how large the call's results are.
    """
    calls = filter(has_open_number, notes)
    whole = (n for n in calls if any(isinstance(leaf_at((n.args, n.kwargs), place), int) for place in n.free))
    return next(whole, None)


def has_open_number(note: Note) -> bool:
    """Whether a number of a call is another one in other steps, on which more may depend than values."""
    return bool(note.free) and not (isinstance(note.func, (EngineCall, CallByHand)) or keeps_shapes(note.func))


def compiled_specs(specs: Sequence[TensorSpec]) -> Callable[[Sequence[int]], tuple[tuple[Any, Any], ...]]:
    """A function that gives shape and strides of each result from the counts of a step."""

    def text(numbers: Sequence[Any]) -> str:
        codes = [n.of("counts") if isinstance(n, Formula) else repr(n) for n in numbers]
        return f"({''.join(f'{code}, ' for code in codes)})"

    pairs = "".join(f"({text(spec.shape)}, {text(spec.stride)}), " for spec in specs)
    return eval(f"lambda counts: ({pairs})", {"math": math, "torch": torch})
