"""Numbers that Python tells: a window's place, a length that was drawn.

Where calls of one line have other numbers in other steps, and nothing that is known gives them, they are counts of the
step like sizes that data decide: Python tells them by the call, and one graph does for all of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_spmd import _private_api as private
from lightning_spmd.stages.capture.follow.engine import EngineCall
from lightning_spmd.stages.capture.follow.matching import keeps_shapes
from lightning_spmd.stages.capture.follow.notes import Note, Place, leaf_at, leaves_by_place
from lightning_spmd.stages.capture.follow.step_state import StepState
from lightning_spmd.stages.capture.follow.worlds import CallByHand
from lightning_spmd.stages.capture.user_code import user_location

_MOST_TOLD = 8
"""Numbers that one call tells; each is one more of the path."""
_MOST_OF_STEP = 32
"""Counts beside sizes of the batch behind which a step tells no more: then it has told them in vain."""
_LOOKED_AT = 4
"""Paths of other steps in which what tells is looked for."""
_MOST_PATHS = 2
"""A call of which so many paths did for one number alone, and none for all, does not tell them."""


def tells(step: StepState, note: Note, numbers: Mapping[Place, Any]) -> bool:
    """Whether a call with other numbers than a known one is another call, that tells them.

    Args:
        step: the step.
        note: the known call.
        numbers: those of the new call that are others.
    """
    if not _may_tell(note.func) or not any(map(_is_count, numbers.values())):
        return False
    if _may_follow_from_reads(step):  # what was read is a count from then on
        return note.decides
    if note.decides:
        told_from_now_on(step, note)
    return _is_told(step, note)


def told_from_now_on(step: StepState, note: Note) -> None:
    """Numbers of a call follow from nothing that is known."""
    if _may_tell(note.func):
        step.follower.told_at.setdefault((note.func, note.source), 0)


def does_for_all(step: StepState, note: Note) -> None:
    """A path does for all numbers of a call that tells them."""
    step.follower.told_at[note.func, note.source] = -_MOST_PATHS


def does_for_one(step: StepState, note: Note) -> None:
    """A path does for one of these numbers alone."""
    key = note.func, note.source
    if step.follower.told_at.get(key, -1) >= 0:
        step.follower.told_at[key] += 1


def in_vain(step: StepState, func: Any, source: str) -> bool:
    """Whether a call of some line tells its numbers in vain, or paths of it did for one of these alone."""
    return step.follower.told_at.get((func, source), 0) >= _MOST_PATHS


def _unused(step: StepState) -> set[str]:
    """``file:line`` of reads whose numbers are no counts: calls get none, or not all of them."""
    return {source for source, seen in step.follower.unused_at.items() if seen > 1}


def waits_for_reads(step: StepState) -> bool:
    """Whether whole numbers of a step have been read that may be counts of later ones."""
    unused = _unused(step)
    return any(note.whole is not None and not note.counts and note.source not in unused for note in step.notes)


def _may_follow_from_reads(step: StepState) -> bool:
    """Whether Python has read whole numbers that may become counts. What it passes on may follow from them."""
    known = step.follower.sizes_at.keys() | _unused(step)
    return any(note.whole is not None and note.source not in known for note in step.notes)


def _is_told(step: StepState, note: Note) -> bool:
    return step.follower.told_at.get((note.func, note.source), _MOST_PATHS) < _MOST_PATHS


def told_numbers(
    step: StepState, others: Sequence[Note], func: Any, args: Any, kwargs: Any
) -> dict[Place, tuple[Place, int]]:
    """Places of numbers of a new call that are counts, each with the place of the one that is so much less, or its own.

    Args:
        step: the step.
        others: known calls that differ from it in numbers alone.
        func: what is called.
        args: its arguments.
        kwargs: likewise.
    """
    if _may_follow_from_reads(step):
        return {}
    others = list({id(note): note for note in (*others, *_in_known_paths(step, func, args, kwargs))}.values())
    if not step.has_counts:  # of others there may be a formula
        for note in others:
            told_from_now_on(step, note)
    known = [note for note in others if _is_told(step, note)]
    found, differ = dict[Place, tuple[Place, int]](), dict[Place, list[int]]()
    for place, leaf in leaves_by_place((args, kwargs)) if known else ():
        if not _is_count(leaf):
            continue
        column = [leaf, *(int(leaf_at((note.args, note.kwargs), place)) for note in known)]
        if len(set(column)) == 1:
            continue
        apart = ((base, {n - its for n, its in zip(column, of, strict=True)}) for base, of in differ.items())
        base, more = next(((base, more) for base, more in apart if len(more) == 1), (place, {0}))
        found[place] = base, more.pop()
        if base == place:
            differ[place] = column
    if found and len(step.counts) - step.opened >= _MOST_OF_STEP:
        telling = ((note.func, note.source) for note in step.notes if note.told)
        step.follower.told_at |= dict.fromkeys([*telling, *((note.func, note.source) for note in known)], _MOST_PATHS)
        return {}
    return found if len(differ) <= _MOST_TOLD else {}


def _in_known_paths(step: StepState, func: Any, args: Any, kwargs: Any) -> list[Note]:
    """The calls of some known paths that were the same one of their line.

    Behind a number that is told for the first time all calls are new. Were those of other numbers recorded with these,
    each step would reveal one number more. And two windows of one length may have it by chance.
    """
    key = func, user_location() or ""
    if step.follower.told_at.get(key, _MOST_PATHS) >= _MOST_PATHS:
        return []
    mine = [(place, _is_whole(leaf)) for place, leaf in leaves_by_place((args, kwargs))]
    before, found = sum((note.func, note.source) == key for note in step.notes), list[Note]()
    for path in itertools.islice(_known_paths(step), _LOOKED_AT):
        its = [note for note in path if (note.func, note.source) == key][before : before + 1]
        theirs = ([(p, _is_whole(n)) for p, n in leaves_by_place((note.args, note.kwargs))] for note in its)
        found += its if mine in theirs else []
    return found


def _known_paths(step: StepState) -> Iterator[list[Note]]:
    """Some paths of other steps, the first of each that leaves this one at a call."""
    for depth, parent in enumerate([step.root, *step.notes]):
        mine = step.notes[depth] if depth < len(step.notes) else None
        for child in [child for child in parent.children if child is not mine]:
            path = [*step.notes[:depth], child]
            while path[-1].children:
                path.append(path[-1].children[0])
            yield path


def _may_tell(func: Any) -> bool:
    return not (keeps_shapes(func) or isinstance(func, (EngineCall, CallByHand)))


def _is_whole(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool)


def _is_count(number: Any) -> bool:
    return type(number) is int and number >= 0


def at_symbols(tensor: Tensor, index: Any) -> Tensor:
    """``tensor[index]`` with symbols among the positions, of which torch's indexing in C++ would take the very numbers.

    Args:
        tensor: what is indexed.
        index: as Python has it.
    """
    parts: tuple[Any, ...] = index if type(index) is tuple else (index,)
    if not any(map(private.is_symbol, parts)) or any(isinstance(part, (Tensor, bool)) for part in parts):
        return tensor[index]
    taken, dim, dims = sum(part is not None and part is not Ellipsis for part in parts), 0, list[int]()
    for part in parts:
        dims += [dim] * private.is_symbol(part)
        dim += tensor.ndim - taken if part is Ellipsis else type(part) is not int
    found = tensor[tuple(slice(part, part + 1) if private.is_symbol(part) else part for part in parts)]
    for dim in reversed(dims):
        found = found.select(dim, 0)
    return found


def put_at_symbols(tensor: Tensor, index: Any, value: Any) -> None:
    """``tensor[index] = value`` likewise."""
    if _gives_view(index):
        place = at_symbols(tensor, index)
        place.copy_(value) if isinstance(value, Tensor) else place.fill_(value)
    else:
        tensor[index] = value


def put_number(tensor: Tensor, index: Any, value: Any) -> None:
    """``tensor[index] = value``, of which a whole number stays one: indexing in C++ makes a tensor of it.

    Args:
        tensor: what is written into.
        index: as Python has it.
        value: what is put there.
    """
    if _gives_view(index) and _is_whole(value) and tensor.dtype is not torch.float16:  # which may become infinite
        tensor[index].fill_(value)
    else:
        tensor[index] = value


def _gives_view(index: Any) -> bool:
    """Whether what an index takes is no copy."""
    parts: tuple[Any, ...] = index if type(index) is tuple else (index,)
    return all(
        part is None or part is Ellipsis or isinstance(part, slice) or _is_whole(part) or private.is_symbol(part)
        for part in parts
    )


AT_SYMBOLS = {Tensor.__getitem__: at_symbols, Tensor.__setitem__: put_at_symbols}
