"""Writers that no Trainer knows, loggers with files, sizes among what a logger is given: all as in eager training."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.helpers.training import assert_compiled
from tests.strategy.kept_calls import Writer, plain, told
from tests.strategy.small import Quiet, run


class OwnWriter(Quiet):
    """Writers that no Trainer knows, and a library's function."""

    def __init__(self) -> None:
        super().__init__()
        self.writer = sys.modules["tensorboardX.writer"].SummaryWriter()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.writer.add_scalar("constant", 0.5, self.global_step)
        self.writer.add_histogram("weight", self.first.weight)
        self.writer.add_text("where", f"{self.writer.log_dir} {loss.item():.2f}")
        self.experiment.add_scalar("the Trainer's", loss.item())
        wandb.log({"loss": loss.item(), "batch": batch_idx})  # type: ignore[name-defined] # noqa: F821
        self.log("loss", loss)
        return loss

    def on_train_epoch_start(self) -> None:
        self.experiment = self.logger.experiment  # type: ignore[union-attr]
        if self.current_epoch == 2:
            self.writer.log_dir = "elsewhere"
        if self.current_epoch == 1:
            self.writer = sys.modules["tensorboardX.writer"].SummaryWriter()


def test_writers_of_ones_own_and_wandbs_function(monkeypatch: pytest.MonkeyPatch) -> None:
    writers: list[Writer] = []

    class SummaryWriter(Writer):
        def __init__(self) -> None:
            super().__init__()
            writers.append(self)

    def log(values: dict[str, Any]) -> None:
        writers[-1].told.append(plain(values))

    module = types.ModuleType("wandb")
    setattr(module, "log", log)  # noqa: B010 - a name that modules do not have
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setitem(globals(), "wandb", module)
    monkeypatch.setitem(
        sys.modules,
        "tensorboardX.writer",
        SimpleNamespace(SummaryWriter=SummaryWriter),  # type: ignore[arg-type]
    )
    told_by: list[list[Any]] = []
    for strategy in ("auto", "spmd"):
        writers.clear()
        ours, trainers = told(OwnWriter, strategy)
        told_by.append([*[writer.told for writer in writers], *trainers])
        assert "__getattribute__" not in vars(SummaryWriter)
    assert_compiled(ours)
    assert told_by[1] == told_by[0]
    assert getattr(module, "log") is log  # noqa: B009 - likewise


def test_files_of_a_logger_are_eagers(tmp_path: Path) -> None:
    files: list[str] = []
    for strategy in ("auto", "spmd"):
        result = run(WithFiles, strategy, logger=CSVLogger(tmp_path, version=strategy), log_every_n_steps=2)
        files.append((tmp_path / "lightning_logs" / strategy / "metrics.csv").read_text())
    assert_compiled(result)
    assert files[0] == files[1]
    assert "Logger" in repr(CSVLogger(tmp_path))  # its class is what it was


class WithFiles(Quiet):
    """Lightning's own logger."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        assert isinstance(self.logger, CSVLogger)
        self.logger.log_metrics({"mine": loss.item()}, self.global_step)
        print(self.logger.log_dir, self.logger.version)
        self.log("loss", loss)
        return loss


class Lengths(Quiet):
    """Sizes among what a logger is given."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = F.cross_entropy(self(x).mean(1), y)
        self.logger.log_metrics({"loss": loss, "length": x.shape[1], "twice": 2 * x.shape[1]})  # type: ignore[union-attr]
        return loss


def test_steps_of_many_sizes_tell_each_size() -> None:
    lengths = (5, 7, 9, 11, 6, 8, 10, 12)

    def data() -> Any:
        batches: Any = [(torch.linspace(0, n, 24 * n).sin().reshape(4, n, 6), torch.arange(4) % 3) for n in lengths]
        return DataLoader(batches, batch_size=None)

    _, expected = told(Lengths, "auto", data=data, max_epochs=1)
    ours, mine = told(Lengths, data=data, max_epochs=1)
    assert_compiled(ours)
    assert ours.captures <= len(lengths)  # a graph for each, where Python reads numbers as many as a size
    assert mine == expected
