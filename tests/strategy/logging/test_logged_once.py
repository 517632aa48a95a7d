"""A step whose Python runs a second time logs its numbers once, as in eager training."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.helpers.ranks import RankPool
from tests.helpers.training import InOrder, deviation
from tests.strategy.small import ROWS, Quiet, assert_as_eager, rows, run


class RunsAgain(Quiet):
    """What cannot be followed is within a transform, which holds tensors without values."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("number", float(batch_idx), on_step=True, on_epoch=True)

        def energy(x: Tensor) -> Tensor:
            return torch.sparse.mm(torch.eye(len(x)).to_sparse(), self.first(x)).square().sum()

        loss = F.cross_entropy(self(batch[0]), batch[1]) + 0.01 * torch.func.grad(energy)(batch[0]).norm()
        self.log("loss", loss)
        return loss


class RunsAgainOnRanks(Quiet):
    """They have read what depends on random numbers of all ranks."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("number", float(batch_idx), on_step=True, on_epoch=True)
        self.log("drawn", torch.rand(1))
        loss = self.loss(batch)
        assert loss.item() + torch.rand(1).item() > 0
        assert loss.data_ptr()
        return loss


def test_a_number_is_logged_once() -> None:
    assert_as_eager(RunsAgain, "eager")


def test_a_number_is_logged_once_on_ranks(two_ranks: RankPool) -> None:
    reference = run(RunsAgainOnRanks, "auto", data=lambda: InOrder(rows(), ROWS), max_epochs=1)
    for result in two_ranks.run(run, RunsAgainOnRanks, "spmd", 2, max_epochs=1):
        assert deviation(result, reference).weights < 1e-5
        assert [entry["number"] for entry in result.logged] == [entry["number"] for entry in reference.logged]
        assert result.final["number_epoch"] == reference.final["number_epoch"]
