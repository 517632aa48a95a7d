"""SIGTERM on one rank ends all of them at the same batch; Lightning's handler would wait for rank 0 for ever."""

from __future__ import annotations

import os
import signal
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.utilities.exceptions import SIGTERMException

from tests.helpers.ranks import RankPool
from tests.helpers.training import QUIET
from tests.strategy.small import Quiet, loader_of, rows


class ToldInTraining(Quiet):
    at, ends = 2, 3  # behind the next batch, which is the first to know

    def __init__(self) -> None:
        super().__init__()
        self.validated = 0

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_rank == 1 and self.trainer.global_step == self.at:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.validated += 1


class ToldBeforeValidation(ToldInTraining):
    at, ends = 4, 4


class ToldInValidation(ToldInTraining):
    """The other rank is in its last batch then."""

    at, ends = 99, 4

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().on_validation_batch_start(batch, batch_idx, dataloader_idx)
        if self.global_rank == 1 and batch_idx == 0:
            os.kill(os.getpid(), signal.SIGTERM)


def _ends(make: type[ToldInTraining]) -> tuple[str, int, int, bool]:
    trainer = L.Trainer(
        strategy="spmd", devices=2, max_epochs=2, num_sanity_val_steps=0, use_distributed_sampler=False, **QUIET
    )
    module, handler = make(), signal.getsignal(signal.SIGTERM)
    try:
        trainer.fit(module, loader_of(rows(16), 4), loader_of(rows(16), 4))
    except SIGTERMException:
        restored = signal.getsignal(signal.SIGTERM) is handler
        return "SIGTERM", trainer.global_step, module.validated, restored
    return "no error", trainer.global_step, module.validated, False


@pytest.mark.parametrize("make", [ToldInTraining, ToldBeforeValidation])
def test_all_ranks_end_at_the_same_batch(two_ranks: RankPool, make: type[ToldInTraining]) -> None:
    assert two_ranks.run(_ends, make) == [("SIGTERM", make.ends, 0, True)] * 2


def test_all_ranks_end_behind_the_validation(two_ranks: RankPool) -> None:
    """One rank left it alone, and a checkpoint at the exception met the other one at its end."""
    assert two_ranks.run(_ends, ToldInValidation) == [("SIGTERM", 4, 4, True)] * 2
