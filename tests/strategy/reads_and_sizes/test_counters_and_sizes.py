"""Numbers that a step itself assigns, beside batches of several sizes."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.training import assert_bitwise, assert_compiled, fit


class Counts(L.LightningModule):
    """Averages weights by hand, with a rate that follows a counter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net, self.average = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)
        self.average.requires_grad_(False)
        self.calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.net(batch[0]).pow(2).mean()
        self.calls += 1
        rate = min(0.99, (1 + self.calls) / (10 + self.calls))
        with torch.no_grad():
            for old, new in zip(self.average.parameters(), self.net.parameters(), strict=True):
                old.lerp_(new, 1 - rate)
        self.log("rate", rate)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


class ByHand(Counts):
    """Steps in each third batch, by a counter that it puts back."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        loss = self.net(batch[0]).pow(2).mean() / 3
        self.manual_backward(loss)
        self.calls += 1
        if self.calls == 3:
            optimizer.step()
            optimizer.zero_grad()
            self.calls = 0
        return loss


@pytest.mark.parametrize("kind", [Counts, ByHand])
def test_counters_beside_a_last_batch_of_fewer_rows(kind: type[Counts]) -> None:
    data = DataLoader(TensorDataset(torch.randn(20, 4, generator=torch.Generator().manual_seed(2))), batch_size=8)
    theirs, ours = (fit(kind(), data, strategy, max_epochs=3)[0] for strategy in ("auto", "spmd"))
    assert_compiled(ours)
    assert_bitwise(ours, theirs)
