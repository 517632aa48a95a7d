"""Lists that a step draws from Python's ``random``: values, indices, orders, as eager draws them."""

from __future__ import annotations

import random
from random import sample
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.helpers.ranks import RankPool
from tests.helpers.training import Result, assert_compiled, assert_equals_one_device
from tests.strategy.following.test_drawn_numbers import Left, on_ranks
from tests.strategy.small import Net, Quiet, assert_as_eager


class Lists(Quiet):
    """Rows that are picked in four ways, and weights."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = random.Random(4)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        (x, y), order = batch, list(range(len(batch[0])))
        random.shuffle(order)
        few, again = sample(range(len(x)), k=3), random.choices(order, k=4)
        scores = self(x)
        loss = F.cross_entropy(scores[order[:6]], y[order[:6]]) + scores[few].mean() + scores[:, [2, 0]].mean()
        loss = loss + scores[torch.tensor(again)].square().mean() + x[self.generator.sample(order, 2)].mean()
        low, high = random.sample([0.5, 1.0, 2.0], 2)
        return loss * random.choices([low, high, 3.0], weights=[3, 2, 1])[0] * self.generator.choice((1, 2, 3))


class Orders(Quiet):
    """Layers in another order in each step: a graph for each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        layers, x = list(self.layers), batch[0]
        random.shuffle(layers)
        for layer in layers:
            x = torch.tanh(layer(x))
        return F.cross_entropy(self(x), batch[1]) * len(random.sample("abc", 2))


class OneRow(Quiet):
    """A row by a drawn number that is a tensor; autograd remembers which."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        row = torch.tensor(random.randint(0, 2))
        return self.loss(batch) + self(batch[0])[row].mean()


def test_lists_are_drawn_as_eager_draws_them() -> None:
    states: list[Any] = []
    ours = assert_as_eager(Lists, callbacks=lambda: [Left(states)])
    assert states[0] == states[1]
    assert ours.captures <= 3  # the first step, with numbers as in it, and with all of them as inputs


@pytest.mark.parametrize("make", [OneRow, pytest.param(Orders, marks=pytest.mark.long)])
def test_positions_that_python_takes_are_decisions(make: type[Net]) -> None:
    """Seen: the gradient of ``x[torch.tensor(random.randint(0, 2))]`` went to one row for ever, silently."""
    assert_as_eager(make)


@pytest.mark.long
def test_ranks_draw_the_same_lists(two_ranks: RankPool) -> None:
    ours = two_ranks.run(_on_ranks)
    assert_compiled(*ours)
    assert_equals_one_device(ours, on_ranks(Lists, "auto", 1))


def _on_ranks() -> Result:
    return on_ranks(Lists, "spmd", 2)
