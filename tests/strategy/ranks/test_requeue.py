"""A job that SLURM starts again goes on bitwise, wherever its signal came; here with a scontrol that ends the run."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_spmd import early_signals
from lightning_spmd.errors import ConfigurationError
from lightning_spmd.strategy.ranks.slurm import SlurmLauncher
from tests.helpers.training import QUIET
from tests.slurm.conftest import events, lines_of
from tests.slurm.train import Data, Diary, Small

ALONE = {
    "SLURM_NTASKS": "1",
    "SLURM_NTASKS_PER_NODE": "1",
    "SLURM_NNODES": "1",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "17",
    "SLURM_JOB_NAME": "train",
}


@pytest.fixture(autouse=True)
def slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """One task of a job; who asks for the job to be started again is told to stop."""
    for name, value in ALONE.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    _scontrol(tmp_path, 'echo "$@" > "$(dirname $0)/asked"; kill -TERM $PPID')
    yield
    early_signals.release()


def _scontrol(folder: Path, text: str) -> None:
    file = folder / "bin" / "scontrol"
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)


class Signal(L.Callback):
    """Sends SLURM's signal at a batch of training or validation, counted from the start of the process."""

    def __init__(self, training: int | None = None, validation: int | None = None) -> None:
        self.at = {"training": training, "validation": validation}
        self.count = {"training": 0, "validation": 0}

    def _count(self, what: str) -> None:
        if self.count[what] == self.at[what]:
            os.kill(os.getpid(), signal.SIGUSR1)
        self.count[what] += 1

    def on_train_batch_end(self, *_: Any) -> None:
        self._count("training")

    def on_validation_batch_start(self, *_: Any) -> None:
        self._count("validation")


def _fit(folder: Path, *callbacks: L.Callback, **flags: Any) -> tuple[Small, bool]:
    """The module, and whether the run was ended; each as a program of its own."""
    SlurmLauncher.fits = 0
    folder.mkdir(exist_ok=True)
    L.seed_everything(7, verbose=False)
    trainer = L.Trainer(
        strategy="spmd",
        plugins=[SLURMEnvironment()],
        callbacks=[*callbacks, Diary(folder, 0, 0)],
        default_root_dir=folder,
        **{**QUIET, "max_epochs": 2, "num_sanity_val_steps": 0, **flags},
    )
    module = Small(dropout=0.2)
    try:
        trainer.fit(module, datamodule=Data(40, 8))
    except SIGTERMException:
        return module, True
    return module, False


def _assert_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: Signal, **flags: Any) -> list[Any]:
    _, ended = _fit(tmp_path / "run", told, **flags)
    assert ended
    assert (tmp_path / "bin/asked").read_text() == "requeue 17\n"
    written = sorted(file.name for file in (tmp_path / "run").glob("*.ckpt"))
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    module, ended = _fit(tmp_path / "run", **flags)
    assert not ended
    whole, _ = _fit(tmp_path / "whole", **flags)
    assert events(lines_of(tmp_path / "run")) == events(lines_of(tmp_path / "whole"))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(module.parameters(), whole.parameters(), strict=True))
    return written


@pytest.mark.parametrize(
    "told",
    [
        pytest.param(Signal(training=2), id="in mid-epoch"),
        pytest.param(Signal(training=4), id="at the end of an epoch", marks=pytest.mark.matrix),
        pytest.param(Signal(validation=2), id="in a validation"),
    ],
)
def test_goes_on_bitwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: Signal) -> None:
    """With shuffled data, dropout, and a scheduler that waits for the validation."""
    assert _assert_goes_on(tmp_path, monkeypatch, told) == ["hpc_ckpt_1.ckpt"]


@pytest.mark.matrix
@pytest.mark.parametrize("flags", [{"accumulate_grad_batches": 3}, {"val_check_interval": 2}, {"max_steps": 8}])
def test_goes_on_bitwise_where_other_things_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any]
) -> None:
    """The end of an accumulation, and of a batch behind which no validation was, are waited for."""
    assert _assert_goes_on(tmp_path, monkeypatch, Signal(training=1), **flags) == ["hpc_ckpt_1.ckpt"]


def test_a_signal_before_the_first_batch_needs_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    early_signals.watch(signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGUSR1)
    _, ended = _fit(tmp_path / "run")
    assert ended
    assert (tmp_path / "bin/asked").read_text() == "requeue 17\n"
    assert list((tmp_path / "run").glob("*.ckpt")) == []


