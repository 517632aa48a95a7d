"""Code of another module than the one that asks what a value is, and none that asks by identity itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.strategy.small import Quiet


def is_float(value: Any) -> bool:
    """Here ``float`` is used as a value, too."""
    return isinstance(value, float) and np.zeros(1, dtype=float)[0] == 0


class Decides(Quiet):
    """Hands a value that is read to a function of another module.

    Args:
        question: the function.
    """

    def __init__(self, question: Callable[[Any], bool]) -> None:
        super().__init__()
        self.question = question

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return loss * 2 if self.question((loss > 1.05).item()) else loss
