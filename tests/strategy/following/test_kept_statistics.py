"""Statistics that a step keeps: earlier ones take no graphs, and dictionaries are filled in eager's order."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
from torch import Tensor

from tests.helpers.training import assert_bitwise
from tests.strategy.small import Net, Quiet, run


class Keeps(Quiet):
    """Keeps numbers in a dictionary of a dictionary, and a list of them."""

    def __init__(self) -> None:
        super().__init__()
        self.stats: dict[str, Any] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, right = self.loss(batch), self(batch[0]).argmax(1) == batch[1]
        self.keep(loss, right, batch_idx)
        return loss

    def keep(self, loss: Tensor, right: Tensor, batch_idx: int) -> None:
        accuracy = right.float().mean()
        self.stats["step"] = {"loss": round(loss.item(), 2), "accuracy": int(accuracy * 100), "batch": batch_idx}
        self.stats["right"] = right.int().tolist()
        self.stats["all"] = sum(self.stats["right"])


class Looks(Keeps):
    """What an earlier step kept decides, and is computed with."""

    def keep(self, loss: Tensor, right: Tensor, batch_idx: int) -> None:
        before = self.stats.get("step", {"loss": 1.0, "worse": 0})
        worse = before["worse"] + (1 if loss.item() > before["loss"] else 0)
        self.stats["step"] = {"worse": worse, "loss": 0.5 * before["loss"] + 0.5 * round(loss.item(), 2)}


@pytest.mark.parametrize("make", [Keeps, pytest.param(Looks, marks=pytest.mark.long)])
def test_what_earlier_steps_kept_needs_no_graphs(make: type[Net]) -> None:
    """Seen: each number in a list or dictionary that was put anew took graphs of its own, 15 for 16 steps."""
    modules: list[Any] = []

    def made() -> L.LightningModule:
        modules.append(make())
        return modules[-1]

    theirs, ours = run(made, "auto", max_epochs=2), run(made, max_epochs=2)
    assert_bitwise(ours, theirs)
    assert list(modules[0].stats.items()) == list(modules[1].stats.items())
    assert ours.mode == "compiled"
    assert ours.captures <= (2 if make is Keeps else 4), ours.warnings
