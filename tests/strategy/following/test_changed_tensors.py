"""A tensor in Python's state that another one replaces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.strategy.small import Quiet, assert_as_eager


class Replaces(Quiet):
    """A mask on a plain object, replaced after the third batch."""

    def __init__(self) -> None:
        super().__init__()
        self.masks = {"one": torch.ones(3, 3)}

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * self.masks["one"].sum()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.masks["one"] = self.other()

    def other(self) -> Tensor:
        return torch.ones(3, 3).t()


class AsksForGradients(Replaces):
    def other(self) -> Tensor:
        return torch.ones(3, 3, requires_grad=True)


class UnderTwoNames(Replaces):
    """It may be written to by either name: another object under one of them is another program."""

    def __init__(self) -> None:
        super().__init__()
        self.masks["two"] = self.masks["one"]

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * self.masks["two"].mean()

    def other(self) -> Tensor:
        return torch.ones(3, 3)


@pytest.mark.parametrize("make", [Replaces, AsksForGradients, UnderTwoNames])
def test_it_is_the_one_that_is_there_in_a_step(make: type[Quiet]) -> None:
    assert_as_eager(make, max_epochs=1)
