"""Trainings to plan, small ones."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_spmd.cost.hardware import DEVICES, LINKS, Machines
from lightning_spmd.planning.capturing import Build, Capture, capture_iteration, without_memory
from lightning_spmd.planning.layout import Layout
from lightning_spmd.planning.outlook import Outlook, outlook_of
from tests.helpers.training import QUIET

WIDTH, ROWS = 32, 4


class Tied(L.LightningModule):
    """Two layers that share a weight, and one of its own."""

    def __init__(self, optimizer: Any = None) -> None:
        super().__init__()
        self.make = optimizer or (lambda p: torch.optim.AdamW(p, lr=1e-2))
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second.weight = self.first.weight
        self.head = nn.Linear(WIDTH, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.head(torch.relu(self.second(torch.relu(self.first(batch))))).square().mean()

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


class Deep(Tied):
    """Layers whose gradients travel one after the other."""

    def __init__(self) -> None:
        super().__init__(lambda p: torch.optim.SGD(p, lr=0.1))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for layer in self.layers:
            batch = torch.relu(layer(batch))
        return super().training_step(batch, batch_idx)


def building(make: Any = Tied, **flags: Any) -> Build:
    """Makes such a training with flags of the Trainer."""

    def build(strategy: Any) -> tuple[L.Trainer, L.LightningModule, Any]:
        with without_memory():
            module = make()
        trainer = L.Trainer(strategy=strategy, **{**QUIET, "devices": 1, "max_epochs": 1, **flags})
        return trainer, module, DataLoader(torch.ones(4 * ROWS, WIDTH), batch_size=ROWS)

    return build


def captured(batches: int = 1, make: Any = Tied, **flags: Any) -> Capture:
    """The iteration of such a training."""
    return capture_iteration(building(make, **flags), batches)


def outlook(
    options: dict[str, Any], devices: int, nodes: int = 1, device: str = "h100", make: Any = Tied, **flags: Any
) -> Outlook:
    """What such a training will be like."""
    layout = Layout(options, devices, nodes)
    kind, network = DEVICES[device], "ethernet-1" if device == "cpu" else "infiniband-ndr"
    machines = Machines(kind, devices, nodes, LINKS[kind.link], LINKS[network])
    return outlook_of(captured(layout.batches, make, **flags), layout, machines)
