"""Operators that mark where rows go to the ranks that hold their experts, and where values come back from there.

    own = to_experts(rows, ends, dim, axis)             of ``rows`` sorted by expert, those of a rank's experts first
    out = from_experts(own, ends, dim, axis)            each row from the rank that has it: a partial sum
    out = from_chosen(own, ids, dim, experts, axis)     row by row from the rank of expert ``ids[row]``; all of it from
                                                        that of the one expert ``ids`` where ``dim`` is None
    out = from_expert(own, expert, experts, axis)       all of it from the rank of one expert of so many

On one device all are copies: every expert is there. ``stages/expand/experts/regions`` writes them into graphs of steps
whose experts are split over ``axis``, and expansion writes what they are on a rank; no rank's program has them.
"""

from __future__ import annotations

from typing import Any

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

TO_EXPERTS = torch.ops.lightning_spmd.to_experts.default
FROM_EXPERTS = torch.ops.lightning_spmd.from_experts.default
FROM_CHOSEN = torch.ops.lightning_spmd.from_chosen.default
FROM_EXPERT = torch.ops.lightning_spmd.from_expert.default
