"""The training that the ranks run: a small module with dropout, shuffled data, checkpoints every third step."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from lightning_spmd import SPMDStrategy

ROWS, BATCHES, EPOCHS = 4, 7, 2
"""Rows of a rank's batch where there are two, batches of an epoch."""
STEPS = BATCHES * EPOCHS
EVERY = 3
"""Steps between two checkpoints."""
TIMEOUT = 20.0
"""Seconds that a collective may wait."""


@dataclass(frozen=True)
class Job:
    """One training.

    Args:
        folder: everything that it writes is in there.
        plan: what each rank keeps.
        distributed: whether checkpoints are folders.
        overlap: whether the end of an iteration runs in the next one.
        checkpoint: what it goes on from; ``"last"`` as a user writes it.
        timeout: of the strategy.
        on_exception: whether a checkpoint is also written when training ends with an exception.
        width: of the hidden layer.
        devices: number of ranks.
        deterministic, precision: those of the Trainer.
    """

    folder: Path
    plan: str = "replicate"
    distributed: bool = False
    overlap: bool = False
    checkpoint: str | None = None
    timeout: float = TIMEOUT
    on_exception: bool = False
    width: int = 10
    devices: int = 2
    deterministic: Any = None
    precision: str = "32-true"

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints are."""
        return self.folder / "checkpoints"

    def end(self, rank: int) -> Path:
        """What a rank had in the end, on disk."""
        return self.folder / f"end.{rank}.pt"

    def going_on(self, checkpoint: str = "last") -> Job:
        """The same training from a checkpoint."""
        return dataclasses.replace(self, checkpoint=checkpoint)


class Net(L.LightningModule):
    """Linear, tanh, dropout, linear."""

    def __init__(self, width: int = 10) -> None:
        super().__init__()
        self.first, self.dropout, self.last = nn.Linear(6, width), nn.Dropout(0.1), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.dropout(torch.tanh(self.first(x))))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}


class Rows:
    """Shuffled batches of which every rank has its part; it can save and load its place, so resumes are exact.

    Args:
        batches: of an epoch.
        ranks: among which a batch is split.
    """

    def __init__(self, batches: int, ranks: int) -> None:
        generator = torch.Generator().manual_seed(2)
        self.x = torch.randn(batches * ROWS * 2, 6, generator=generator)
        self.batches, self.ranks, self.epoch, self.position = batches, ranks, 0, 0

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(len(self.x), generator=torch.Generator().manual_seed(self.epoch))
        for index in range(self.position, self.batches):
            self.position += 1
            if self.position == self.batches:  # Lightning never asks for the one after the last
                self.epoch, self.position = self.epoch + 1, 0
            chosen = order[index * ROWS * 2 : (index + 1) * ROWS * 2].chunk(self.ranks)[this_rank()]
            yield self.x[chosen], chosen % 3

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]


def trainer_of(job: Job, callbacks: Sequence[L.Callback] = (), **flags: Any) -> L.Trainer:
    """Its Trainer."""
    keeps = ModelCheckpoint(
        job.checkpoints, "{step}", save_top_k=-1, every_n_train_steps=EVERY, save_last=True,
        save_on_exception=job.on_exception,
    )  # fmt: skip
    strategy = SPMDStrategy(
        timeout=timedelta(seconds=job.timeout),
        data_parallel=job.plan,  # type: ignore[arg-type]
        overlap_iterations=job.overlap,
        bucket_size_mb=0.0001 if job.overlap else "auto",  # several buckets: the late ones are for the next iteration
        save_distributed_checkpoint=job.distributed,
    )
    return L.Trainer(
        strategy=strategy, devices=job.devices, accelerator="cpu", max_epochs=EPOCHS, logger=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=job.folder,
        deterministic=job.deterministic, precision=job.precision, num_sanity_val_steps=0,  # type: ignore[arg-type]
        callbacks=[*callbacks, keeps], **flags,
    )  # fmt: skip


def train(
    job: Job,
    callbacks: Sequence[L.Callback] = (),
    make: Callable[[int], L.LightningModule] = Net,
    data: Callable[[], Any] | None = None,
    **flags: Any,
) -> None:
    """Train to the end, and write down what there is then."""
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*Checkpoint directory .* exists and is not empty.*")
    L.seed_everything(5, verbose=False)
    module = make(job.width)
    trainer = trainer_of(job, callbacks, **flags)
    loaders = Rows(BATCHES, job.devices), Rows(2, job.devices)
    trainer.fit(module, *(loaders if data is None else data()), ckpt_path=job.checkpoint)
    torch.save(_state(module, trainer), job.end(trainer.global_rank))


def _state(module: L.LightningModule, trainer: L.Trainer) -> dict[str, Any]:
    """All that training changed, as this rank holds it."""
    values: dict[str, Any] = {"steps": trainer.global_step, **dict(module.state_dict())}
    for index, optimizer in enumerate(trainer.optimizers):
        for number, state in optimizer.state_dict()["state"].items():
            values |= {f"{index}.{number}.{key}": value for key, value in state.items()}
        values[f"{index}.lr"] = optimizer.param_groups[0]["lr"]
    return {k: v.to_local() if isinstance(v, DTensor) else v for k, v in values.items()}


def note_the_fault(job: Job) -> None:
    """Say that it happens now, and which checkpoints there are; by the rank to which it happens."""
    there = sorted(p.name for p in job.checkpoints.glob("*.ckpt")) if job.checkpoints.is_dir() else []
    (job.folder / "fault.json").write_text(json.dumps({"at": time.time(), "checkpoints": there}))


def this_rank() -> int:
    """The rank of this process, before anything knows it."""
    return int(os.environ["RANK"])


def say(text: str) -> None:
    """For the table's reader."""
    print(text, file=sys.stderr, flush=True)
