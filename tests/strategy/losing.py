"""One rank of a training in which rank 1 ends badly; prints how this rank ended. Started by ``test_lost_ranks.py``."""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from typing import Any

import lightning as L
from torchmetrics import MeanMetric

from lightning_spmd.stages.runtime.agreement import control
from lightning_spmd.strategy.ranks import ranks
from tests.helpers.training import QUIET
from tests.strategy.small import Quiet, loader_of, rows


class Ends(L.Callback):
    """Ends rank 1, or rank 0, in its third step."""

    def __init__(self, how: str) -> None:
        self.how = how

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step != 2:
            return
        if self.how == "killed" and trainer.global_rank == 1 or self.how == "first killed" and trainer.global_rank == 0:
            os.kill(os.getpid(), 9)
        if self.how == "raises" and trainer.global_rank == 1:
            raise ValueError("a hook of rank 1 failed")
        if self.how == "storage" and trainer.global_rank == 1:
            raise RuntimeError("connection reset by the storage")
        if self.how == "computes" and trainer.global_rank == 0:
            metric = MeanMetric()
            metric.update(1.0)
            print(float(metric.compute()))
        if self.how == "sums a weight" and trainer.global_rank == 0:
            print(float(next(trainer.model.parameters()).full_tensor().sum()))
        if self.how == "saves" and trainer.global_rank == 0:
            trainer.save_checkpoint("alone.ckpt")


class EndsInStep(Quiet):
    """Rank 1 is killed while rank 0 waits in the gradients' reduction."""

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        if self.global_rank == 1 and self.trainer.global_step == 2:
            os._exit(7)
        super().optimizer_step(*args, **kwargs)


class EndsInValidation(Quiet):
    """Rank 1 is killed while rank 0 waits in a metric's own gathering."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.mean.update(self.loss(batch))
        self.log("mean", self.mean)

    def on_validation_batch_end(self, *_: Any) -> None:
        if self.global_rank == 1:
            os.kill(os.getpid(), 9)


ALONE = ("computes", "sums a weight")
"""What one rank does alone, where all have to."""


def main(how: str) -> None:
    if how in ALONE:
        control.LOOK_AROUND, control.SAY_SO, ranks.LOOK_AROUND = timedelta(seconds=0.3), 2.0, timedelta(seconds=0.3)
    trainer = L.Trainer(
        strategy="spmd_zero3" if how in ("sums a weight", "saves") else "spmd", devices=2, max_epochs=1,
        limit_val_batches=2 if how == "validates" else 0, num_sanity_val_steps=0, callbacks=[Ends(how)],
        use_distributed_sampler=False, **QUIET,
    )  # fmt: skip
    begun = time.monotonic()
    try:
        make = {"exits": EndsInStep, "validates": EndsInValidation}.get(how, Quiet)
        trainer.fit(make(), loader_of(rows(64), 4), loader_of(rows(64), 4))
    except Exception as error:
        notes = " ".join(getattr(error, "__notes__", []))
        print(f"{type(error).__name__}: {error} {notes}", flush=True)
        print(f"seconds {time.monotonic() - begun}", flush=True)
        os._exit(3)


if __name__ == "__main__":
    main(sys.argv[1])
