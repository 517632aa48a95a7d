"""How one global tensor lies on the ranks of one mesh axis.

A *placement* describes one (tensor, mesh axis) pair; a tensor on an n-axis mesh has n of them.

=============================  =======================================================================
``Replicate()``                every rank of the axis holds the whole tensor
``Shard(dim)``                 rank r holds the r-th piece of tensor dimension ``dim``
``Shard(dim, outer=T)``        ``dim`` is ``T`` consecutive blocks and every block is split over the ranks: what a view
                               of ``(T, batch)`` as ``(T * batch,)`` gives when ``batch`` is split
``Partial("sum")``             the tensor is the sum over the ranks of what they hold
=============================  =======================================================================

GSPMD (arXiv:2105.04663) and DTensor use the same algebra; ``outer`` is DTensor's strided shard restricted to what view
operators produce.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank of the axis holds the whole tensor."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class Shard:
    """Dimension ``dim`` is split over the ranks, in each of ``outer`` consecutive blocks of that dimension."""

    dim: int
    outer: int = 1

    def __str__(self) -> str:
        return f"S({self.dim})" if self.outer == 1 else f"S({self.dim},outer={self.outer})"


@dataclass(frozen=True, slots=True)
class Partial:
    """The tensor is the reduction over the ranks of their local tensors."""

    op: Literal["sum", "max", "min"] = "sum"

    def __str__(self) -> str:
        return "P" if self.op == "sum" else f"P({self.op})"


Placement: TypeAlias = Replicate | Shard | Partial

REPLICATE = Replicate()
PARTIAL = Partial()


@dataclass(frozen=True)
class ShardAxis:
    """One axis of the device mesh, as this rank sees it.

    Args:
        name: the axis' name, e.g. ``"data_parallel"``.
        size: number of ranks along the axis.
        rank: this rank's coordinate on the axis.
        group: name of the process group of the axis (what functional collectives take).
        split: rows of the global batch that each rank holds, one entry a rank. Even splits where a rank's piece of any
            other dimension is asked for.
    """

    name: str
    size: int
    rank: int
    group: str
    split: tuple[int, ...]

    @cached_property
    def total(self) -> int:
        """Rows of the global batch."""
        return sum(self.split)

    @cached_property
    def is_even(self) -> bool:
        """Whether every rank holds the same number of rows."""
        return len(set(self.split)) == 1

    def divides(self, size: int) -> bool:
        """Whether a dimension of global ``size`` can be split over this axis in the proportions of ``split``."""
        return size > 0 and all(size * rows % self.total == 0 for rows in self._distinct)

    @cached_property
    def _distinct(self) -> frozenset[int]:
        return frozenset(self.split)

    def local_size(self, size: int, rank: int | None = None) -> int:
        """Size of this rank's piece of a dimension of global ``size``."""
        return size * self.split[self.rank if rank is None else rank] // self.total

    def offset(self, size: int, rank: int | None = None) -> int:
        """Where this rank's piece of a dimension of global ``size`` starts."""
        upto = self.rank if rank is None else rank
        return size * sum(self.split[:upto]) // self.total
