"""Operators that mark where rows go to the ranks that hold their experts, and where values come back from there.

    own = to_experts(rows, ends, dim, axis)             of ``rows`` sorted by expert, those of a rank's experts first
    out = from_experts(own, ends, dim, axis)            each row from the rank that has it: a partial sum
    out = from_chosen(own, ids, dim, experts, axis)     row by row from the rank of expert ``ids[row]``; all of it from
                                                        that of the one expert ``ids`` where ``dim`` is None
    out = from_expert(own, expert, experts, axis)       all of it from the rank of one expert of so many

On one device all are copies: every expert is there. ``stages/expand/experts/regions`` writes them into graphs of steps
whose experts are split over ``axis``, and expansion writes what they are on a rank. Where ranks have tokens of their
own, that is an exchange between these. ``counts[source, expert]`` of all of them is in the host's memory; its last
column counts rows of no expert, which go to the last rank::

    sizes = rows_by_rank(counts, rank, sent)            how many rows a rank sends to each, or gets from each
    rows = rows_by_expert(got, counts, rank, room)      what came, by expert; zeros (of integers: -1) behind it
    sent = rows_by_source(rows, counts, rank, most)     the inverse: by the ranks that they came from
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_spmd.ir.operators.library import define_operator


def _copy(rows: Tensor, *_: Any) -> Tensor:
    return rows.clone(memory_format=torch.contiguous_format)


TO_EXPERTS = define_operator("to_experts(Tensor rows, Tensor ends, int dim, str axis) -> Tensor", _copy)
FROM_EXPERTS = define_operator("from_experts(Tensor rows, Tensor ends, int dim, str axis) -> Tensor", _copy)
FROM_CHOSEN = define_operator("from_chosen(Tensor rows, Tensor ids, int? dim, int experts, str axis) -> Tensor", _copy)
FROM_EXPERT = define_operator("from_expert(Tensor rows, int expert, int experts, str axis) -> Tensor", _copy)


def _parts(counts: Tensor, rank: int) -> list[list[int]]:
    """Rows that each rank brings to each expert of one rank."""
    ranks, here = counts.shape[0], (counts.shape[1] - 1) // counts.shape[0]
    part: Any = counts[:, rank * here : None if rank + 1 == ranks else (rank + 1) * here]
    return part.tolist()


def _rows_by_rank(counts: Tensor, rank: int, sent: bool) -> list[int]:
    if sent:
        return [sum(_parts(counts, other)[rank]) for other in range(counts.shape[0])]
    return [sum(source) for source in _parts(counts, rank)]


def _rows_by_expert(rows: Tensor, counts: Tensor, rank: int, room: int) -> Tensor:
    parts, count = _parts(counts, rank), rows.shape[0]
    experts = len(parts[0])
    pieces = torch.split(rows, [size for source in parts for size in source])
    whole = rows.new_empty((room, *rows.shape[1:]))
    torch.cat([piece for expert in range(experts) for piece in pieces[expert::experts]], out=whole[:count])
    whole[count:] = 0 if rows.dtype.is_floating_point else -1
    return whole


def _rows_by_source(rows: Tensor, counts: Tensor, rank: int, most: int) -> Tensor:
    parts = _parts(counts, rank)
    sizes = [size for expert in zip(*parts, strict=True) for size in expert]
    pieces = torch.split(rows[: sum(sizes)], sizes)
    return torch.cat([piece for source in range(len(parts)) for piece in pieces[source :: len(parts)]])


def _with_rows(rows: Tensor, counts: Tensor, rank: int, most: int) -> Tensor:
    """The shape of a result; of one whose size ``counts`` say, the size where experts get equally many."""
    return rows.new_empty((most, *rows.shape[1:]))


ROWS_BY_RANK = define_operator(
    "rows_by_rank(Tensor counts, int rank, bool sent) -> int[]", {"CPU": _rows_by_rank, "CUDA": _rows_by_rank}
)
ROWS_BY_EXPERT = define_operator(
    "rows_by_expert(Tensor rows, Tensor counts, int rank, int room) -> Tensor",
    {"CPU": _rows_by_expert, "CUDA": _rows_by_expert, "Meta": _with_rows},
)
ROWS_BY_SOURCE = define_operator(
    "rows_by_source(Tensor rows, Tensor counts, int rank, int most) -> Tensor",
    {"CPU": _rows_by_source, "CUDA": _rows_by_source, "Meta": _with_rows},
)
