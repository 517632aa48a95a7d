"""What a step puts into its batch, or takes out, hooks and callbacks find as on one device, on several ranks too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.helpers.ranks import RankPool
from tests.helpers.training import InOrder, assert_compiled, fit
from tests.strategy.small import ROWS, Quiet, rows


class FillsADictionary(Quiet):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, list[float]]] = []

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {"x": batch[0], "y": batch[1], "parts": [batch[0] * 2]}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batch["scores"] = self(batch["x"])
        batch["same"], batch["words"] = batch["x"], ("a", batch_idx)
        batch["parts"].append(batch["scores"].detach().mean())
        return F.cross_entropy(batch["scores"], batch.pop("y"))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert batch["same"] is batch["x"]
        means = [batch["scores"].detach().mean().item(), batch["parts"][1].item()]
        self.seen.append(((sorted(batch), batch["words"]), means))


@dataclass
class Pair:
    x: Tensor
    y: Tensor
    scores: Tensor | None = None


class FillsAnObject(FillsADictionary):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return Pair(*batch)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batch.scores = self(batch.x)
        batch.right = (batch.scores.argmax(1) == batch.y).float().mean()
        return F.cross_entropy(batch.scores, batch.y)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        means = [batch.scores.detach().mean().item(), batch.right.item()]
        self.seen.append((None, means))


class WritesIntoAList(FillsADictionary):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return list(batch)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batch[0].clamp_(-1.0, 1.0)
        batch.append(self.loss(batch).detach())
        return self.loss(batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert bool((batch[0].abs() <= 1).all())
        self.seen.append((len(batch), [batch[2].item()]))


def _seen(make: type[FillsADictionary], strategy: Any, devices: int) -> Any:
    torch.manual_seed(0)
    module = make()
    result, _ = fit(module, InOrder(rows(), ROWS), strategy, devices, max_epochs=1)
    if strategy != "auto":
        assert_compiled(result)
    return module.seen


@pytest.mark.parametrize("make", [FillsADictionary, FillsAnObject, WritesIntoAList])
@pytest.mark.parametrize("plan", ["replicate", "zero3"])
def test_hooks_find_what_the_step_did_to_its_batch(
    two_ranks: RankPool, make: type[FillsADictionary], plan: str
) -> None:
    alone = _seen(make, "auto", 1)
    assert len(alone) == 6
    for seen in two_ranks.run(_seen, make, {"data_parallel": plan}, 2):
        assert [entry for entry, _ in seen] == [entry for entry, _ in alone]
        assert [pytest.approx(means, abs=1e-5) for _, means in seen] == [means for _, means in alone]
