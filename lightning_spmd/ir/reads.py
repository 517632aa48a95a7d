"""Numbers that Python reads from tensors while a graph runs, and its decisions on them.

    if loss > 1: ...        read = _local_scalar_dense(loss); holds(read > 1, True, "model.py:12", (0,), read)

A graph holds for the decisions that were taken when it was captured. ``holds`` asks in the middle of a run whether
this step's numbers lead to the same ones. If not, :class:`ReadMiss` ends the run before it has changed anything that
outlives it, and hands on what was read: another graph of the same step takes over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from lightning_spmd._private_api import FakeTensor
from lightning_spmd.ir.sizes import Counts

Number = bool | int | float
READ = torch.ops.aten._local_scalar_dense.default  # noqa: SLF001 - an operator's public name


class ReadMiss(Exception):
    """A decision differs from the captured one; nothing has been changed.

    Args:
        place: ``file:line`` of the decision.
        seen: its value now.
        expected: its captured value.
        values: the values read so far, by the number of the read.
    """

    def __init__(self, place: str, seen: Number, expected: Number, values: Mapping[int, Number]) -> None:
        super().__init__(f"a value that is read at {place} changed from {expected!r} to {seen!r}")
        self.values = dict(values)


def holds(seen: Number, expected: Number, place: str, numbers: Sequence[int], *values: Number) -> None:
    """Ask whether a decision is the captured one.

    Args:
        seen: the value that Python decides with.
        expected: its value at capture.
        place: ``file:line`` of the decision.
        numbers: the numbers of the remaining reads.
        values: all values read so far.

    Raises:
        ReadMiss: it differs.
    """
    if seen != expected and (seen == seen or expected == expected):  # NaN is as NaN was
        raise ReadMiss(place, seen, expected, dict(zip(numbers, values, strict=True)))


class HandedCounts(NamedTuple):
    """Counts in a graph that Python needs.

    Args:
        counts: all counts of the graph.
        first: index of the first count here.
        number: how many counts are here.
        told: for a run that begins after Python is done, returns what Python was told.
        place: ``file:line`` of the call whose result has this size.
        chosen: how many of each this rank holds where ranks hold parts, for the counts with which the graph is made;
            empty in a graph for the counts of one step.
    """

    counts: Counts
    first: int
    number: int
    told: Callable[[], Sequence[int]]
    place: str
    chosen: Sequence[int] = ()


class HandOver:
    """Hands values to Python in the middle of a run and receives the numbers that Python has then.

    A run may end here, as at a decision, because Python may take another path than the graph.

    Args:
        number: index among the graph's hand-overs.
        numbers: for a run that begins after Python is done, returns the numbers.
        counts: whether Python gets whole numbers on which sizes in the graph depend.
        by_rank: positions of the counts of which this rank's own number is a value too, behind all counts. Python does
            not get it.
        told: indices of the counts that Python tells behind it, and before it reads again.
    """

    def __init__(
        self,
        number: int,
        numbers: Callable[[], tuple[Number, ...]],
        counts: HandedCounts | None = None,
        by_rank: Sequence[int] = (),
        told: Sequence[int] = (),
    ) -> None:
        self.number, self._numbers, self._counts, self._by_rank = number, numbers, counts, tuple(by_rank)
        self._told = tuple(told)
        self.__name__ = f"hand_over_{number}"

    def counting_by_rank(self, positions: Sequence[int]) -> HandOver:
        """The same in a rank's graph, which counts what this rank holds as well."""
        return HandOver(self.number, self._numbers, self._counts, positions, self._told)

    def chosen(self, position: int) -> tuple[int, int] | None:
        """(count, how many this rank holds of it at capture) of a value; None of one that ranks hold no parts of."""
        counts = self._counts
        return None if counts is None or not counts.chosen else (counts.first + position, counts.chosen[position])

    def handed(self, values: Sequence[torch.Tensor]) -> Sequence[Any]:
        """The values that Python gets."""
        if self._counts is None:
            return values
        found = [int(number) for value in values for number in value.flatten()]
        counts, first, number = self._counts.counts, self._counts.first, len(found) - len(self._by_rank)
        counts.put(first, found[: min(number, self._counts.number)])  # a list may be another one's, and longer
        for position, own in zip(self._by_rank, found[number:], strict=True):
            counts.put(counts.length + first + position, [own])
        return found[:number]

    def __call__(self, *values: torch.Tensor) -> tuple[Number, ...]:
        """The numbers.

        Raises:
            ReadMiss: Python was told other counts.
        """
        counts = self._counts
        # none if Python is done, and fake ones, of which nobody counts, ask nothing
        if counts is not None and values and not any(isinstance(value, FakeTensor) for value in values):
            for seen, told in zip(self.handed(values), counts.told(), strict=True):
                if seen != told:
                    raise ReadMiss(counts.place, seen, told, {})
        return self._numbers()

    def counted(self) -> list[int]:
        """Indices of the counts that are known behind it."""
        if self._counts is None:
            return list(self._told)
        first, number = self._counts.first, self._counts.number
        return [
            *self._told,
            *range(first, first + number),
            *(self._counts.counts.length + first + p for p in self._by_rank),
        ]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HandOver) and other.number == self.number  # of graphs of one step

    def __hash__(self) -> int:
        return self.number

    def __repr__(self) -> str:
        return self.__name__


def hands_over(node: fx.Node) -> bool:
    """Whether a node hands values to Python."""
    return isinstance(node.target, HandOver)


def is_check(node: fx.Node) -> bool:
    """Whether a run may end at a node: it asks if a decision still holds, or lets Python go on."""
    return node.target is holds or hands_over(node)


def checks_of(graph: fx.Graph) -> list[fx.Node]:
    """All decisions in a graph, in order."""
    return [node for node in graph.nodes if is_check(node)]
