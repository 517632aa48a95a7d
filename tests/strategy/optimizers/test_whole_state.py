"""What callbacks save when training ends with an exception: never half a step, and no rank waits for the others."""

from __future__ import annotations

import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_spmd import SPMDStrategy
from lightning_spmd.stages.runtime.agreement import control, lost_ranks
from lightning_spmd.stages.runtime.executor import Executable, Program
from tests.helpers.ranks import RankPool
from tests.helpers.training import QUIET
from tests.strategy.small import Quiet, loader_of, rows

_LATER = {"raises": 0}


class RaisesAtThree(L.Callback):
    """In a hook, on rank 1 alone."""

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 3 and trainer.global_rank == trainer.world_size - 1:
            raise ValueError("a hook fails")


def _fit(folder: Path, callbacks: list[L.Callback], devices: int, **options: Any) -> tuple[str, list[str]]:
    saves = ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_last=True, save_on_exception=True)
    flags = {**QUIET, "enable_checkpointing": True}
    trainer = L.Trainer(
        strategy=SPMDStrategy(**options), devices=devices, max_epochs=1, callbacks=[*callbacks, saves],
        use_distributed_sampler=False, **flags,
    )  # fmt: skip
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            trainer.fit(Quiet(), loader_of(rows(48), 8))
        except BaseException as error:
            return type(error).__name__, [str(w.message) for w in said]
    return "", []


def _fit_impatiently(*args: Any, **options: Any) -> tuple[str, list[str]]:
    looks = mock.patch.object(control, "LOOK_AROUND", timedelta(seconds=0.2))
    with looks, mock.patch.object(lost_ranks, "PATIENCE", 0.3):
        return _fit(*args, **options)


def _step_of(path: Path) -> int:
    return int(torch.load(path, weights_only=True)["global_step"])


def test_a_step_that_ended_in_the_middle_is_not_saved(tmp_path: Path) -> None:
    original = Executable._compute

    def half(self: Executable, program: Program, *args: Any) -> Any:
        _LATER["raises"] += 1
        if _LATER["raises"] == 4:
            original(self, program, *args)  # written in part, or wholly: nobody knows
            raise MemoryError("in the middle")
        return original(self, program, *args)

    _LATER["raises"] = 0
    with mock.patch.object(Executable, "_compute", half):
        ended, said = _fit(tmp_path, [], 1)
    assert ended == "MemoryError"
    assert _step_of(tmp_path / "last.ckpt") == 2  # a checkpoint of step 3 with weights of step 4 took its place
    assert any("last.ckpt is not written: training ended in the middle of an update" in text for text in said), said


def test_between_steps_it_is_saved(tmp_path: Path) -> None:
    ended, said = _fit(tmp_path, [RaisesAtThree()], 1)
    assert ended == "ValueError"
    assert _step_of(tmp_path / "last.ckpt") == 3
    assert not any("is not written" in text for text in said)


@pytest.mark.parametrize("plan", ["replicate", "zero2"])
def test_a_rank_that_fails_alone_waits_for_nobody(plan: str, two_ranks: RankPool, tmp_path: Path) -> None:
    """With overlap it waited to finish what was pending, then to gather, then in a barrier, for the others to come."""
    options = {"data_parallel": plan, "overlap_iterations": True, "bucket_size_mb": 0.0001}
    first, second = two_ranks.run(_fit_impatiently, tmp_path, [RaisesAtThree()], 2, timeout=60, **options)
    assert (first[0], second[0]) == ("RankLostError", "ValueError")
    assert _step_of(tmp_path / "last.ckpt") == (3 if plan == "replicate" else 2)
