"""Ranks that share layers have the same batch: what is counted over the ranks counts each batch once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import SumMetric

from lightning_spmd import SPMDStrategy
from tests.helpers.ranks import RankPool
from tests.helpers.training import QUIET
from tests.strategy.evaluations import InGraphs
from tests.strategy.small import Quiet, loader_of, rows

PLAN = {"first": "colwise", "last": "rowwise"}


def _trainer(**flags: Any) -> L.Trainer:
    strategy = SPMDStrategy(tensor_parallel_size=2, tensor_parallel_plan=PLAN)
    return L.Trainer(strategy=strategy, devices=2, use_distributed_sampler=False, **{**QUIET, **flags})


class FallsBack(Quiet):
    """Its second validation batch, of the value 1 after one of 0, cannot be followed."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch) * 0 + batch_idx
        if batch_idx == 1:
            loss.untyped_storage()
        self.log("own", loss)
        self.log("synced", loss, sync_dist=True)
        self.log("own metric", batch_idx + 0.0, batch_size=3)


def _mean() -> tuple[dict[str, float], int]:
    trainer = _trainer(barebones=False)
    trainer.validate(FallsBack(), loader_of(rows(8), 4), verbose=False)
    return {k: float(v) for k, v in trainer.callback_metrics.items()}, trainer.strategy.evaluation_captures


def test_an_eager_validation_step_weighs_as_much_as_one_in_graphs(two_ranks: RankPool) -> None:
    for values, captures in two_ranks.run(_mean):
        assert captures == 1
        assert values == {"own": 0.5, "synced": 0.5, "own metric": 0.5}


class UnevenFallsBack(FallsBack):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        value = batch.mean()
        if batch_idx == 1:
            value.untyped_storage()
        self.log("mean", value, sync_dist=True)


def _uneven() -> float:
    x = torch.arange(11.0).unsqueeze(1).expand(11, 6)
    trainer = L.Trainer(strategy=InGraphs(), devices=2, use_distributed_sampler=False, **QUIET)
    trainer.strategy.setup_environment()
    parts = [[x[0:2], x[4:8]], [x[2:4], x[8:11]]][trainer.global_rank]
    trainer.validate(UnevenFallsBack(), DataLoader(parts, batch_size=None), verbose=False)
    return float(trainer.callback_metrics["mean"])


def test_synced_values_of_eager_steps_weigh_by_rows(two_ranks: RankPool) -> None:
    assert two_ranks.run(_uneven) == [pytest.approx(5.0)] * 2  # the mean of 0 .. 10


class Falling(Quiet):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", 1.0 / (1 + self.global_step))


def _best(folder: Path) -> tuple[str, float]:
    keep = ModelCheckpoint(folder, "{step}", monitor="val", save_top_k=1)
    trainer = _trainer(max_epochs=3, callbacks=[keep], enable_checkpointing=True)
    trainer.fit(Falling(), loader_of(rows(8), 4), loader_of(rows(4), 4))
    return Path(keep.best_model_path).name, float(keep.best_model_score or 0)


def test_the_best_checkpoint_is_replaced_by_a_better_one(two_ranks: RankPool, tmp_path: Path) -> None:
    assert two_ranks.run(_best, tmp_path) == [("step=6.ckpt", pytest.approx(1 / 7))] * 2


class Gathers(Quiet):
    """Gathers inside training_step and outside."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[list[int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        gathered = self.all_gather(batch[0])
        self.log("batches", float(gathered.shape[0]))
        return self.loss(batch) + gathered.sum() * 0 + self.all_gather(batch[0].sum()).sum() * 0

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.shapes.append(list(self.all_gather(batch[0]).shape))


def _gathered(strategy: dict[str, Any]) -> tuple[float, list[list[int]]]:
    trainer = L.Trainer(strategy=SPMDStrategy(**strategy), devices=2, max_steps=1, limit_val_batches=0, **QUIET)
    module = Gathers()
    trainer.fit(module, loader_of(rows(8), 4))
    return float(trainer.callback_metrics["batches"]), module.shapes


def test_all_gather_gives_each_batch_once(two_ranks: RankPool) -> None:
    shared = {"tensor_parallel_size": 2, "tensor_parallel_plan": PLAN}
    assert two_ranks.run(_gathered, shared) == [(1.0, [[1, 4, 6]])] * 2
    assert two_ranks.run(_gathered, {}) == [(2.0, [[2, 4, 6]])] * 2


def test_any_rank_may_decide() -> None:
    assert SPMDStrategy().reduce_boolean_decision(True) is True


def _decide() -> list[bool]:
    trainer = _trainer()
    trainer.strategy.setup_environment()
    own = trainer.global_rank == 1
    return [trainer.strategy.reduce_boolean_decision(v, all=a) for v in (own, True, False) for a in (True, False)]


def test_decisions_are_those_of_all_ranks(two_ranks: RankPool) -> None:
    assert two_ranks.run(_decide) == [[False, True, True, True, False, False]] * 2


class CountsRows(Quiet):
    """A metric that adds up: what two ranks saw together must count once."""

    def __init__(self) -> None:
        super().__init__()
        self.count = SumMetric()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.count.update((batch[1] >= 0).float().sum())
        self.log("count", self.count)


def _count() -> float:
    trainer = _trainer()
    trainer.validate(CountsRows(), loader_of(rows(24)), verbose=False)
    return float(trainer.callback_metrics["count"])


def test_a_metric_counts_each_batch_once(two_ranks: RankPool) -> None:
    assert two_ranks.run(_count) == [24.0, 24.0]
