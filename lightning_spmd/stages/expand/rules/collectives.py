"""Collectives of the ranks' graphs, where their rows are split once more, into chunks (``loss_chunks/``).

An element of an all-reduce is of the same element on every rank. Captured graphs have no collectives.
"""

from __future__ import annotations

from typing import Any

import torch

from lightning_spmd.stages.expand.call import Rule
from lightning_spmd.stages.expand.rules import pointwise

_functional = torch.ops._c10d_functional

RULES: dict[Any, Rule] = {
    _functional.all_reduce.default: pointwise.elementwise,
    _functional.wait_tensor.default: pointwise.elementwise,
}
