"""A step that raises: what it did before has been, as without the strategy."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from tests.helpers.training import InOrder, fit
from tests.strategy.small import ROWS, Net, rows


class Raises(Net):
    def __init__(self, error: type[Exception], at: int, *, reads: bool) -> None:
        super().__init__()
        self.error, self.at, self.reads = error, at, reads
        self.register_buffer("steps", torch.zeros(()))
        self.norm, self.kept, self.seen = nn.BatchNorm1d(10), list[Tensor](), list[Any]()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.dropout(self.norm(self.first(x))))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        loss = self.loss(batch)
        self.kept.append(loss.detach())
        self.log("loss", loss, on_step=True)
        if self.reads:
            self.seen.append(loss.item())
        if batch_idx == self.at and self.trainer.current_epoch == 1:
            raise self.error("bad batch")
        return loss

    def on_exception(self, exception: BaseException) -> None:
        self.seen.append(self.kept[-1].item())


def _trained(strategy: str, error: type[Exception], at: int, *, reads: bool) -> Any:
    L.seed_everything(11)
    module = Raises(error, at, reads=reads)
    try:
        fit(module, InOrder(rows(), ROWS), strategy, 1, [], max_epochs=2)
    except ValueError as caught:
        module.seen.append(str(caught))
    state = {name: value.tolist() for name, value in module.state_dict().items()}
    return [k.item() for k in module.kept], module.seen, state, torch.rand(2).tolist()


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize(("error", "at"), [(ValueError, 0), (ValueError, 3), (StopIteration, 3)])
def test_what_it_did_before_has_been(error: type[Exception], at: int, reads: bool) -> None:
    assert _trained("spmd", error, at, reads=reads) == _trained("auto", error, at, reads=reads)
