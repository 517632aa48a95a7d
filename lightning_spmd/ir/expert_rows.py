"""Operators that mark where rows go to the ranks that hold their experts, and where values come back from there.

    own = to_experts(rows, ends, dim, axis)             of ``rows`` sorted by expert, those of a rank's experts first
    out = from_experts(own, ends, dim, axis)            each row from the rank that has it: a partial sum
    out = from_chosen(own, ids, dim, experts, axis)     row by row from the rank of expert ``ids[row]``; all of it from
                                                        that of the one expert ``ids`` where ``dim`` is None
    out = from_expert(own, expert, experts, axis)       all of it from the rank of one expert of so many

On one device all are copies: every expert is there. ``stages/expand/experts/regions`` writes them into graphs of steps
whose experts are split over ``axis``, and expansion writes what they are on a rank. Where ranks have tokens of their
own, that is an exchange between these. ``counts[source, expert]`` of all of them is in the host's memory; its last column
counts rows of no expert, which go to the last rank::

    sizes = rows_by_rank(counts, rank, sent)            how many rows a rank sends to each, or gets from each
    rows = rows_by_expert(got, counts, rank, room)      what came, in the order of experts, zeros (of integers: -1) behind
    sent = rows_by_source(rows, counts, rank, most)     the inverse: in the order of the ranks that they came from
"""

from __future__ import annotations

from typing import Any

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.library import Library

_LIBRARY: Any = Library("lightning_spmd", "FRAGMENT")


def _copy(rows: Tensor, *_: Any) -> Tensor:
    return rows.clone(memory_format=torch.contiguous_format)


for _signature in (
    "to_experts(Tensor rows, Tensor ends, int dim, str axis)",
    "from_experts(Tensor rows, Tensor ends, int dim, str axis)",
    "from_chosen(Tensor rows, Tensor ids, int? dim, int experts, str axis)",
    "from_expert(Tensor rows, int expert, int experts, str axis)",
):
    _LIBRARY.define(f"{_signature} -> Tensor")
    _LIBRARY.impl(_signature.partition("(")[0], _copy, "CompositeExplicitAutograd")



def _parts(counts: Tensor, rank: int) -> Tensor:
    """Rows that each rank brings to each expert of one rank."""
    ranks, here = counts.shape[0], (counts.shape[1] - 1) // counts.shape[0]
    return counts[:, rank * here : None if rank + 1 == ranks else (rank + 1) * here]


def _rows_by_rank(counts: Tensor, rank: int, sent: bool) -> Sequence[int]:
    ranks = counts.shape[0]
    if not sent:
        return _parts(counts, rank).sum(-1).tolist()
    return [int(_parts(counts, other)[rank].sum()) for other in range(ranks)]


def _rows_by_expert(rows: Tensor, counts: Tensor, rank: int, room: int) -> Tensor:
    parts = _parts(counts, rank)
    sources, experts = parts.shape
    pieces = rows.split(parts.flatten().tolist())
    whole = rows.new_empty((room, *rows.shape[1:]))
    ordered = [pieces[source * experts + expert] for expert in range(experts) for source in range(sources)]
    torch.cat(ordered, out=whole[: rows.shape[0]])
    whole[rows.shape[0] :] = 0 if rows.dtype.is_floating_point else -1
    return whole


def _rows_by_source(rows: Tensor, counts: Tensor, rank: int, most: int) -> Tensor:
    parts = _parts(counts, rank)
    sources, experts = parts.shape
    pieces = rows[: int(parts.sum())].split(parts.t().flatten().tolist())
    return torch.cat([pieces[expert * sources + source] for source in range(sources) for expert in range(experts)])


_EXCHANGED: dict[str, tuple[Any, Any]] = {
    "rows_by_rank(Tensor counts, int rank, bool sent) -> int[]": (_rows_by_rank, None),
    "rows_by_expert(Tensor rows, Tensor counts, int rank, int room) -> Tensor": (
        _rows_by_expert,
        lambda rows, _counts, _rank, room: rows.new_empty((room, *rows.shape[1:])),
    ),
    "rows_by_source(Tensor rows, Tensor counts, int rank, int most) -> Tensor": (
        _rows_by_source,
        lambda rows, _counts, _rank, most: rows.new_empty((most, *rows.shape[1:])),
    ),
}
for _signature, (_function, _shape) in _EXCHANGED.items():
    _LIBRARY.define(_signature)
    for _key in ("CPU", "CUDA"):
        _LIBRARY.impl(_signature.partition("(")[0], _function, _key)
    if _shape is not None:
        _LIBRARY.impl(_signature.partition("(")[0], _shape, "Meta")

TO_EXPERTS = torch.ops.lightning_spmd.to_experts.default
FROM_EXPERTS = torch.ops.lightning_spmd.from_experts.default
FROM_CHOSEN = torch.ops.lightning_spmd.from_chosen.default
FROM_EXPERT = torch.ops.lightning_spmd.from_expert.default
ROWS_BY_RANK = torch.ops.lightning_spmd.rows_by_rank.default
ROWS_BY_EXPERT = torch.ops.lightning_spmd.rows_by_expert.default
ROWS_BY_SOURCE = torch.ops.lightning_spmd.rows_by_source.default
