"""Marks of rows by expert (``ir/expert_rows``) on axes over which no expert is split: copies, on each rank's rows.

On the axis that a mark is for, ``stages/expand/experts`` says what it is.
"""

from __future__ import annotations

from typing import Any

from lightning_spmd.ir.expert_rows import FROM_EXPERTS, TO_EXPERTS
from lightning_spmd.stages.expand.call import Layout, OpCall, Rule, along


def _copy(call: OpCall) -> list[Layout]:
    return [c for dim in range(len(call.shape)) if dim != call["dim"] for c in along(call, [dim, None], [dim])]


RULES: dict[Any, Rule] = {TO_EXPERTS: _copy, FROM_EXPERTS: _copy}
