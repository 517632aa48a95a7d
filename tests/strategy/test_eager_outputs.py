"""Callbacks get the same loss on all ranks, also where training runs eagerly."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.ranks import RankPool
from tests.strategy.local_cases import Chemist, fit


class Reads(Chemist):
    """Cannot be a graph; keeps this rank's own losses."""

    def __init__(self) -> None:
        super().__init__(steps=2)
        self.own: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.net.loss(batch)  # type: ignore[operator]
        self.own.append(float(loss))
        open(__file__).close()
        return loss


def _fit() -> tuple[list[float], list[float], str]:
    module = Reads()
    trainer, _ = fit(module)
    return module.losses, module.own, str(trainer.strategy.mode)  # type: ignore[attr-defined]


def test_the_loss_that_callbacks_get_is_the_mean_of_the_ranks(two_ranks: RankPool) -> None:
    (ours, mine, mode), (theirs, others, _) = two_ranks.run(_fit)
    assert mode == "eager"
    assert ours == theirs
    assert ours == pytest.approx([(a + b) / 2 for a, b in zip(mine[-2:], others[-2:], strict=True)])
