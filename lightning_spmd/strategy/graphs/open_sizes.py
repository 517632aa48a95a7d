"""Which sizes of batches vary in a run, and which of them a graph should leave open."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_spmd.ir.sizes import Dimension
from lightning_spmd.stages.capture.batch.batch import Batch

_KEPT = 4
"""Batches of each kind whose sizes are kept, for messages and to see what varies."""
Shapes = tuple[tuple[int, ...], ...]


@dataclass
class _Kind:
    """Batches that are alike but for their sizes.

    Args:
        seen: sizes of some of them.
        patterns: the sets of sizes that were found to vary, each with those before.
    """

    seen: list[Shapes] = field(default_factory=list[Shapes])
    patterns: list[frozenset[Dimension]] = field(default_factory=list[frozenset[Dimension]])


class OpenSizes:
    """The batch sizes seen in a run, the same on all ranks.

    Args:
        rows: whether the first dimension may be left open too: on one device, where it is not split.
    """

    def __init__(self, *, rows: bool) -> None:
        self._rows = rows
        self._kinds: dict[Any, _Kind] = {}
        self._looked: tuple[Sequence[Tensor], Any] = (), ((), ())  # the last look, asked for thrice a step

    def keys(self, batch: Batch, split: tuple[int, ...]) -> list[tuple[Any, ...]]:
        """The keys of graphs with open sizes that may fit a batch, the newest first."""
        if not self._kinds:
            return []
        name, shapes = self._look(batch)
        kind = self._kinds.get(name)
        patterns = [] if kind is None else kind.patterns
        return [self._key(name, shapes, pattern, split) for pattern in reversed(patterns)]

    def note(self, batch: Batch) -> None:
        """Note the sizes of a batch for which a graph is about to be built."""
        name, shapes = self._look(batch)
        kind = self._kinds.setdefault(name, _Kind())
        if shapes in kind.seen:
            return
        known = kind.patterns[-1] if kind.patterns else frozenset[Dimension]()
        vary = {
            (position, dim)
            for before in kind.seen
            for position, (old, new) in enumerate(zip(before, shapes, strict=True))
            for dim, (was, now) in enumerate(zip(old, new, strict=True))
            if was != now
        }
        if not known >= vary:
            kind.patterns.append(known | vary)
        kind.seen = [*kind.seen[-_KEPT + 1 :], shapes]

    def wanted(self, batch: Batch) -> dict[Dimension, int]:
        """The sizes that graphs should leave open, with their values in this batch."""
        name, shapes = self._look(batch)
        kind = self._kinds.get(name)
        if kind is None or not kind.patterns:
            return {}
        return {(p, d): shapes[p][d] for p, d in sorted(_open(kind.patterns[-1], shapes))}

    def key(self, batch: Batch, split: tuple[int, ...]) -> tuple[Any, ...]:
        """The key of a graph that leaves all wanted sizes open."""
        name, shapes = self._look(batch)
        return self._key(name, shapes, self._kinds[name].patterns[-1], split)

    def describe(self, batch: Batch, places: Mapping[Dimension, int]) -> str:
        """Name the sizes that vary, with some of their values."""
        name, _ = self._look(batch)
        texts: list[str] = []
        for position, dim in places:
            sizes = ", ".join(str(n) for n in dict.fromkeys(s[position][dim] for s in self._kinds[name].seen))
            texts.append(f"batch{batch.paths[batch.tensors[position]]} dim {dim} ({sizes}, ...)")
        return ", ".join(texts)

    # ------------------------------------------------------------------ pieces
    def _look(self, batch: Batch) -> tuple[Any, Shapes]:
        """What batches that differ in size alone have in common, and the sizes."""
        tensors = batch.tensor_values
        if len(tensors) != len(self._looked[0]) or not all(map(operator.is_, tensors, self._looked[0])):
            whole = batch.cache_key(sizes=False)
            shapes = tuple(
                tuple(t.shape) if self._rows or batch.is_shared(i) else (-1, *t.shape[1:])
                for i, t in zip(batch.tensors, tensors, strict=True)
            )
            self._looked = tensors, (whole, shapes)
        return self._looked[1]

    def _key(self, name: Any, shapes: Shapes, pattern: frozenset[Dimension], split: tuple[int, ...]) -> tuple[Any, ...]:
        left_open = _open(pattern, shapes)
        closed = tuple(
            tuple(None if (position, dim) in left_open else size for dim, size in enumerate(shape))
            for position, shape in enumerate(shapes)
        )
        return name, closed, () if self._rows else split


def _open(pattern: frozenset[Dimension], shapes: Shapes) -> list[Dimension]:
    """The sizes of a pattern that a graph can leave open: operators treat 0 and 1 in ways of their own."""
    return [(position, dim) for position, dim in pattern if shapes[position][dim] > 1]
