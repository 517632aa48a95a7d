"""Factories without ``dtype``: the precision decides what they make, and it is around the step, not the graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.strategy.small import Net, assert_as_eager


class Noisy(Net):
    """Noise and weights of positions, both of the default dtype."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, *rest = batch
        return self.loss((x + torch.rand(x.shape) * torch.linspace(0, 1, x.shape[-1]), *rest))


@pytest.mark.parametrize("precision", ["64-true", "bf16-true", "32-true"])
def test_what_factories_make_is_eagers(precision: Any) -> None:
    assert_as_eager(Noisy, precision=precision)
