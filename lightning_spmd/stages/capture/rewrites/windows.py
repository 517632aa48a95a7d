"""``as_strided`` as windows along dimensions, where it is no more than that: Longformer's chunks that overlap.

    x.as_strided((rows, 7, 4, d), (s0, 2 * s1, s1, 1))    =    x.unfold(1, 4, 2).movedim(-1, 2)

What is read by place in memory cannot be split over ranks where the rows are not outermost there, and neither can its
gradient, which is added up in one flat tensor. The same view by dimensions can.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor


def as_windows(
    source: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Tensor | None:
    """The view that ``as_strided`` gives, made of views along dimensions; None if there is no such way.

    Args:
        source: what is viewed.
        size: of the view.
        stride: of the view.
        storage_offset: of the view; None: the source's.
    """
    if storage_offset not in (None, source.storage_offset()) or 0 in source.shape or 0 in source.stride():
        return None
    dims, seen = (list(zip(*each, strict=True)) for each in ((source.shape, source.stride()), (size, stride)))
    if dims[:1] != seen[:1]:
        return None  # rows stay rows
    parts = None if not dims else _parts(dims[1:], seen[1:])
    if parts is None:
        return None
    found, dim = source.view([source.shape[0], *(part.size for part in parts)]), 1
    for part in parts:
        if part.windows:
            found = found.narrow(dim, 0, (part.windows - 1) * part.every + part.width)
            found = found.unfold(dim, part.width, part.every).movedim(-1, dim + 1)
        dim += 2 if part.windows else 1
    same = (found.shape, found.stride(), found.storage_offset())
    return found if same == (tuple(size), tuple(stride), source.storage_offset()) else None


@dataclass(frozen=True)
class _Part:
    """Some neighbouring dimensions of the source as one, and how they are seen.

    Args:
        size: of that dimension.
        windows: how many there are of them; 0: it is seen as it is.
        width: of a window.
        every: so many entries a new window begins.
    """

    size: int
    windows: int = 0
    width: int = 0
    every: int = 1


_Dims = list[tuple[int, int]]


def _parts(source: _Dims, view: _Dims) -> list[_Part] | None:
    """How dimensions (size, stride) of a source are seen in a view, from the left; None if they are not so."""
    if not source:
        return None if view else []
    count, step = 1, source[0][1]
    for taken, (size, inner) in enumerate(source, 1):
        if taken > 1 and size * inner != step:
            return None
        count, step = count * size, inner
        for part, seen in _seen(count, step, view):
            rest = _parts(source[taken:], view[seen:])
            if rest is not None:
                return [part, *rest]
    return None


def _seen(count: int, step: int, view: _Dims) -> Iterator[tuple[_Part, int]]:
    """The ways in which the first dimensions of a view look at one dimension, and how many they are."""
    if view and view[0] == (count, step):
        yield _Part(count), 1
    if len(view) > 1 and view[1][1] == step and view[0][1] % step == 0:
        (windows, between), (width, _) = view[:2]
        every = between // step
        if (windows - 1) * every + width <= count:
            yield _Part(count, windows, width, every), 2
