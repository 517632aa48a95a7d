"""A rank that raises where the others reduce what they logged: its process lives on, so no connection breaks."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from unittest import mock

import lightning as L
import torch
from torch import Tensor

from lightning_spmd.stages.runtime.agreement import control, lost_ranks
from tests.helpers.ranks import RankPool
from tests.helpers.training import QUIET
from tests.strategy.small import Quiet, loader_of, rows


class Raises(Quiet):
    """In eager validation, which needs no other rank until its end."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        if self.global_rank == 1:
            raise ValueError("rank 1 alone")


class RaisesBeforeGathering(Quiet):
    def on_validation_epoch_end(self) -> None:
        if self.global_rank == 1:
            raise ValueError("rank 1 alone")
        gathered: Tensor = self.all_gather(torch.ones(2))  # type: ignore[assignment]
        assert gathered.shape == (2, 2)


def _errors() -> list[str]:
    found = []
    for make in (Raises, RaisesBeforeGathering):
        trainer = L.Trainer(strategy="spmd", devices=2, **QUIET)
        try:
            trainer.validate(make(), loader_of(rows(16)), verbose=False)
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def _quickly() -> list[str]:
    looks = mock.patch.object(control, "LOOK_AROUND", timedelta(seconds=0.2))
    with looks, mock.patch.object(lost_ranks, "PATIENCE", 0.3):
        return _errors()


def test_the_others_learn_of_it_and_do_not_wait(two_ranks: RankPool) -> None:
    first, second = two_ranks.run(_quickly)
    assert second == ["ValueError: rank 1 alone"] * 2
    for text, place in zip(first, ("a reduction over all ranks", "all_gather"), strict=True):
        assert "RankLostError: rank 1 failed with ValueError: rank 1 alone (at " in text
        assert f"This rank was waiting for it at {place}." in text
