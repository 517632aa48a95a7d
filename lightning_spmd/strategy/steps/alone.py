"""One rank reads a value and the others do not: ``if self.global_rank == 0: print(loss.item())``, ``@rank_zero_only``.

Ranks that meet at different places of the step exchange their calls. All ranks then run the calls that they have in
common as a graph, and the rank that is furthest behind continues with the values. Calls that this rank made for its
read alone are removed from its path, so the step's graph stays the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_spmd.ir.signature import OutputRole
from lightning_spmd.ir.stable_hash import stable_hash
from lightning_spmd.stages.capture.follow.engine import EngineCall
from lightning_spmd.stages.capture.follow.follower import Step
from lightning_spmd.stages.capture.follow.notes import Made, Note, Outside, Source, sources_in
from lightning_spmd.stages.capture.follow.program import Live, Program, Want

MOST_KNOWN = 64
"""Meetings in different places whose outcome is kept."""


class CallSummary(NamedTuple):
    """One call of a step, in the form in which ranks compare their calls.

    Args:
        words: function and arguments.
        sources: the sources of its tensors.
        met: number of outside tensors that the step had used before it.
        may_be_alone: whether it changes nothing in the step, so that one rank may execute it alone.
    """

    words: str
    sources: tuple[Source, ...]
    met: int
    may_be_alone: bool


class Alone(NamedTuple):
    """What all ranks do for the ranks that read alone.

    Args:
        ranks: the ranks that read alone.
        calls: number of calls that the steps of all ranks have in common.
        wants: the results of these calls that the reading ranks need.
    """

    ranks: tuple[int, ...]
    calls: int
    wants: tuple[Source, ...]


def told_by(step: Step) -> list[CallSummary]:
    """The calls of a step so far."""
    found: list[CallSummary] = []
    met = 0
    for note in step.notes:
        sources = tuple(sources_in((note.args, note.kwargs)))
        found.append(CallSummary(note.in_words(), sources, met, _may_be_alone(note, step)))
        met = max([met, *(number + 1 for number in note.met)])
    return found


def _may_be_alone(note: Note, step: Step) -> bool:
    in_parts = any(isinstance(step.outside[number], DTensor) for number in note.met)
    return not (in_parts or note.writes or note.draws or note.counts or isinstance(note.func, EngineCall))


def helped(sides: Sequence[tuple[bool, Sequence[CallSummary]]]) -> Alone | None:
    """Which ranks read alone, and what the others do for them; None if the ranks' steps are different.

    Args:
        sides: for each rank whether it reads, and its calls.
    """
    readers = sorted((len(calls), rank) for rank, (reads, calls) in enumerate(sides) if reads)
    if not readers:
        return None
    calls = sides[readers[0][1]][1]
    words = [call.words for call in calls]
    ranks = tuple(r for r, (reads, its) in enumerate(sides) if reads and [call.words for call in its] == words)
    others = [its for rank, (_, its) in enumerate(sides) if rank not in ranks]
    common = min((_in_common(words, its) for its in others), default=len(words))
    own = calls[common:]
    if not own or not all(call.may_be_alone for call in own):
        return None
    wants = [
        source
        for call in own
        for source in call.sources
        if not (type(source) is Made and source.depth >= common)
        and not (type(source) is Outside and source.number >= own[0].met)
    ]
    return Alone(ranks, common, tuple(dict.fromkeys(wants)))


def _in_common(words: Sequence[str], calls: Sequence[CallSummary]) -> int:
    """So many first calls are the same."""
    count = 0
    while count < min(len(words), len(calls)) and words[count] == calls[count].words:
        count += 1
    return count


def program_for(alone: Alone, step: Step) -> Program:
    """The program that computes the values: the beginning that the steps of all ranks have in common."""
    notes, numbers = step.notes[: alone.calls], step.numbers_between(0, alone.calls)
    live = Live(step.outside, numbers)
    wants = tuple(Want(source, OutputRole.LOGGED) for source in alone.wants)
    number = stable_hash((notes[-1].mark if notes else 0, repr(alone.wants)))
    return Program(notes, number, wants, None, frozenset(numbers), live, is_beginning=True)


def read_alone(alone: Alone, step: Step, values: Sequence[Tensor]) -> Sequence[Any]:
    """The values that a step reads alone. Its calls after the common ones are removed from its path.

    Args:
        alone: the ranks' agreement.
        step: the step, on one of the reading ranks.
        values: the values of ``alone.wants``.
    """
    told: Mapping[Source, Tensor] = dict(zip(alone.wants, values, strict=True))
    return step.leaves_path(alone.calls, told)
