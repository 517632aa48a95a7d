"""A step that decides many times by what it reads is traced a few times, not once a decision."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_spmd.stages.capture import attempts, foresight
from tests.helpers.ranks import RankPool
from tests.helpers.training import InOrder, Result, assert_compiled, assert_equals_one_device
from tests.strategy.small import ROWS, Net, Quiet, assert_as_eager, rows, run

_MANY = 12


class Decides(Quiet):
    """Twelve decisions, each of which needs those before it."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        hidden = self.prepared(x)
        for index in range(_MANY):
            if hidden[:, index % 10].sum() > 0:
                hidden = hidden * 1.01
            else:
                hidden = hidden.clone().index_fill_(1, torch.tensor([index % 10]), 0.1)
        return F.cross_entropy(self.last(hidden), y)

    def prepared(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(x))


class DecidesByDraws(Decides):
    """Draws, batch norm and a buffer that counts come before the decisions: what is tried out must leave no trace."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(10)
        self.register_buffer("seen", torch.zeros(()))

    def prepared(self, x: Tensor) -> Tensor:
        hidden = self.norm(F.dropout(super().prepared(x), 0.3))
        self.seen += hidden.abs().mean().detach()
        return hidden + 0.3 * torch.randn(10) + 0.01 * self.seen


class WritesIntoAWeight(Decides):
    """Which is not tried out beside the trace."""

    def prepared(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.first.weight.clamp_(-0.5, 0.5)
        return super().prepared(x)


def counted(make: type[Net], *args: Any, **settings: Any) -> tuple[Result, int]:
    """A run, and how many times it traced its step."""
    with mock.patch.object(attempts, "trace", side_effect=attempts.trace) as traced:
        return run(make, *args, **settings), traced.call_count


@pytest.mark.parametrize("make", [Decides, DecidesByDraws, WritesIntoAWeight])
def test_one_device_is_bitwise_eager(make: type[Net]) -> None:
    assert_as_eager(make, max_steps=3)


def test_one_device_traces_a_few_times() -> None:
    """A first step, its second use, and one more a graph: not twelve each."""
    ours, traces = counted(DecidesByDraws, max_steps=4)
    assert ours.captures > 2
    assert traces <= 3 * ours.captures


class DecidesBesideDraws(Net):
    """Has dropout, and decides by its batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        return loss * 0.5 if batch[0].abs().sum() > 1 else loss


def _beside_draws() -> Result:
    return run(DecidesBesideDraws, "spmd", 2, max_steps=5)


def test_decisions_beside_draws_stay_graphs_on_ranks(two_ranks: RankPool) -> None:
    """Random streams are one more input of a rank's graph."""
    for ours in two_ranks.run(_beside_draws):
        assert_compiled(ours)
        assert ours.captures == 2
        assert not any("anew" in text for text in ours.warnings)


def test_without_foresight_it_is_traced_once_a_decision() -> None:
    with mock.patch.object(foresight._Foresight, "number", return_value=None):
        ours, traces = counted(Decides, max_steps=2)
    assert traces > _MANY
    assert ours.losses == run(Decides, max_steps=2).losses


def _two(make: type[Net]) -> tuple[Result, int]:
    return counted(make, "spmd", 2, max_steps=3)


def test_ranks_foresee_what_the_global_batch_decides(two_ranks: RankPool) -> None:
    (ours, traces), other = two_ranks.run(_two, Decides)
    assert_compiled(ours)
    assert traces <= 6 * ours.captures
    theirs = run(Decides, "auto", data=lambda: InOrder(rows(), ROWS, shuffle=False), max_steps=3)
    assert_equals_one_device([ours, other[0]], theirs)
