"""The bar counts batches where ``max_steps`` ends the training, several to a step of the optimizer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_spmd.examples import SPMDProgressBar


@pytest.mark.parametrize(
    ("max_epochs", "max_steps", "done", "accumulate", "total"),
    [
        (-1, 4, 0, 8, 32),
        (-1, 4, 3, 8, 8),
        (-1, 4, 0, 1, 4),
        (-1, 400, 0, 8, 100),
        (-1, -1, 0, 8, 100),
        (2, 4, 0, 8, 100),
    ],
)
def test_batches_not_steps(max_epochs: int, max_steps: int, done: int, accumulate: int, total: int) -> None:
    bar: Any = SPMDProgressBar()
    bar._trainer = SimpleNamespace(
        max_epochs=max_epochs,
        max_steps=max_steps,
        global_step=done,
        accumulate_grad_batches=accumulate,
        num_training_batches=100,
    )
    assert bar.total_train_batches == total
