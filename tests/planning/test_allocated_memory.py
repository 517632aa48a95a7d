"""The highest point of memory on paper beside what the allocator gave out in the same step of a training."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_spmd.cost.hardware import DEVICES, LINKS, Machines
from lightning_spmd.planning.capturing import capture_iteration, without_memory
from lightning_spmd.planning.layout import Layout
from lightning_spmd.planning.outlook import outlook_of
from lightning_spmd.report.peak_memory import AllocatedMemory
from tests.helpers.training import QUIET


class Module(L.LightningModule):
    """Any layers, trained for nothing."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        if kind == "linear":
            self.net = nn.Sequential(*[m for _ in range(3) for m in (nn.Linear(64, 64), nn.GELU())])
        elif kind == "attention":
            self.net = nn.TransformerEncoderLayer(64, 4, 64, dropout=0.0, batch_first=True)
        else:
            self.net = nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-3)


class Allocated(L.Callback):
    """The most that a step had allocated above what there was before it."""

    def __init__(self) -> None:
        self.highest: list[int] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.memory = AllocatedMemory(torch.device("cpu"))

    def on_train_batch_end(self, *_: Any) -> None:
        highest = self.memory.peak()
        assert highest is not None
        self.highest.append(highest)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("kind", "shape", "workspace"),
    [("linear", (2048, 64), 1.02), ("attention", (32, 64, 64), 1.02), ("convolution", (32, 4, 16, 16), 2.0)],
)
def test_the_highest_point_is_what_was_allocated(kind: str, shape: tuple[int, ...], workspace: float) -> None:
    """Convolutions of oneDNN allocate what no operator says, copies in a layout of their own."""
    data = torch.randn(4 * shape[0], *shape[1:])
    flags: dict[str, Any] = {**QUIET, "devices": 1, "max_epochs": 1}

    def build(strategy: Any) -> tuple[L.Trainer, L.LightningModule, Any]:
        with without_memory():
            module = Module(kind)
        return L.Trainer(strategy=strategy, **flags), module, DataLoader(data, batch_size=shape[0])

    machines = Machines(DEVICES["cpu"], 1, 1, LINKS["loopback"], LINKS["loopback"])
    planned = outlook_of(capture_iteration(build, 1), Layout({}, 1, 1), machines)
    comes_and_goes = planned.peak_bytes - sum(planned.highest.contents.always.values())
    seen = Allocated()
    L.Trainer(strategy="spmd", callbacks=[seen], **flags).fit(Module(kind), DataLoader(data, batch_size=shape[0]))
    assert comes_and_goes <= seen.highest[-1] <= workspace * comes_and_goes
