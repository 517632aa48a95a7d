"""How one global tensor lies on the ranks of one mesh axis.

A *placement* describes one (tensor, mesh axis) pair; a tensor on an n-axis mesh has n of them.

=============================  =======================================================================
``Replicate()``                every rank of the axis holds the whole tensor
``Shard(dim)``                 rank r holds the r-th piece of tensor dimension ``dim``
``Shard(dim, outer=T)``        ``dim`` is ``T`` consecutive blocks and every block is split over the ranks: what a view
                               of ``(T, batch)`` as ``(T * batch,)`` gives when ``batch`` is split; how the weight of a
                               fused projection (query, key, value) lies
``Shard(dim, outer=(4, 1))``   the same with blocks in these proportions: a fused projection with fewer keys than
                               queries
``Shard(dim, outer=Chosen)``   rows that values choose (``x[mask]``): each rank holds those that its own rows give,
                               perhaps none, in an order of its own
``Shard(dim, outer=Brought)``  rows that neighbours bring to their experts: each rank has room for all of theirs
``Chunk(dim)``                 rank r holds the r-th of ``torch.chunk``'s pieces of ``dim``, whatever the batch's split:
                               how sharded state (ZeRO) lies; the last ranks may hold less, or nothing
``Partial("sum")``             the tensor is the sum over the ranks of what they hold
``Own()``                      every rank has a tensor of its own, which says nothing of the others': what its own batch
                               gives (local batches). No change leads to or from it
=============================  =======================================================================

GSPMD (arXiv:2105.04663) and DTensor use the same algebra; ``Chunk`` is DTensor's ``Shard``, and ``outer`` is its
strided shard restricted to what view operators produce. Which part of a split dimension is a rank's is its axis' to
say: :meth:`ShardAxis.pieces`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias


@dataclass(frozen=True, slots=True)
class Chosen:
    """Rows that values choose, of which each rank holds those that its own rows give.

    No number of rows is known before a run has counted. How many of them a rank holds is :attr:`ShardAxis.chosen`.
    Their order in the whole is not that of the ranks: nothing gathers them, and nothing takes a rank's part of a whole.

    Args:
        count: which of the graph's counts says how many there are.
        rows: so many there are with the counts for which the graph is made.
    """

    count: int
    rows: int

    def __str__(self) -> str:
        return f"count {self.count}"


@dataclass(frozen=True, slots=True)
class Brought:
    """Rows that the ranks of a neighbourhood (:attr:`ShardAxis.chunks`) bring to the one of them that has their expert.

    Each rank has room for the rows of all of them, since all may go to one. Those that came are in front, in an order
    that the experts say; nothing gathers them, and nothing takes a rank's part of a whole.
    """

    def __str__(self) -> str:
        return "brought"


Blocks: TypeAlias = int | tuple[int, ...] | Chosen | Brought
"""How a dimension is split: in so many equal consecutive blocks, or in some with these proportions (not all equal, no
divisor), of each of which every rank holds a piece; or into the rows that each rank has of those that values choose, or
room for those that are brought to its experts."""


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank of the axis holds the whole tensor."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class Shard:
    """Dimension ``dim`` is split over the ranks, in each of the ``outer`` consecutive blocks of that dimension."""

    dim: int
    outer: Blocks = 1

    def __str__(self) -> str:
        return f"S({self.dim})" if self.outer == 1 else f"S({self.dim},outer={self.outer})"


@dataclass(frozen=True, slots=True)
class Chunk:
    """Dimension ``dim`` is split in equal pieces of which the last ones may be shorter, as ``torch.chunk`` does.

    State is stored and updated in this form. Nothing computes with a chunk of a parameter: it is gathered first.
    """

    dim: int = 0

    def __str__(self) -> str:
        return f"C({self.dim})"


@dataclass(frozen=True, slots=True)
class Partial:
    """The tensor is the reduction over the ranks of their local tensors."""

    op: Literal["sum", "max", "min"] = "sum"

    def __str__(self) -> str:
        return "P" if self.op == "sum" else f"P({self.op})"


@dataclass(frozen=True, slots=True)
class Own:
    """Every rank of the axis has a whole tensor of its own, with its own shape."""

    def __str__(self) -> str:
        return "O"


def blocks_of(sizes: Sequence[int]) -> Blocks:
    """The normal form of consecutive blocks of these sizes."""
    if len(set(sizes)) == 1:
        return len(sizes)
    divisor = math.gcd(*sizes)
    return tuple(size // divisor for size in sizes)


def block_sizes(size: int, blocks: Blocks) -> tuple[int, ...] | None:
    """Sizes of the blocks of a dimension of ``size``; None if it does not consist of such blocks."""
    if isinstance(blocks, int):
        return (size // blocks,) * blocks if size % blocks == 0 else None
    if isinstance(blocks, (Chosen, Brought)):
        return None
    total = sum(blocks)
    return tuple(size // total * part for part in blocks) if size % total == 0 else None


Placement: TypeAlias = Replicate | Shard | Chunk | Partial | Own

REPLICATE = Replicate()
PARTIAL = Partial()
CHUNK = Chunk()
OWN = Own()
BROUGHT = Brought()


@dataclass(frozen=True)
class ShardAxis:
    """One axis of the device mesh, as this rank sees it.

    Under hybrid sharding (HYBRID_SHARD of arXiv:2304.11277), and where ranks share experts, chunks lie on the ranks of
    ``within``, and the ranks of ``across`` hold the same chunk each; coordinates on ``within`` vary fastest.

    Args:
        name: the axis' name, e.g. ``"data_parallel"``.
        size: number of ranks along the axis.
        rank: this rank's coordinate on the axis.
        group: name of the process group of the axis (what functional collectives take).
        split: rows of the global batch by rank. Other dimensions are split evenly.
        within: the neighbours of this rank that together hold all chunks; None: all ranks of the axis.
        across: the ranks of the axis that hold the same chunk as this rank; None: only this rank.
        folded: whether pieces are folded: of 2N pieces rank r holds the r-th and the r-th from the end (the zigzag
            order of context parallelism, which makes causal attention equal work on every rank).
        chosen: how many of the rows that values choose this rank holds, by count, for the counts with which a graph is
            made.
    """

    name: str
    size: int
    rank: int
    group: str
    split: tuple[int, ...]
    within: ShardAxis | None = None
    across: ShardAxis | None = None
    folded: bool = False
    chosen: tuple[int, ...] = ()

    @property
    def chunks(self) -> ShardAxis:
        """The axis over which chunks are distributed."""
        return self.within or self

    @property
    def parts(self) -> tuple[ShardAxis, ...]:
        """This axis and those inside it: whose process groups a graph may use."""
        return (self, *(axis for axis in (self.within, self.across) if axis is not None))

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
        parts = 2 if self.folded else 1
        return size > 0 and all(size * rows % (self.total * parts) == 0 for rows in self._distinct)

    @cached_property
    def _distinct(self) -> frozenset[int]:
        return frozenset(self.split)

    def local_size(self, size: int, rank: int | None = None) -> int:
        """Size of this rank's piece of a dimension of global ``size``.

        Raises:
            ValueError: if the dimension cannot be split over this axis.
        """
        if size and not self.divides(size):
            raise ValueError(f"a dimension of {size} cannot be split over {self.name} like {self.split}")
        return size * self.split[self.rank if rank is None else rank] // self.total

    def splits(self, size: int, blocks: Blocks) -> bool:
        """Whether every block of a dimension of global ``size`` can be split over this axis."""
        if isinstance(blocks, int):
            return size % blocks == 0 and self.divides(size // blocks)
        if isinstance(blocks, Chosen):
            return size > 0 and size % blocks.rows == 0
        if isinstance(blocks, Brought):
            return self.divides(size)
        sizes = block_sizes(size, blocks)
        return sizes is not None and all(self.divides(block) for block in sizes)

    def shard_size(self, size: int, blocks: Blocks, rank: int | None = None) -> int:
        """Size of this rank's piece of a dimension of global ``size`` that is split in blocks."""
        if isinstance(blocks, int):
            return blocks * self.local_size(size // blocks, rank)
        if isinstance(blocks, Chosen):
            return size // blocks.rows * self.chosen[blocks.count]
        if isinstance(blocks, Brought):
            neighbours, at = self.chunks.size, self.rank if rank is None else rank
            first = at // neighbours * neighbours
            return sum(self.local_size(size, other) for other in range(first, first + neighbours))
        return sum(self.local_size(size // sum(blocks) * part, rank) for part in blocks)

    def shard_sizes(self, sizes: Iterable[int], blocks: Blocks) -> set[int]:
        """All sizes that ranks' pieces of dimensions of these sizes have."""
        ranks = [self.split.index(rows) for rows in self._distinct]
        return {self.shard_size(size, blocks, rank) for size in sizes for rank in ranks}

    def chunk_size(self, size: int) -> int:
        """Size of the longest chunk of a dimension of global ``size``."""
        return -(-size // self.chunks.size)

    def chunk(self, size: int, rank: int | None = None) -> tuple[int, int]:
        """(start, length) of the chunk of a dimension of global ``size`` on this rank, or on one of :attr:`chunks`."""
        longest = self.chunk_size(size)
        start = min((self.chunks.rank if rank is None else rank) * longest, size)
        return start, min(longest, size - start)

    def pieces(self, size: int, rank: int | None = None) -> tuple[tuple[int, int], ...]:
        """(start, length) of this rank's parts of a dimension of global ``size``, in storage order."""
        at = self.rank if rank is None else rank
        length = self.local_size(size, at)
        if self.folded:
            half = length // 2
            return (at * half, half), (size - (at + 1) * half, half)
        return ((size * sum(self.split[:at]) // self.total, length),)

    def offset(self, size: int, rank: int | None = None) -> int:
        """Start of this rank's piece of a dimension of global ``size``.

        Raises:
            ValueError: on a folded axis, where a rank has two pieces.
        """
        (piece,) = self.pieces(size, rank)
        return piece[0]

    def find(self, size: int, index: int, blocks: Blocks = 1) -> int | None:
        """This rank's local index of ``index`` in a dimension of global ``size`` split in blocks; None: it has none."""
        before = 0
        for block in block_sizes(size, blocks) or ():
            for start, length in self.pieces(block):
                if start <= index < start + length:
                    return before + index - start
                before += length
            index -= block
        return None
