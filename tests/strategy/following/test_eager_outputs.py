"""Callbacks get the same loss on all ranks, also where training runs eagerly."""

from __future__ import annotations

from typing import Any

import torch

from tests.helpers.ranks import RankPool
from tests.strategy.local_cases import Chemist, fit


class Reads(Chemist):
    """Cannot be a graph; keeps this rank's own losses."""

    def __init__(self) -> None:
        super().__init__(steps=5)
        self.own: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.net.loss(batch)  # type: ignore[operator]
        self.own.append(float(loss))
        torch.initial_seed()
        return loss


def _fit() -> tuple[list[float], list[float], int]:
    module = Reads()
    trainer, _ = fit(module)
    return module.losses, module.own, trainer.strategy.captures  # type: ignore[attr-defined]


def test_the_loss_that_callbacks_get_is_the_mean_of_all_rows(two_ranks: RankPool) -> None:
    (ours, mine, graphs), (theirs, others, _) = two_ranks.run(_fit)
    assert graphs == 0
    assert ours == theirs
    for loss, one, other in zip(ours, mine, others, strict=True):  # weighed by rows, as in graphs
        assert min(one, other) <= loss <= max(one, other)
