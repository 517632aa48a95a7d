"""What jobs of the tests run: a small module, shuffled data and validation; says what it did in a folder."""

import lightning_spmd  # noqa: I001  (first: from here on signals are noted)

import argparse
import json
import logging
import os
import time
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler

logging.getLogger("lightning.pytorch").setLevel(logging.INFO)


class Small(L.LightningModule):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.mse_loss(self.layers(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.mse_loss(self.layers(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


class Data(L.LightningDataModule):
    def __init__(self, rows: int, batch: int, shuffle: bool = True) -> None:
        super().__init__()
        draws = torch.Generator().manual_seed(5)
        x = torch.randn(rows, 6, generator=draws)
        self.rows = list(zip(x, x.sin().sum(1, keepdim=True) * x.square().mean(1, keepdim=True), strict=True))
        self.batch, self.shuffle = batch, shuffle

    def _loader(self, shuffle: bool) -> Any:
        assert self.trainer is not None
        if self.trainer.world_size > 1 and not shuffle:
            part: Any = self.trainer.strategy.distributed_sampler_kwargs  # type: ignore[attr-defined]
            sampler = DistributedSampler(self.rows, **part, shuffle=False)  # type: ignore[arg-type]
            return DataLoader(self.rows, batch_size=self.batch // self.trainer.world_size, sampler=sampler)  # type: ignore[arg-type]
        return DataLoader(self.rows, batch_size=self.batch // self.trainer.world_size, shuffle=shuffle)  # type: ignore[arg-type]

    def train_dataloader(self) -> Any:
        return self._loader(self.shuffle)

    def val_dataloader(self) -> Any:
        return self._loader(False)


class Diary(L.Callback):
    """Appends a line for every batch: losses exactly, whatever happens in between."""

    def __init__(self, folder: Path, pause: float, validation_pause: float) -> None:
        self.folder, self.pause, self.validation_pause = folder, pause, validation_pause

    def _write(self, trainer: Any, **line: Any) -> None:
        with (self.folder / f"rank{trainer.global_rank}.jsonl").open("a") as file:
            print(json.dumps({"start": os.environ.get("SLURM_RESTART_COUNT", "0"), **line}), file=file, flush=True)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self._write(trainer, fit=True)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        lr = trainer.optimizers[0].param_groups[0]["lr"]
        self._write(trainer, step=trainer.global_step, loss=float(outputs["loss"]).hex(), lr=float(lr))
        time.sleep(self.pause)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self._write(trainer, saving=trainer.global_step)

    def on_validation_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, *_: Any) -> None:
        self._write(trainer, validating=batch_idx)
        time.sleep(self.validation_pause)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._write(trainer, validated=float(trainer.callback_metrics["val_loss"]).hex(), at=trainer.global_step)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--strategy", default="spmd")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--in-order", action="store_true")
    parser.add_argument("--checkpoints", action="store_true")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--validation-pause", type=float, default=0.0)
    parser.add_argument("--flags", type=json.loads, default={})
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    L.seed_everything(7, verbose=False)
    callbacks: list[L.Callback] = [Diary(given.folder, given.pause, given.validation_pause)]
    if given.checkpoints:
        callbacks.append(ModelCheckpoint(given.folder / "saved", every_n_train_steps=1, save_top_k=1))
    in_parts = lightning_spmd.SPMDStrategy(data_parallel="zero3", save_distributed_checkpoint=True)
    trainer = L.Trainer(
        accelerator="cpu",
        strategy=in_parts if given.strategy == "in_parts" else given.strategy,
        devices=given.devices,
        num_nodes=given.nodes,
        max_epochs=given.epochs,
        default_root_dir=str(given.folder),
        callbacks=callbacks,
        **{
            "logger": False,
            "enable_checkpointing": given.checkpoints,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
            **given.flags,
        },
    )
    module = Small(given.dropout)
    trainer.fit(module, datamodule=Data(given.rows, 8, not given.in_order))
    with trainer.strategy.full_parameters():  # type: ignore[attr-defined]
        weights = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    if trainer.is_global_zero:
        torch.save(weights, given.folder / "weights.pt")


if __name__ == "__main__":
    main()
