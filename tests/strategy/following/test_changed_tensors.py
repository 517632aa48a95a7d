"""Tensors that other ones replace, and weights that a step writes into."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_spmd import SPMDStrategy
from tests.helpers.ranks import RankPool
from tests.helpers.training import Result, assert_equals_one_device
from tests.strategy.small import ROWS, Quiet, assert_as_eager, loader_of, rows, run


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


class WritesIntoRows(Quiet):
    """A row of a weight stays at zero, as one of padding, and others are set by the first batch (ActNorm's way).

    Of a view that was made without gradients, and written, torch does not tell the history.
    """

    def loss(self, batch: Any) -> Tensor:
        with torch.no_grad():
            self.first.weight[0].zero_()
            self.first.weight.t()[1].mul_(0.5)
            if self.global_step == 0:
                self.last.bias.view(-1).copy_(batch[0].mean(0)[: len(self.last.bias)])
                kept = self.last.bias[0]
                assert kept.add_(1.0) is kept
        return super().loss(batch) + kept.detach() * 0 if self.global_step == 0 else super().loss(batch)


class WritesIntoPartOfResult(Quiet):
    """Views that were made with gradients: torch makes their history anew when it is asked for."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        hidden = self.first(x)
        part = hidden[:, :4]
        with torch.no_grad():
            part.mul_(0.5)
            hidden.chunk(2, 1)[1].add_(0.1)
        return F.cross_entropy(self.last(hidden.tanh()), y)


class WritesIntoPartOfWeight(Quiet):
    def loss(self, batch: Any) -> Tensor:
        part = self.first.weight[:4]
        with torch.no_grad():
            part.mul_(0.9)
        return super().loss(batch)


@pytest.mark.parametrize("make", [WritesIntoRows, WritesIntoPartOfResult, WritesIntoPartOfWeight])
def test_parts_are_written_without_gradients(make: type[Quiet]) -> None:
    ours = assert_as_eager(make)
    assert (ours.eager_steps, ours.captures <= 2) == (0, True)


def _on_ranks(make: type[Quiet], data_parallel: Any) -> Result:
    return run(make, SPMDStrategy(data_parallel=data_parallel), 2)


def test_they_are_on_ranks(two_ranks: RankPool) -> None:
    ours = two_ranks.run(_on_ranks, WritesIntoRows, "zero2")
    assert all(result.mode == "compiled" for result in ours), ours[0].warnings
    assert_equals_one_device(ours, run(WritesIntoRows, "auto", data=lambda: loader_of(rows(), ROWS)))
