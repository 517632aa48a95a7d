"""Where a run of several ranks begins, random numbers go on as on one device."""

from __future__ import annotations

import os
import random
from typing import Any
from unittest import mock

import lightning as L
import numpy as np

from tests.helpers.ranks import RankPool
from tests.helpers.training import InOrder, Result, assert_compiled, assert_equals_one_device, fit
from tests.strategy.small import ROWS, Quiet, rows


class Draws(Quiet):
    """Draws while it is built, and in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = random.uniform(0.5, 1.5) * np.random.uniform(0.5, 1.5)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * self.scale * (0.5 + random.random()) * np.random.uniform(0.5, 1.5)


def _two_fits(strategy: str, devices: int, apart: bool = False) -> list[Any]:
    """One behind the other in one process, with one module; and where the generators are in the end."""
    begins = range(0, len(rows()), ROWS)
    as_on_ranks = [rows()[begin + row] for begin in begins for row in (*range(0, ROWS, 2), *range(1, ROWS, 2))]
    L.seed_everything(11)
    module, found = Draws(), list[Any]()
    for _ in range(2):
        data = InOrder(rows() if devices > 1 else as_on_ranks, ROWS)
        result, trainer = fit(module, data, strategy, devices, max_epochs=1)
        found.append(result)
        if apart and trainer.global_rank == 1:
            random.random()
    return [*found, (random.getstate(), np.random.get_state()[1].tolist())]  # type: ignore[union-attr]


def test_fits_go_on_with_the_numbers_of_one_device(two_ranks: RankPool) -> None:
    theirs = _two_fits("auto", 1)
    for ours in (two_ranks.run(_two_fits, "spmd", 2), two_ranks.run(_two_fits, "spmd", 2, apart=True)):
        for number in range(2):
            results: list[Result] = [rank[number] for rank in ours]
            assert_compiled(*results)
            assert_equals_one_device(results, theirs[number])
    assert ours[0][2] == theirs[2]


def _unseeded() -> tuple[float, float]:
    """What a rank draws from Python before and in a run that nobody seeded."""
    with mock.patch.dict(os.environ):
        os.environ.pop("PL_GLOBAL_SEED", None)
        random.seed(int(os.environ["RANK"]))
        before = random.getstate()
        fit(Quiet(), InOrder(rows(), ROWS), "spmd", 2, max_epochs=1, limit_train_batches=1)
        found = random.random()
        random.setstate(before)
        return found, random.random()


def test_ranks_that_nobody_seeded_draw_their_own(two_ranks: RankPool) -> None:
    sides = two_ranks.run(_unseeded)
    assert all(drawn == wanted for drawn, wanted in sides)
    assert sides[0] != sides[1]
