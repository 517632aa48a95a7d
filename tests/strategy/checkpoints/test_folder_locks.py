"""Two runs that would write checkpoints into one folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from unittest import mock

import lightning as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_spmd import SPMDStrategy
from lightning_spmd.errors import ConfigurationError
from lightning_spmd.strategy.checkpoints import folder_locks
from tests.helpers.training import QUIET
from tests.strategy.small import Quiet, loader_of, rows

OTHER = """
import fcntl, sys
mark = open(sys.argv[1], "w")
mark.write("process 7 on n1")
mark.flush()
fcntl.lockf(mark, fcntl.LOCK_EX)
print("has it", flush=True)
sys.stdin.read()
"""


def train(folder: Path) -> None:
    keeps = ModelCheckpoint(folder)
    settings = {**QUIET, "enable_checkpointing": True}
    trainer = L.Trainer(strategy=SPMDStrategy(), devices=1, callbacks=[keeps], max_steps=1, **settings)
    trainer.fit(Quiet(), loader_of(rows(8)))


def test_a_folder_into_which_another_run_writes_is_refused_until_that_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_locks, "_PATIENCE", 0.3)
    mark = tmp_path / folder_locks.MARK
    other = subprocess.Popen([sys.executable, "-S", "-c", OTHER, mark], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdout is not None
    other.stdout.readline()
    with pytest.raises(ConfigurationError, match=rf"another run \(process 7 on n1\) is writing .* into {tmp_path}"):
        train(tmp_path)
    assert not list(tmp_path.glob("*.ckpt"))
    other.kill()
    other.communicate()
    train(tmp_path)  # its mark is still there
    assert list(tmp_path.glob("*.ckpt"))
    assert not mark.exists()


def test_a_folder_that_cannot_be_marked_is_none_of_ours_to_refuse(tmp_path: Path) -> None:
    with mock.patch("fcntl.lockf", side_effect=OSError(95, "Operation not supported")):
        train(tmp_path)
    assert list(tmp_path.glob("*.ckpt"))
