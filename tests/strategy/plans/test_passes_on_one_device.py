"""On one device graphs take the passes too, bit for bit; tensors over one memory keep eager's order instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_spmd import SPMDStrategy

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "max_steps": 6,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Layers(L.LightningModule):
    """Two layers; with ``twins`` the second one's weight is the first one's memory, as another parameter."""

    def __init__(self, optimizer: str, *, twins: bool) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
        if twins:
            self.other.weight.data = self.one.weight.data

    def training_step(self, batch: Tensor) -> Tensor:
        return self.other(self.one(batch).relu()).square().mean()

    def configure_optimizers(self) -> Any:
        return getattr(torch.optim, self.optimizer)(self.parameters(), lr=0.1)


def trained(strategy: Any, optimizer: str, *, twins: bool) -> list[Tensor]:
    L.seed_everything(3, verbose=False)
    module = Layers(optimizer, twins=twins)
    L.Trainer(strategy=strategy, **QUIET).fit(module, torch.utils.data.DataLoader(torch.randn(24, 8), batch_size=4))
    return [p.detach() for p in module.parameters()]


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "Adagrad"])
@pytest.mark.parametrize("twins", [False, True])
def test_it_is_eager_to_the_last_bit(optimizer: str, twins: bool) -> None:
    eager, graph = (trained(s, optimizer, twins=twins) for s in ("auto", "spmd"))
    assert all(torch.equal(a, b) for a, b in zip(eager, graph, strict=True))


def test_updates_of_parameters_are_joined_where_these_are_apart(tmp_path: Path) -> None:
    lists = {}
    for twins in (False, True):
        folder = tmp_path / str(twins)
        trained(SPMDStrategy(dump_dir=folder), "AdamW", twins=twins)
        lists[twins] = any("aten._foreach_addcdiv_" in path.read_text() for path in folder.iterdir())
    assert lists == {False: True, True: False}
