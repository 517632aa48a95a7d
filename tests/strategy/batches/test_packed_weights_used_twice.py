"""Packed layers whose weights have other uses too: gradients are added in eager's order, step of time by step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence

from tests.strategy.batches.test_packed_sequences import Reads, few
from tests.strategy.small import assert_as_eager


class Siamese(Reads):
    """Two sentences through one layer."""

    def layers(self) -> nn.Module:
        return nn.GRU(6, 10, batch_first=True)

    def encode(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.rnn(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))[1][-1]

    def forward(self, batch: Any) -> Tensor:
        one, other = self.encode(batch[0], batch[1]), self.encode(batch[0].flip(0), batch[1].flip(0))
        return self.last(one * other + (one - other).abs())


class Penalised(Reads):
    """An L2 term over all weights."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + 0.01 * sum(p.pow(2).sum() for p in self.parameters())


class ByHand(Siamese):
    """Two losses, two backward passes, one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(F.cross_entropy(self(batch), batch[2]))
        self.manual_backward(self.encode(batch[0], batch[1]).pow(2).mean())
        optimizer.step()


class Cached(Siamese):
    """Autocast with a cache of the user's own adds both calls' steps in half precision."""

    def forward(self, batch: Any) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(batch).float()


@pytest.mark.parametrize("make", [Siamese, Penalised, ByHand])
def test_gradients_are_added_as_eager_adds_them(make: type[Reads]) -> None:
    assert_as_eager(make, data=few)


def test_products_in_bf16_are_added_as_eager_adds_them() -> None:
    assert_as_eager(Siamese, data=few, precision="bf16-mixed")


def test_a_layer_called_twice_under_autocasts_cache_is_eager() -> None:
    found = assert_as_eager(Cached, mode="eager", data=few)
    assert any("autocast" in text for text in found.warnings), found.warnings
