"""Masks that are equal because they are computed in the same way: ``logits[y > 0], y[y > 0]``.

Two calls give equal results if they are the same function of equal operands, and no call in between writes into these.
The rows that such masks choose, and their number, are then found once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from lightning_spmd.ir.sizes import Size
from lightning_spmd.stages.capture.follow.engine import EngineCall
from lightning_spmd.stages.capture.follow.matching import is_torchs, keeps_shapes, same_constant
from lightning_spmd.stages.capture.follow.notes import SOURCES, Made, Note, Place, Source, leaves_by_place, sources_in
from lightning_spmd.stages.capture.follow.sizes import is_like
from lightning_spmd.stages.capture.follow.worlds import CallByHand

_MASKS = (torch.bool, torch.uint8)


def same_before(
    note: Note,
    path: Sequence[Note],
    siblings: Sequence[Note],
    root_of: Callable[[Source], Any],
    *,
    sizes_vary: bool,
) -> int | None:
    """The depth of the call that made the same masks before; None if there is none, or nothing is a mask.

    The numbers of calls on which that depends are from then on what they are: with others these are other calls.

    Args:
        note: a new call.
        path: those before it.
        siblings: those that came in its place in other steps.
        root_of: gives what a tensor shares memory with.
        sizes_vary: those of the batch do.
    """
    note.varies = any(_differs_from(sibling, note) for sibling in siblings)
    if not any(spec.dtype in _MASKS for spec in note.specs):
        return None
    calls = [*path, note]
    for call in calls:
        if call.kin is None:
            call.kin = _kin(call, calls)
    for before in reversed(path):
        search = _Search(calls, root_of, sizes_vary=sizes_vary)
        if before.kin == note.kin and search.is_same(before, note) and search.are_unwritten(before, note.depth):
            for relied_on in search.found:
                relied_on.plain.update(place for place, _ in _numbers_in(relied_on))
            return before.depth
    return None


def _kin(note: Note, path: Sequence[Note]) -> int:
    """A hash that calls have in common if they are the same functions of what is not computed in the step."""
    sources = sources_in((note.args, note.kwargs))
    return hash((note.func, *[(path[s.depth].kin, s.index) if type(s) is Made else s for s in sources]))


def _numbers_in(note: Note) -> Iterator[tuple[Place, Any]]:
    return ((p, leaf) for p, leaf in leaves_by_place((note.args, note.kwargs)) if type(leaf) in (int, float))


def _differs_from(known: Note, note: Note) -> bool:
    """Whether a call equals a known one except for numbers that must not differ."""
    if not known.plain or not is_like(known, note):
        return False
    numbers = dict(_numbers_in(note))
    return any(place in known.plain and not same_constant(leaf, numbers[place]) for place, leaf in _numbers_in(known))


class _Search:
    """Compares calls of a path.

    Args:
        path: the calls.
        root_of: gives what a tensor shares memory with.
        sizes_vary: those of the batch do.

    Attributes:
        found: the calls on which the answer depends.
    """

    def __init__(self, path: Sequence[Note], root_of: Callable[[Source], Any], *, sizes_vary: bool) -> None:
        self._path, self._root_of, self._vary = path, root_of, sizes_vary
        self.found: list[Note] = []
        self._pending: list[tuple[Note, Note]] = []

    def is_same(self, one: Note, other: Note) -> bool:
        """Whether two calls give equal results; the first one is the earlier."""
        self._pending = [(one, other)]
        compared: set[tuple[int, int]] = set()
        while self._pending:
            one, other = self._pending.pop()
            if (one.depth, other.depth) not in compared:
                compared.add((one.depth, other.depth))
                if not self._are_like(one, other):
                    return False
        return True

    def _are_like(self, one: Note, other: Note) -> bool:
        """Whether two calls are the same but for tensors that are still to be compared."""
        if one.depth >= other.depth or one.func != other.func or one.around != other.around or other.counts:
            return False
        if not all(map(is_repeatable, (one, other))):
            return False
        self.found += one, other
        return self._are_same(one.args, other.args, one, other) and self._are_same(one.kwargs, other.kwargs, one, other)

    def _are_same(self, mine: Any, its: Any, one: Note, other: Note) -> bool:
        """Whether arguments of two calls are the same."""
        if isinstance(mine, SOURCES):
            return isinstance(its, SOURCES) and self._is_same_tensor(mine, its, one, other)
        kind = type(mine)
        if kind is not type(its):
            return False
        if kind is slice:
            return all(self._are_same(getattr(mine, k), getattr(its, k), one, other) for k in ("start", "stop", "step"))
        if isinstance(mine, dict):
            return list(mine) == list(its) and all(self._are_same(mine[k], its[k], one, other) for k in mine)
        if isinstance(mine, (tuple, list)) and kind is not torch.Size:
            pairs = zip(mine, its, strict=False)
            return len(mine) == len(its) and all(self._are_same(a, b, one, other) for a, b in pairs)
        may_differ = type(mine) is Size or (self._vary and _may_follow_from_sizes(mine, one))
        return not may_differ and same_constant(mine, its)

    def _is_same_tensor(self, mine: Source, its: Source, one: Note, other: Note) -> bool:
        if type(mine) is type(its) and mine == its:
            return self._is_unwritten(mine, one.depth, other.depth)
        if type(mine) is not Made or type(its) is not Made or mine.index != its.index:
            return False
        if not all(self._is_unwritten(made, made.depth, other.depth) for made in (mine, its)):
            return False
        self._pending.append((self._path[mine.depth], self._path[its.depth]))
        return True

    def are_unwritten(self, note: Note, end: int) -> bool:
        """Whether the results of a call are unchanged until another call."""
        return all(self._is_unwritten(made, note.depth, end) for made in note.made)

    def _is_unwritten(self, source: Source, begin: int, end: int) -> bool:
        """Whether no call between two others writes into the tensor's memory."""
        root = self._root_of(source)
        between = self._path[begin + 1 : end]
        return not any(root in note.writes or isinstance(note.func, (EngineCall, CallByHand)) for note in between)


def is_repeatable(note: Note) -> bool:
    """Whether a call's result depends on its arguments alone, in all steps on the path."""
    is_call = is_torchs(note.func) and not isinstance(note.func, (EngineCall, CallByHand))
    return is_call and not (note.reads or note.draws or note.writes or note.free or note.varies)


def _may_follow_from_sizes(leaf: Any, note: Note) -> bool:
    """Whether a leaf may be another number in steps of other sizes on the same path."""
    return type(leaf) is torch.Size or (type(leaf) is int and leaf > 1 and not keeps_shapes(note.func))
