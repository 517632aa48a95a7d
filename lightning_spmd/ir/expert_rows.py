"""Operators that mark where rows go to the ranks that hold their experts, and where they come back.

    own = to_experts(rows, ends, dim, axis)      of ``rows`` sorted by expert, those of a rank's experts first
    out = from_experts(own, ends, dim, axis)     each row from the rank that has it: a partial sum

On one device both are copies: every expert is there. ``stages/expand/experts`` writes them into graphs of steps whose
experts are split over ``axis``, and expansion writes what they are on a rank; no rank's program has them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import Library

_LIBRARY: Any = Library("lightning_spmd", "FRAGMENT")


def _copy(rows: Tensor, _ends: Tensor, _dim: int, _axis: str) -> Tensor:
    return rows.clone(memory_format=torch.contiguous_format)


for _name in ("to_experts", "from_experts"):
    _LIBRARY.define(f"{_name}(Tensor rows, Tensor ends, int dim, str axis) -> Tensor")
    _LIBRARY.impl(_name, _copy, "CompositeExplicitAutograd")

TO_EXPERTS = torch.ops.lightning_spmd.to_experts.default
FROM_EXPERTS = torch.ops.lightning_spmd.from_experts.default
