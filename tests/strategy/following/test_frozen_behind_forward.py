"""Optimization by hand that freezes parameters between the forward and the backward pass."""

from __future__ import annotations

from typing import Any

import torch

from tests.helpers.training import assert_compiled
from tests.strategy.small import Net, assert_as_eager


class TogglesLate(Net):
    """``toggle_optimizer`` behind the forward pass: parameters of the other optimizer get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        chosen: Any = self.optimizers()[batch_idx % 2]  # type: ignore[index]
        loss = self.loss(batch)
        self.toggle_optimizer(chosen)
        chosen.zero_grad()
        self.manual_backward(loss)
        chosen.step()
        self.untoggle_optimizer(chosen)
        self.log("loss", loss)

    def configure_optimizers(self) -> Any:
        children = [child for child in self.children() if list(child.parameters())]
        return [torch.optim.AdamW(child.parameters(), lr=0.01) for child in (children[0], children[-1])]


def test_they_get_no_gradient() -> None:
    assert_compiled(assert_as_eager(TogglesLate))
