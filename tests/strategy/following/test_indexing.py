"""Indices: torch takes some lists for tuples, and tensors without dimensions for numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.strategy.small import Quiet, assert_as_eager

PARTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a row and a column": lambda scores, y: scores[[y[0], y[1]]],
    "a number and one that is read": lambda scores, y: scores[[0, y[1]]],
    "a row in a list": lambda scores, y: scores[[y[0]]],
    "with a slice": lambda scores, y: scores[[slice(0, 2), y[0]]],
    "with a new dimension": lambda scores, y: scores[[None, y[0]]],
    "with all others": lambda scores, y: scores[[..., y[0]]],
    "positions and a column": lambda scores, y: scores[[[0, 1], y[0]]],
    "several positions and a column": lambda scores, y: scores[[y[:3], y[0]]],
    "a condition, then positions": lambda scores, y: scores[y[0] > 1].sum() + scores[[0, 1]].sum(),
    "a condition, then one position": lambda scores, y: scores[y[0] > 1].sum() + scores[y[:1]].sum(),
}


@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence for multidimensional indexing")
@pytest.mark.parametrize("part", PARTS)
def test_a_part_is_the_one_that_torch_takes(part: str) -> None:
    class Module(Quiet):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            scores = self(x)
            taken = PARTS[part](scores, y)
            self.log("size", float(taken.numel()))
            return F.cross_entropy(scores, y) + torch.square(taken).sum() / 10

    assert_as_eager(Module, max_epochs=1)


@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence for multidimensional indexing")
def test_a_part_is_written_that_torch_takes() -> None:
    class Module(Quiet):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            scores = self(x).clone()
            scores[[y[0], y[1]]] = 1.0
            return F.cross_entropy(scores, y)

    assert_as_eager(Module, max_epochs=1)
