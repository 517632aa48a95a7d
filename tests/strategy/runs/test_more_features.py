"""Features of Lightning that ask little of the strategy: callbacks, plugins, printing, wrapped modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import callbacks as cb
from lightning.pytorch.plugins import LayerSync, TorchCheckpointIO
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn

from lightning_spmd import SPMDStrategy
from lightning_spmd.errors import ConfigurationError
from tests.helpers.ranks import RankPool
from tests.helpers.training import InOrder, Result, assert_compiled, assert_equals_one_device
from tests.strategy.small import ROWS, Net, assert_as_eager, loader_of, rows, run


def _lookers() -> list[L.Callback]:
    return [
        cb.ModelSummary(),
        cb.EarlyStopping("loss", patience=10),
        cb.Timer(),
        cb.DeviceStatsMonitor(cpu_stats=False),
        cb.LambdaCallback(on_train_batch_end=lambda *_: None),
    ]


def test_callbacks_that_look_equal_eager() -> None:
    assert_as_eager(Net, callbacks=_lookers)


@pytest.mark.parametrize(
    "tuner", [cb.LearningRateFinder(num_training_steps=8), cb.BatchSizeFinder(max_trials=3, steps_per_trial=2)]
)
def test_tuners_train(tuner: L.Callback, tmp_path: Path) -> None:
    class Tuned(Net):
        def __init__(self) -> None:
            super().__init__()
            self.lr, self.batch_size = 0.1, 2

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=self.lr)

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(rows(), batch_size=self.batch_size)

        val_dataloader = train_dataloader

    trainer = L.Trainer(
        strategy="spmd", accelerator="cpu", devices=1, max_steps=5, logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[tuner], default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(Tuned())
    assert trainer.global_step == 5
    assert isinstance(trainer.strategy, SPMDStrategy)
    assert trainer.strategy.mode == "compiled"


def test_a_training_behind_a_tuner_draws_eagers_numbers(tmp_path: Path) -> None:
    class Tuned(Net):
        lr = 0.1

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=self.lr)

    def weights(strategy: str) -> dict[str, Tensor]:
        L.seed_everything(3)
        trainer = L.Trainer(
            strategy=strategy, accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_progress_bar=False,
            enable_model_summary=False, enable_checkpointing=False, default_root_dir=tmp_path,
        )  # fmt: skip
        module, data = Tuned(), torch.utils.data.DataLoader(rows(), batch_size=ROWS, shuffle=True)
        Tuner(trainer).lr_find(module, data, num_training=6, update_attr=False)
        trainer.fit(module, data)
        return module.state_dict()

    ours, theirs = weights("spmd"), weights("auto")
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())


def test_plugins_are_used(tmp_path: Path) -> None:
    saved: list[str] = []

    class Noting(TorchCheckpointIO):
        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            saved.append(Path(path).name)
            super().save_checkpoint(checkpoint, path, storage_options)

    class Failing(Net):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                raise KeyError("mine")

    environment = LightningEnvironment()
    trainer = L.Trainer(
        strategy="spmd", accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, plugins=[Noting(), environment],
        callbacks=[cb.OnExceptionCheckpoint(tmp_path, "last")],
    )  # fmt: skip
    with pytest.raises(KeyError, match="mine"):
        trainer.fit(Failing(), loader_of(rows()))
    assert saved == ["last.ckpt"]
    assert trainer.strategy.cluster_environment is environment  # type: ignore[attr-defined]
    assert torch.load(tmp_path / "last.ckpt", weights_only=False)["global_step"] == 3


def test_a_foreign_layer_sync_is_rejected() -> None:
    class Mine(LayerSync):
        def apply(self, model: nn.Module) -> nn.Module:
            return model

        def revert(self, model: nn.Module) -> nn.Module:
            return model

    with pytest.raises(ConfigurationError, match="layer sync plugin Mine: remove the plugin"):
        run(Net, plugins=[Mine()])


def test_print_runs_each_step(capsys: pytest.CaptureFixture[str]) -> None:
    class Printing(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.loss(batch)
            self.print("loss is", loss)
            return loss

    ours = run(Printing, max_epochs=1)
    assert_compiled(ours)
    printed = [
        float(line.split("(")[1].split(")")[0].split(",")[0])
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("loss is")
    ]
    assert printed == pytest.approx(ours.losses, abs=1e-4)


def test_a_compiled_submodule_equals_eager() -> None:
    class Wrapped(Net):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.compile(self.first, backend="eager")  # type: ignore[assignment]

    assert_as_eager(Wrapped)


def test_configure_model_equals_eager() -> None:
    class Late(Net):
        def __init__(self) -> None:
            super().__init__()
            del self.last

        def configure_model(self) -> None:
            if not hasattr(self, "last"):
                self.last = nn.Linear(10, 3)

    assert_as_eager(Late)


def test_one_device_needs_no_launcher() -> None:
    trainer = L.Trainer(strategy="spmd", accelerator="cpu", devices=1, logger=False)
    assert trainer.strategy.launcher is None
    launcher = L.Trainer(strategy="spmd", accelerator="cpu", devices=2, logger=False).strategy.launcher
    assert launcher is not None
    assert not launcher.is_interactive_compatible


class Recurrent(Net):
    """A layer of ``kind`` before the last one."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.dropout = nn.Identity()
        self.recurrent = kind(10, 10, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.recurrent(torch.tanh(self.first(x)).unsqueeze(1).expand(-1, 4, -1))
        return self.last(hidden[:, -1])


def test_a_gru_equals_eager() -> None:
    assert_as_eager(lambda: Recurrent(nn.GRU))


@pytest.mark.parametrize("kind", [pytest.param(nn.GRU, marks=pytest.mark.long), nn.LSTM])
def test_recurrent_layers_on_two_ranks_equal_one_device(two_ranks: RankPool, kind: type[nn.RNNBase]) -> None:
    results = two_ranks.run(_train_recurrent, kind)
    assert_compiled(*results)
    reference = run(lambda: Recurrent(kind), "auto", data=lambda: InOrder(rows(), ROWS, shuffle=False))
    assert_equals_one_device(results, reference)


def _train_recurrent(kind: type[nn.RNNBase]) -> Result:
    return run(lambda: Recurrent(kind), "spmd", 2)


class LogsInManyWays(Net):
    """Values and reductions as users give them, some by position."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Identity()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("positional", loss, True, True, True, True)
        self.log("synced", loss, on_epoch=True, sync_dist=True)
        self.log("largest", loss, on_epoch=True, reduce_fx="max")
        self.log("sum", batch[0].sum(), on_epoch=True, reduce_fx="sum", sync_dist=True)
        self.log("custom", loss, on_epoch=True, reduce_fx=torch.min)
        return loss


def test_logged_values_are_global_and_lightning_recommends_no_sync(two_ranks: RankPool) -> None:
    results = two_ranks.run(_train_logging)
    assert_equals_one_device(results, run(LogsInManyWays, "auto", data=lambda: InOrder(rows(), ROWS, shuffle=False)))
    told = [text for result in results for text in result.warnings if "sync_dist" in text and "custom" not in text]
    assert told == []


def _train_logging() -> Result:
    return run(LogsInManyWays, "spmd", 2)