def test_where_slurm_refuses_training_goes_on(tmp_path: Path) -> None:
    _scontrol(tmp_path, "echo 'Requested operation is presently disabled'; exit 1")
    with pytest.warns(UserWarning, match="does not start this job again: `scontrol requeue 17` fails: Requested op"):
        _, ended = _fit(tmp_path / "run", Signal(training=1), max_epochs=1)
    assert not ended
    assert [line["step"] for line in lines_of(tmp_path / "run") if "step" in line] == [1, 2, 3, 4, 5]


def test_a_checkpoint_of_another_job_is_not_taken_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning goes on from whatever lies there."""
    _fit(tmp_path / "run", Signal(training=1))
    monkeypatch.setenv("SLURM_JOB_ID", "18")
    with pytest.raises(ConfigurationError, match="hpc_ckpt_1.ckpt was left by job 17.* this job, 18.*ckpt_path='hpc'"):
        _fit(tmp_path / "run")


class EvaluatedToo(Small):
    """Has a test too."""

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.layers(batch[0]).square().mean())

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layers(batch[0])


class SignalAfterFit(L.Callback):
    """Sends SLURM's signal in the third batch of an evaluation that follows training."""

    def on_test_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, *_: Any) -> None:
        if batch_idx == 2:
            os.kill(os.getpid(), signal.SIGUSR1)

    def on_validation_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, *_: Any) -> None:
        if batch_idx == 2 and trainer.state.fn != "fit":
            os.kill(os.getpid(), signal.SIGUSR1)

    on_predict_batch_start = on_test_batch_start


@pytest.mark.matrix
@pytest.mark.parametrize("method", ["test", "validate", "predict"])
def test_after_training_the_job_goes_on_with_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """The training that is over is not done again; what followed it is."""

    def run(*callbacks: L.Callback) -> tuple[list[Any], Any]:
        SlurmLauncher.fits = 0
        L.seed_everything(7, verbose=False)
        trainer = L.Trainer(
            strategy="spmd",
            plugins=[SLURMEnvironment()],
            callbacks=[*callbacks, Diary(tmp_path, 0, 0)],
            default_root_dir=tmp_path,
            **{**QUIET, "max_epochs": 1, "num_sanity_val_steps": 0},
        )
        module, data = EvaluatedToo(dropout=0.2), Data(40, 8)
        trainer.fit(module, _loader(data), _loader(data))
        trained = [tensor.detach().clone() for tensor in module.parameters()]
        return trained, getattr(trainer, method)(module, _loader(data))

    with pytest.raises(SIGTERMException):
        run(SignalAfterFit())
    assert (tmp_path / "hpc_ckpt_1.ckpt").is_file()
    steps = len([line for line in lines_of(tmp_path) if "step" in line])
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    trained, found = run()
    assert steps == 5
    assert len([line for line in lines_of(tmp_path) if "step" in line]) == steps
    whole = torch.load(tmp_path / "hpc_ckpt_1.ckpt", weights_only=False)["state_dict"]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(trained, whole.values(), strict=True))
    assert len(found) == (5 if method == "predict" else 1)


def test_what_a_launcher_refuses_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning tears down a strategy whose module has no Trainer yet."""

    def refuse(*_: Any, **__: Any) -> None:
        raise ValueError("as the cluster says")

    monkeypatch.setattr(SLURMEnvironment, "validate_settings", refuse)
    with pytest.raises(ValueError, match="as the cluster says"):
        _fit(tmp_path)


def test_what_follows_training_does_not_see_the_checkpoint_from_its_middle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning evaluates it, and another training begins with it."""
    (tmp_path / "ckpt_best.ckpt").touch()  # a name at which Lightning's numbering fails
    _fit(tmp_path, Signal(training=1))
    assert (tmp_path / "hpc_ckpt_1.ckpt").is_file()
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    module, _ = _fit(tmp_path)
    trained = [tensor.detach().clone() for tensor in module.parameters()]
    assert module.trainer is not None
    module.trainer.validate(module, _loader(Data(40, 8)), verbose=False)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(trained, module.parameters(), strict=True))
    with pytest.raises(ConfigurationError, match="written in fit number 1 of this program, and this is number 2"):
        module.trainer.fit(module, _loader(Data(40, 8)), _loader(Data(40, 8)))


def _loader(data: Data) -> Any:
    return torch.utils.data.DataLoader(data.rows, batch_size=8)  # type: ignore[arg-type]
