"""One rank reads or keeps a value and the others do not: ``if self.global_rank == 0: print(loss.item())``.

Ranks that meet at different places of the step exchange their calls. All ranks then run the calls that they have in
common as a graph, and the rank that is furthest behind continues with the values. Calls that this rank made for its
read alone are removed from its path, so the step's graph stays the same on all ranks.

Where Python is done on all ranks and some have made calls behind those of all (``self.kept.append(loss.detach())``),
these calls are removed as well. The graph of all ranks gives what they take, and their ranks make them behind it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_spmd.ir.signature import OutputRole
from lightning_spmd.ir.stable_hash import stable_hash
from lightning_spmd.stages.capture.follow.engine import EngineCall
from lightning_spmd.stages.capture.follow.notes import Made, Note, Outside, Source, sources_in
from lightning_spmd.stages.capture.follow.program import Live, Program, Want
from lightning_spmd.stages.capture.follow.step import Step

MOST_KNOWN = 64
"""Meetings in different places whose outcome is kept."""


class CallSummary(NamedTuple):
    """One call of a step, in the form in which ranks compare their calls.

    Args:
        words: function and arguments.
        sources: the sources of its tensors.
        met: number of outside tensors that the step had used before it.
        may_be_alone: whether it changes nothing in the step, so that one rank may execute it alone.
        may_be_later: whether it may do so when the step is over: nothing that it gives is a view of other memory than
            the step's, and it does for all sizes for which its path does.
        takes_state: whether it meets a parameter or buffer, which are others when the step is over.
    """

    words: str
    sources: tuple[Source, ...]
    met: int
    may_be_alone: bool
    may_be_later: bool = False
    takes_state: bool = False


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


class KeptAlone(NamedTuple):
    """What all ranks do for the ranks that keep what they have computed alone.

    Args:
        calls: number of calls that the steps of all ranks have in common.
        wants: the results of these calls that the other calls take.
        takes_state: whether these meet parameters or buffers.
    """

    calls: int
    wants: tuple[Want, ...]
    takes_state: bool


def told_by(step: Step) -> list[CallSummary]:
    """The calls of a step so far."""
    found: list[CallSummary] = []
    met = 0
    for note in step.notes:
        sources = tuple(sources_in((note.args, note.kwargs)))
        alone, state = _may_be_alone(note, step), any(kind.name is not None for kind in note.met.values())
        later = alone and not note.reads and step.left_out.is_open_for(note)
        later = later and not any(type(root) is Outside for root, _ in note.roots)
        found.append(CallSummary(note.in_words(), sources, met, alone, later, state))
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
    return Alone(ranks, common, tuple(_taken_by(own, common)))


def kept_alone(sides: Sequence[tuple[int, Sequence[CallSummary]]]) -> KeptAlone | None:
    """What ranks keep alone whose Python is done on all ranks; None if the ranks' steps are different.

    Args:
        sides: for each rank how many first calls give all that its step needs, and its calls.
    """
    calls = min((its for _, its in sides), key=len)
    words, common = [call.words for call in calls], len(calls)
    own = [its[common:] for _, its in sides if len(its) > common]
    if not own or any(needed > common or _in_common(words, its) < common for needed, its in sides):
        return None
    if not all(call.may_be_later for its in own for call in its):
        return None
    wants = dict.fromkeys(source for its in own for source in _taken_by(its, common))
    state = any(call.takes_state for its in own for call in its)
    return KeptAlone(common, tuple(Want(source, OutputRole.LOGGED, common) for source in wants), state)


def _taken_by(own: Sequence[CallSummary], common: int) -> dict[Source, None]:
    """What calls of some ranks take that all ranks have."""
    return dict.fromkeys(
        source
        for call in own
        for source in call.sources
        if not (type(source) is Made and source.depth >= common)
        and not (type(source) is Outside and source.number >= own[0].met)
    )


def _in_common(words: Sequence[str], calls: Sequence[CallSummary]) -> int:
    """So many first calls are the same."""
    count = 0
    while count < min(len(words), len(calls)) and words[count] == calls[count].words:
        count += 1
    return count


def program_for(alone: Alone, step: Step, live: Live) -> Program:
    """The program that computes the values: the beginning that the steps of all ranks have in common.

    Args:
        alone: the ranks' agreement.
        step: the step.
        live: what graphs of such beginnings take of it.
    """
    notes, numbers = step.notes[: alone.calls], step.numbers_between(0, alone.calls)
    live.outside, live.numbers = step.outside, numbers
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
    return step.reads.leaves_path(alone.calls, told)
