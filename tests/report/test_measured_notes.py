"""A comparison says what became of each side: a training that left its graphs is no result of graphs."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch

from lightning_spmd.report.measure import Amount, measure
from lightning_spmd.report.sides import Side, spmd_side
from tests.helpers.ranks import RankPool
from tests.strategy.small import Quiet, loader_of, rows


class Sparse(Quiet):
    """Makes a tensor that no graph has."""

    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss(batch) + batch[0].to_sparse().sum()


def _measured(module: type[Quiet], options: dict[str, Any], devices: int) -> tuple[int, list[str]]:
    def build(strategy: Any, flags: dict[str, Any], callbacks: list[L.Callback]) -> tuple[Any, Any, Any]:
        trainer = L.Trainer(
            **{**flags, "use_distributed_sampler": False}, strategy=strategy, callbacks=callbacks, devices=devices,
            accelerator="cpu",
        )  # fmt: skip
        return trainer, module(), loader_of(rows(32), 4)

    sides = [Side("spmd", spmd_side("spmd", options).strategy)]
    (result,) = measure(sides, build, Amount(steps=3, warmup=1, rounds=1), lambda *_: None)
    assert result.reason is None, result.reason
    return result.rows, result.notes


def test_a_fallback_is_among_the_notes() -> None:
    _, notes = _measured(Sparse, {}, 1)
    assert any("eagerly" in note and "test_measured_notes.py" in note for note in notes), notes


def test_a_batch_that_ranks_share_counts_once(two_ranks: RankPool) -> None:
    shared = {"tensor_parallel_size": 2, "tensor_parallel_plan": {"first": "colwise", "last": "rowwise"}}
    assert [found for found, _ in two_ranks.run(_measured, Quiet, shared, 2)] == [4, 4]
    assert [found for found, _ in two_ranks.run(_measured, Quiet, {}, 2)] == [8, 8]
