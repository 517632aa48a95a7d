"""Marks of rows by expert (``ir/expert_rows``) on axes over which no expert is split: copies, on each rank's rows.

On the axis that a mark is for, ``stages/expand/experts/split_experts`` says what it is.
"""

from __future__ import annotations

from typing import Any

from lightning_spmd.ir.expert_rows import FROM_CHOSEN, FROM_EXPERT, FROM_EXPERTS, TO_EXPERTS
from lightning_spmd.stages.expand.call import Layout, OpCall, Rule, Where, along, linear


def _copy(call: OpCall) -> list[Layout]:
    """Every dimension is kept; that of rows sorted by expert is no rank's to cut, but see ``rows/routing``."""
    found = linear(call, (0,))
    for dim in range(len(call.shape)):
        inputs: list[Where] = [dim, *[None] * (len(call.operands) - 1)]
        if call.get("dim") == dim:
            if call.op is not FROM_CHOSEN:
                continue
            inputs[1] = 0
        found += along(call, inputs, [dim])
    return found


RULES: dict[Any, Rule] = dict.fromkeys([TO_EXPERTS, FROM_EXPERTS, FROM_CHOSEN, FROM_EXPERT], _copy)
