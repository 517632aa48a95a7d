"""A run whose rank 0 dies while it writes its second checkpoint: ``python -m tests.strategy.killed_while_saving``."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any
from unittest import mock

import lightning as L

from lightning_spmd import SPMDStrategy
from tests.helpers.modules import samples
from tests.helpers.training import InOrder, TrainingCase, fit

CASE = TrainingCase("mlp", "adamw", count=16 * 6, dropout=0.0)


def _die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class SaveTwice(L.Callback):
    """The second time the process is killed when all bytes are written but not yet under their name."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            trainer.save_checkpoint(self.path)
        if trainer.global_step == 4:
            where = (
                "torch.distributed.checkpoint.filesystem.FileSystemWriter.finish",
                "lightning_spmd.strategy.checkpoints.whole_files.put",
            )
            if trainer.is_global_zero:
                for name in where:
                    mock.patch(name, _die).start()
            trainer.save_checkpoint(self.path)


def main() -> None:
    path, folder = sys.argv[1], sys.argv[2] == "folder"
    strategy = SPMDStrategy(data_parallel="zero3", save_distributed_checkpoint=folder)
    data = InOrder(samples(CASE.model, CASE.count), CASE.rows)
    fit(CASE.module(), data, strategy, 2, [SaveTwice(path)], max_epochs=1)


if __name__ == "__main__":
    main()
