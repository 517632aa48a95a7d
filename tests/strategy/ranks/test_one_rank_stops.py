"""One rank is told to stop where no batch follows: it would leave, and the others wait for it in the next epoch."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest

from tests.helpers.ranks import RankPool
from tests.helpers.training import QUIET
from tests.strategy.small import Quiet, loader_of, rows


class StopsAtEpochEnd(Quiet):
    def on_train_epoch_end(self) -> None:
        self.trainer.should_stop = self.global_rank == 1


class StopsInValidation(Quiet):
    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.trainer.should_stop = self.global_rank == 1


class EndsTheLoop(Quiet):
    def on_train_epoch_end(self) -> None:
        if self.global_rank == 1:
            raise StopIteration  # Lightning takes it for the end of training


def _error(make: type[Quiet]) -> str:
    trainer = L.Trainer(strategy="spmd", devices=2, max_epochs=2, num_sanity_val_steps=0, **QUIET)
    try:
        trainer.fit(make(), loader_of(rows(16)), loader_of(rows(16)))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize("make", [StopsAtEpochEnd, StopsInValidation, EndsTheLoop])
def test_all_ranks_learn_that_one_stopped(two_ranks: RankPool, make: type[Quiet]) -> None:
    first, second = two_ranks.run(_error, make)
    assert first == second
    assert "RankDisagreementError: the ranks are not at the same batch" in first
    assert "rank 0: training batch 0 of epoch 1" in first
    stopped = "" if make is EndsTheLoop else " (trainer.should_stop is set there)"
    assert f"rank 1: the end of training{stopped}" in first
