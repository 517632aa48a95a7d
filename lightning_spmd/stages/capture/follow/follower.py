"""The known paths of a method: trees of noted calls, of all steps that have run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_spmd import _private_api as private
from lightning_spmd.ir.layout import layout_of
from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.ir.sizes import CountsOfStep, Dimension
from lightning_spmd.stages.capture.follow.engine import Begin, Saving
from lightning_spmd.stages.capture.follow.memory import Holders
from lightning_spmd.stages.capture.follow.notes import Note, Place
from lightning_spmd.stages.capture.follow.placeholders import Moulds
from lightning_spmd.stages.capture.follow.sizes import OpenTree
from lightning_spmd.stages.capture.follow.wrapped import Wrapped

RECORDED_AT_FIRST = 16
"""Of the steps that leave the known paths, if these are many."""
MANY_CALLS = 4096
"""Paths of so many calls together are many: to record a call takes some thirty times as long as to make it."""
_MOST_SEARCHED, _FOR_EACH_CALL = 16384, 24
"""So much may searches take at first, in calls that are recorded (some ten seconds), or so much for each call of a long
path; then what steps have earned for them. Each takes at most half of what is left."""
EARNED = 1 / 16
"""What a step earns with each of its calls: no more time than they take by themselves."""


class Follower:
    """The known paths of one method of a module.

    Args:
        names: gives the name of every parameter and buffer of the module and its optimizers, by ``id``.
        is_named: whether a tensor has this name now.
    """

    def __init__(self, names: Callable[[], dict[int, str]], is_named: Callable[[str, Tensor], bool]) -> None:
        self.given: list[Tensor] = []
        self.moulds = Moulds()
        self.shared: tuple[int | None, ...] = ()
        """For each of them the first one before it with which it has memory in common."""
        self._roots: dict[Any, Note] = {}
        self._trees: dict[Any, OpenTree] = {}
        self.names, self.is_named = names, is_named
        self.kinds: dict[Any, str] = {}
        self.counts = CountsOfStep()
        self.begins: dict[Any, Begin] = {}
        self.saving: dict[Any, Saving] = {}
        self.numbers: dict[Any, set[Place]] = {}
        """Where functions take tensors as numbers (``arange``, sizes of ``zeros``)."""
        self.refused: set[tuple[Any, ...]] = set()
        """Functions with the types of arguments for which Python is to ask the other side (``tensor == None``)."""
        self.sizes_at: dict[str, int] = {}
        """``file:line`` of reads whose whole numbers decide sizes, and how often a path did for one of these alone."""
        self.unused_at: dict[str, int] = {}
        """``file:line`` of reads of several whole numbers that calls have not got all, and how often that was seen,
        twice if they have got none."""
        self.told_at: dict[tuple[Any, str], int] = {}
        """Functions with ``file:line`` of calls whose numbers Python tells, since they follow from no other counts, and
        how often a path did for one of these numbers alone; below none if one does for all."""
        self.sizes_outside: dict[tuple[Any, str, Place], Sequence[int] | None] = {}
        """Sizes of tensors from outside by the call that met them, its ``file:line`` and the place; None if they
        differ, and the step tells them."""
        self.holders = Holders(names)
        self.wrapped = Wrapped()
        self.bound: dict[tuple[int, int], Tensor] = {}
        """The tensors on the host with which compiled notes compare, by number of the note and its own."""
        self.aliases: dict[Any, list[tuple[list[Tensor], int]] | None] = {}
        """Where placeholders are that share memory with a tensor or a result, by the call before and both sources."""
        self.may_transform = False
        """Whether a step has used transforms of torch.func: such steps may have to run again from their start."""
        self._left = 0
        self.recorded = 0.0
        """Calls that were recorded, of all steps, and by their share those that were made again for other counts."""
        self.searched = 0.0
        """Those made again so far, with symbols some times as much, less what steps since have earned."""

    def _key(self) -> tuple[Any, ...]:
        return tuple(
            [
                (t.shape, t.stride(), t.dtype, t.device, t.requires_grad, shared)
                for t, shared in zip(self.given, self.shared, strict=True)
            ]
        )

    def root(self) -> Note:
        """The root of the notes of steps whose batches have tensors like the given ones."""
        key = self._key()
        found = self._roots.get(key)
        if found is None:
            found = self._roots[key] = Note(-1)
            found.marked(found)
        return found

    def tree(self, places: Sequence[Dimension]) -> OpenTree | None:
        """The tree of steps with batches like the given tensors but for these sizes; None if each size has its own."""
        if not places or self._key() in self._roots:  # from before sizes were seen to vary
            return None
        key = tuple(places), _kind_of_batch(places, self._key())
        found = self._trees.get(key)
        if found is None:
            found = self._trees[key] = OpenTree(places)
        return None if found.has_failed else found

    def others(self, places: Sequence[Dimension]) -> list[tuple[tuple[int, ...], Note]]:
        """The roots of such steps with one set of sizes each, and these sizes."""
        mine = _kind_of_batch(places, self._key())
        return [
            (tuple([key[position][0][dim] for position, dim in places]), root)
            for key, root in self._roots.items()
            if len(key) == len(self.given) and _kind_of_batch(places, key) == mine
        ]

    def records_another(self) -> bool:
        """Whether a step that leaves all known paths, of which there are many, is recorded."""
        self._left += 1
        are_short = self.recorded <= MANY_CALLS
        # of later and of long ones fewer and fewer: a path that is taken often will be met
        return are_short and self._left <= RECORDED_AT_FIRST or self._left.bit_count() == 1

    def may_search(self, calls: int) -> float:
        """What a search for formulas of counts may take, in calls that are recorded.

        Args:
            calls: of its path.
        """
        return (max(_MOST_SEARCHED, _FOR_EACH_CALL * calls) - self.searched) / 2

    def forget_objects(self) -> None:
        """Forget the objects of the last step: the next one has others, and its comparisons are compiled again."""
        self.bound.clear()
        for note in self._notes():
            note.take = None

    def show_strides(self, path: Sequence[Note], stand_ins: Iterable[int]) -> None:
        """Placeholders have strides from now on: a step uses transforms of ``torch.func``.

        Args:
            path: that of a step under way, whose placeholders get some as well.
            stand_ins: positions of batch tensors that are placeholders, too.
        """
        if self.moulds.show_strides:
            return
        self.moulds.show_strides = True
        under_way = set(map(id, path))
        for note in self._notes():
            note.moulds = list(map(self.moulds.of, note.specs))
            note.spare.clear()
            if id(note) not in under_way:
                note.handed.clear()
                note.sized_for = ()
                continue
            if note.sizes is not None:
                sized = zip(note.moulds, note.sizes(self.counts.told), strict=True)
                note.moulds = [self.moulds.sized(mould, *size) for mould, size in sized]
            for handed, mould in zip(note.handed, note.moulds, strict=False):
                private.exchange(handed, mould.detach())
        for given in (self.given[position] for position in stand_ins):
            if not given.requires_grad:
                shape, stride = tuple(given.shape), torch.empty(given.shape, device="meta").stride()
                private.exchange(given, self.moulds.of(TensorSpec(shape, stride, given.dtype, given.device)))

    def let_go(self) -> None:
        """No step follows: what the last one handed out goes, and parameters that autograd has saved with it."""
        self.forget_objects()
        for note in self._notes():
            note.handed.clear()

    def _notes(self) -> Iterator[Note]:
        notes = [*self._roots.values(), *(tree.root for tree in self._trees.values())]
        while notes:
            note = notes.pop()
            notes += note.children
            yield note


def _kind_of_batch(places: Sequence[Dimension], tensors: Sequence[Any]) -> Any:
    """The kinds of tensors, given as (shape, strides, ...), without the sizes at these places."""
    found: list[Any] = []
    for position, (shape, stride, *rest) in enumerate(tensors):
        dims = {dim for at, dim in places if at == position}
        closed = tuple([None if dim in dims else size for dim, size in enumerate(shape)])
        found.append((closed, layout_of(shape, stride) if dims else stride, *rest))
    return tuple(found)
