"""The program of a step whose Python is done: its path, numbers and tensors, and the results still needed."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_spmd.ir.signature import OutputRole
from lightning_spmd.ir.sizes import Condition, Counts
from lightning_spmd.stages.capture.follow.counts import may_have, pins_of, told_in
from lightning_spmd.stages.capture.follow.notes import Note, Place, Source


@dataclass(frozen=True)
class Want:
    """A result that leaves the graph.

    Args:
        source: where it comes from.
        role: what it is for.
        after: the number of calls behind which it is told as it is then; None: as it is when the step ends.
        key: of a gradient the name of its parameter.
    """

    source: Source
    role: OutputRole
    after: int | None = None
    key: tuple[str, ...] = ()


@dataclass(frozen=True)
class Log:
    """A call of ``self.log`` with a value that is each rank's own, and becomes one of all ranks.

    Args:
        name: of the value.
        value: what is logged; True: a number of the step; None: what is all ranks' already, or stays this rank's.
        rows: ``batch_size=``; True: a number of the step; None: there is none.
        operation: by which the ranks' values become one: ``"mean"``, ``"sum"``, ``"min"`` or ``"max"``.
        source: ``file:line``.
    """

    name: str
    value: Want | bool | None
    rows: Want | bool | None
    operation: str
    source: str

    @property
    def has_number(self) -> bool:
        """Whether a number of the step is logged, or says how many rows it has."""
        return self.value is True or self.rows is True


@dataclass
class Live:
    """The running step's values that graphs take as inputs.

    Args:
        outside: tensors that the step did not make, in the order in which it met them.
        numbers: of calls, by depth and place.
        logged: numbers in calls of ``self.log``, by what they are there and the number of the call.
        counts: of results that are as large as the data say.
    """

    outside: Sequence[Tensor] = ()
    numbers: dict[tuple[int, Place], Any] = field(default_factory=dict[tuple[int, Place], Any])
    logged: dict[tuple[str, int], Any] = field(default_factory=dict[tuple[str, int], Any])
    counts: Sequence[int] = ()


@dataclass(frozen=True)
class Program:
    """One step's path.

    Args:
        notes: its calls.
        number: of the path, in this process.
        wants: what leaves the graph.
        loss: what ``training_step`` returned as its loss.
        free: the numbers of its calls, by depth and place, that are others in other steps.
        live: the tensors and numbers of this step, and of each later one that takes this path.
        logs: on a rank's own batch, what of it becomes all ranks'.
        is_beginning: it ends where Python reads, and nothing of what it changes lasts.
        for_all_sizes: whether its integers are formulas of the sizes of batches that vary.
        why_not: why each size has a path of its own; None where that is not known.
        counts: where runs of its graphs put the counts that they find; None of a step without any.
        samples: counts with which graphs are made that do for all; none: a graph is made for those of this step.
        at: the counts with which it is captured; None: with those of this step.
        added: to parameters' gradients, by backward passes within that of the loss, behind whose they are.
    """

    notes: Sequence[Note]
    number: int
    wants: tuple[Want, ...]
    loss: Source | None
    free: frozenset[tuple[int, Place]]
    live: Live
    logs: tuple[Log, ...] = ()
    is_beginning: bool = False
    for_all_sizes: bool = False
    why_not: str | None = None
    counts: Counts | None = None
    samples: Sequence[tuple[int, ...]] = ()
    at: Sequence[int] | None = None
    added: tuple[tuple[Source, Source], ...] = ()

    @functools.cached_property
    def reads(self) -> list[Note]:
        """The calls by which Python gets values."""
        return [note for note in self.notes if note.asks]

    @functools.cached_property
    def _of_counts(self) -> tuple[dict[int, int], list[Condition]]:
        return pins_of(self.notes), [condition for note in self.notes for condition in note.conditions]

    @property
    def has_sizes_alone(self) -> bool:
        """Whether all its counts are sizes of the batch."""
        return self.counts is not None and self.counts.length == len(self.counts.places)

    def may_have(self, counts: Sequence[int]) -> bool:
        """Whether a step with these counts, and maybe more, may take this path."""
        return may_have(counts, *self._of_counts)

    def line_of(self, tensor: Tensor) -> str | None:
        """Where this step met a tensor from outside that is none of the module's; None if it has not."""
        numbers = {number for number, live in enumerate(self.live.outside) if live is tensor}
        met = (note.source for note in self.notes for n, kind in note.met.items() if n in numbers and kind.name is None)
        return next(met, None)

    def handed(self) -> frozenset[int]:
        """The ``id`` of each result that Python was handed, and may have."""
        return frozenset(id(placeholder) for note in self.notes for placeholder in note.handed)

    @functools.cached_property
    def _numbers(self) -> dict[int, list[tuple[int, Place]]]:
        """The numbers that Python has computed since it read last, by the depth of a read; the end is one as well."""
        depths = [-1, *(note.depth for note in self.reads), len(self.notes)]
        return {
            end: sorted((key for key in self.free if begin < key[0] <= end), key=repr)
            for begin, end in itertools.pairwise(depths)
        }

    def numbers_before(self, depth: int) -> list[tuple[int, Place]]:
        """The numbers that Python computed between the read before and this one.

        Args:
            depth: of the read; the number of calls where Python is done.
        """
        return self._numbers[depth]

    def numbers_behind(self, read: Note) -> list[tuple[int, Place]]:
        """The numbers that Python computes between this read and the next one."""
        return self._numbers[min(depth for depth in self._numbers if depth > read.depth)]

    def told_behind(self, read: Note) -> list[int]:
        """The counts that Python tells between this read and the next one."""
        end = min((note.depth for note in self.reads if note.depth > read.depth), default=len(self.notes))
        # a call that asks for sizes itself has told before
        return told_in(self.notes[read.depth + 1 : end + 1])

    @property
    def key(self) -> tuple[Any, ...]:
        """The key under which a step finds its graph."""
        return self.number, self.free, len(self.wants), self.loss, self.logs, self.at
