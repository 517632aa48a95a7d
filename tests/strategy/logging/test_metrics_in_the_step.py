"""A step that reads the Trainer's metrics, before or behind what it logs itself."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from tests.helpers.ranks import RankPool
from tests.helpers.training import InOrder, assert_equals_one_device
from tests.strategy.small import ROWS, Quiet, assert_as_eager, rows, run


class Reads(Quiet):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        before = self.trainer.callback_metrics.get("loss", 0.0)
        self.log("loss", loss)
        self.log("before", float(before))
        return loss


class ReadsBehind(Quiet):
    where = "callback_metrics"

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True)
        self.log("number", float(batch_idx), prog_bar=True)
        there = getattr(self.trainer, self.where)
        return loss * (1 + float(there["loss"]) + float(there["number"]))


class ReadsTheBar(ReadsBehind):
    where = "progress_bar_metrics"


def test_those_of_the_step_before_are_there() -> None:
    assert_as_eager(Reads)


@pytest.mark.parametrize("make", [ReadsBehind, ReadsTheBar])
def test_those_of_the_step_itself_make_it_eager(make: type[Quiet]) -> None:
    result = assert_as_eager(make, "eager")
    assert any("reads metrics of the trainer behind a self.log" in told for told in result.warnings)


def test_on_ranks(two_ranks: RankPool) -> None:
    results = two_ranks.run(run, Reads, {"data_parallel": "zero3"}, 2)
    assert_equals_one_device(results, run(Reads, "auto", data=lambda: InOrder(rows(), ROWS)))
