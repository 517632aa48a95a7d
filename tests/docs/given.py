"""Names that blocks may ask for (``<!-- run: given=MyModule,MyData -->``), as a reader has them in a project."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
from torch import nn
from torch.utils.data import DistributedSampler

from lightning_spmd import SPMDStrategy
from tests.docs import my_project
from tests.docs.my_project import MyData, MyModule

__all__ = [
    "PLAN",
    "DistributedSampler",
    "L",
    "MyData",
    "MyModule",
    "SPMDStrategy",
    "inside_fit",
    "my_project",
    "nn",
]

PLAN = {"layers.0": "colwise", "layers.2": "rowwise"}


class _Generates(MyModule):
    def generate(self, prompt: Any) -> Any:
        return self.layers(prompt)


class _Calls(L.Callback):
    def __init__(self, block: Callable[[dict[str, Any]], None]) -> None:
        self._block = block

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        rows = trainer.datamodule.train_dataloader().dataset  # pyright: ignore
        names = {"trainer": trainer, "model": pl_module, "dataset": rows, "prompt": rows.tensors[0][:2]}
        self._block(names)


def inside_fit(block: Callable[[dict[str, Any]], None], strategy: str) -> None:
    """Run a block at the end of a training's epoch, with its ``trainer``, ``model``, ``dataset`` and a ``prompt``."""
    trainer = L.Trainer(
        strategy=strategy, max_epochs=1, callbacks=[_Calls(block)], logger=False, enable_checkpointing=False
    )
    trainer.fit(_Generates(), MyData())
