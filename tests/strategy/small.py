"""A module of two layers, its data, and the comparison that most tests here make: ``spmd`` against ``auto``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.helpers.training import InOrder, Result, assert_bitwise, fit

ROWS, BATCHES = 8, 6


class Net(L.LightningModule):
    """Linear, tanh, dropout, linear on ``(x, y)``; SGD with momentum. Tests override what they are about."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.dropout, self.last = nn.Linear(6, 10), nn.Dropout(0.1), nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.dropout(torch.tanh(self.first(x))))

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Quiet(Net):
    """Without dropout, for comparisons across numbers of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Identity()


def rows(count: int = ROWS * BATCHES) -> list[tuple[Tensor, Tensor]]:
    """``count`` samples."""
    generator = torch.Generator().manual_seed(2)
    x, y = torch.randn(count, 6, generator=generator), torch.randint(0, 3, (count,), generator=generator)
    return list(zip(x, y, strict=True))


def run(
    make: Callable[[], L.LightningModule],
    strategy: Any = "spmd",
    devices: int = 1,
    callbacks: Callable[[], Sequence[L.Callback]] = list,
    data: Callable[[], Any] | None = None,
    **flags: Any,
) -> Result:
    """Three epochs of six batches; on several ranks their batches together are those of one device.

    Args:
        make: makes the module.
        strategy: of the Trainer.
        devices: number of ranks.
        callbacks: makes the callbacks.
        data: makes the loader.
        flags: other Trainer flags.
    """
    L.seed_everything(11)
    module = make()
    loader = InOrder(rows(), ROWS, shuffle=devices == 1) if data is None else data()
    return fit(module, loader, strategy, devices, callbacks(), **{"max_epochs": 3, **flags})[0]


def loader_of(samples: Sequence[Any], size: int = ROWS, **settings: Any) -> DataLoader[Any]:
    """A loader in order."""
    return DataLoader(samples, batch_size=size, **settings)  # type: ignore[arg-type]


def assert_as_eager(make: Callable[[], L.LightningModule], mode: str = "compiled", **settings: Any) -> Result:
    """``spmd`` on one device runs in ``mode`` and is bitwise ``auto``; gives the run. Eager is what has no graph."""
    theirs = run(make, "auto", **settings)
    ours = run(make, "spmd", **settings)
    assert ours.mode == mode or mode == "eager", ours.warnings
    assert (ours.captures > 0) == (mode != "eager")
    assert_bitwise(ours, theirs)
    return ours
