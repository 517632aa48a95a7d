"""Checkpoints: a resumed run is bitwise the uninterrupted one, and plain Lightning reads and writes the same files."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning, EarlyStopping, ModelCheckpoint
from torch import nn

from tests.helpers.modules import GPT, MLP, samples
from tests.helpers.ranks import RankPool
from tests.helpers.training import InOrder, Result, TrainingCase, assert_compiled, assert_equals_one_device, fit, whole
from tests.strategy.small import ROWS, Quiet, rows

CASE = TrainingCase("gpt", "adamw", shuffle=True, count=16 * 4, scheduler="one_cycle")
PER_EPOCH = 4


def _run(
    folder: Path,
    strategy: str,
    devices: int = 1,
    resume: Path | None = None,
    epochs: int = 4,
    case: TrainingCase = CASE,
) -> Result:
    """Train for ``epochs`` with a checkpoint each epoch; sampling on several ranks is in order."""
    saver = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    data = InOrder(samples(case.model, case.count), case.rows, case.shuffle and devices == 1)
    flags = {"max_epochs": epochs, "enable_checkpointing": True}
    return fit(case.module(), data, strategy, devices, [saver], resume, **flags)[0]


def _assert_continues(resumed: Result, whole: Result) -> None:
    """The resumed run's batches are the last ones of the whole run, and it ends in the same state."""
    assert resumed.losses == whole.losses[-len(resumed.losses) :]
    assert all(torch.equal(resumed.weights[k], v) for k, v in whole.weights.items())
    assert resumed.optimizer_state.keys() == whole.optimizer_state.keys()
    for name, value in whole.optimizer_state.items():
        same = torch.equal(resumed.optimizer_state[name], value) if isinstance(value, torch.Tensor) else (
            resumed.optimizer_state[name] == value
        )  # fmt: skip
        assert same, name


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    """``CASE`` in graphs, and where its checkpoints are; on one thread, as the tests that compare with it."""
    folder, threads = tmp_path_factory.mktemp("trained"), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _run(folder, "spmd"), folder
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("model", ["gpt", "mlp"])
def test_resume_is_bitwise(trained: tuple[Result, Path], tmp_path: Path, model: str) -> None:
    """With dropout and shuffling, from an end-of-epoch checkpoint, with as many graphs as a fresh run."""
    case = dataclasses.replace(CASE, model=model)
    whole, folder = (
        trained if model == CASE.model else (_run(tmp_path / "whole", "spmd", case=case), tmp_path / "whole")
    )
    resumed = _run(tmp_path / "again", "spmd", resume=folder / "epoch=1.ckpt", case=case)
    assert_compiled(whole, resumed)
    assert len(resumed.losses) == 2 * PER_EPOCH
    assert resumed.captures <= whole.captures
    _assert_continues(resumed, whole)


class StatefulLoader:
    """Shuffled batches by its own generator; it can save and load its position."""

    def __init__(self, data: list[Any], rows: int) -> None:
        self.data, self.rows = data, rows
        self.epoch, self.position = 0, 0

    def __len__(self) -> int:
        return len(self.data) // self.rows

    def __iter__(self) -> Iterator[Any]:
        torch.empty((), dtype=torch.int64).random_()  # as a DataLoader draws the seed of its workers, at once
        return self._batches()

    def _batches(self) -> Iterator[Any]:
        order = torch.randperm(len(self.data), generator=torch.Generator().manual_seed(self.epoch)).tolist()
        for start in range(self.position * self.rows, len(self) * self.rows, self.rows):
            self.position += 1
            if self.position == len(self):  # before the last batch: Lightning never asks for the one after it
                self.epoch, self.position = self.epoch + 1, 0
            yield torch.utils.data.default_collate([self.data[i] for i in order[start : start + self.rows]])

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]


def test_resume_in_mid_epoch_is_bitwise_with_a_loader_that_keeps_its_place(tmp_path: Path) -> None:
    def run(resume: Path | None) -> Result:
        saver = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, every_n_train_steps=3)
        loader = StatefulLoader(samples("gpt", CASE.count), CASE.rows)
        flags = {"max_epochs": 3, "enable_checkpointing": True}
        return fit(CASE.module(), loader, "spmd", 1, [saver], resume, **flags)[0]

    whole = run(None)
    resumed = run(tmp_path / "step=6.ckpt")
    assert_compiled(whole, resumed)
    assert len(resumed.losses) == 3 * PER_EPOCH - 6
    _assert_continues(resumed, whole)


@pytest.mark.parametrize(("writer", "reader"), [("spmd", "auto"), ("auto", "spmd")])
def test_checkpoints_are_plain_lightning_ones(tmp_path: Path, writer: str, reader: str) -> None:
    """Without dropout or shuffling, what ``auto`` wrote goes on under ``spmd`` bitwise, and the other way round."""
    case = dataclasses.replace(CASE, dropout=0.0, shuffle=False)
    whole = _run(tmp_path / "whole", writer, case=case)
    resumed = _run(tmp_path / "again", reader, resume=tmp_path / "whole/epoch=1.ckpt", case=case)
    _assert_continues(resumed, whole)


def test_a_checkpoint_holds_what_lightnings_own_holds(trained: tuple[Result, Path], tmp_path: Path) -> None:
    """The same keys, weights, optimizer and scheduler state; readable with ``weights_only=True``."""
    _run(tmp_path / "auto", "auto", epochs=2)
    ours = torch.load(trained[1] / "epoch=1.ckpt", weights_only=True)
    theirs = torch.load(tmp_path / "auto/epoch=1.ckpt", weights_only=True)
    assert ours.keys() - {"lightning_spmd"} == theirs.keys()
    assert all(torch.equal(ours["state_dict"][k], v) for k, v in theirs["state_dict"].items())
    assert str(ours["optimizer_states"]) == str(theirs["optimizer_states"])
    assert str(ours["lr_schedulers"]) == str(theirs["lr_schedulers"])
    assert (ours["global_step"], ours["epoch"]) == (theirs["global_step"], theirs["epoch"])


def test_load_from_checkpoint_gives_the_trained_module(trained: tuple[Result, Path]) -> None:
    result, folder = trained
    module = GPT.load_from_checkpoint(folder / "epoch=3.ckpt", weights_only=True)
    assert module.hparams.scheduler == "one_cycle"
    assert all(torch.equal(module.state_dict()[k], v) for k, v in result.weights.items())


def _watched(strategy: str, folder: Path) -> tuple[Result, str, int]:
    best = ModelCheckpoint(folder, monitor="val_loss", filename="{epoch}")
    stop = EarlyStopping("val_loss", patience=1)
    module = MLP(optimizer="sgd", dropout=0.0)
    L.seed_everything(5)
    data = InOrder(samples("mlp", 96), 16, evaluation=samples("mlp", 160)[96:])
    flags = {"max_epochs": 12, "enable_checkpointing": True, "limit_val_batches": 1.0}
    result, trainer = fit(module, data, strategy, 1, [best, stop], **flags)
    return result, Path(best.best_model_path).name, trainer.current_epoch


def test_model_checkpoint_and_early_stopping_decide_as_eager(tmp_path: Path) -> None:
    L.seed_everything(7)
    ours = _watched("spmd", tmp_path / "spmd")
    L.seed_everything(7)
    theirs = _watched("auto", tmp_path / "auto")
    assert ours[1:] == theirs[1:]
    assert ours[0].logged == theirs[0].logged


def test_resume_on_two_ranks_is_bitwise(two_ranks: RankPool, tmp_path: Path) -> None:
    """With dropout: the streams of random numbers go on as well."""
    whole = two_ranks.run(_run, tmp_path / "whole", "spmd", 2)
    resumed = two_ranks.run(_run, tmp_path / "again", "spmd", 2, tmp_path / "whole/epoch=1.ckpt")
    assert_compiled(*whole, *resumed)
    assert len(resumed[0].losses) == 2 * PER_EPOCH
    for ours, reference in zip(resumed, whole, strict=True):
        _assert_continues(ours, reference)


def test_a_checkpoint_of_two_ranks_goes_on_on_one_device(two_ranks: RankPool, tmp_path: Path) -> None:
    case = TrainingCase("gpt", "adamw", dropout=0.0, eps=1e-5, count=CASE.count)
    whole = two_ranks.run(_run, tmp_path / "whole", "spmd", 2, case=case)[0]
    resumed = _run(tmp_path / "again", "auto", resume=tmp_path / "whole/epoch=1.ckpt", case=case)
    assert resumed.losses == pytest.approx(whole.losses[-2 * PER_EPOCH :], rel=1e-5)


class Grown(Quiet):
    """Half of it frozen at first; keeps tensors of its own in checkpoints, and makes a layer of the size it finds."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.last = nn.Linear(10, classes)
        self.kept: Any = None
        self.at_start: list[Any] = []

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["kept"] = {"first": self.first.weight.detach().clone(), "norm": self.first.weight.detach().norm()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.kept = checkpoint["kept"]
        if self.last.out_features != 3:
            self.last = nn.Linear(10, 3)

    def on_fit_start(self) -> None:
        self.at_start = [whole(self.first.weight.detach()), self.kept]

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], 0.01, eps=1e-5)


class UnfreezesFirst(BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.first)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.first, optimizer, 0.02)


def _grown(folder: Path, strategy: Any, devices: int = 1) -> tuple[Result, list[Any]]:
    """Two epochs, and a third one of a module that was built in another size."""
    file, data = folder / "last.ckpt", InOrder(rows(ROWS * 2), ROWS)
    saver = ModelCheckpoint(folder, save_last=True)
    L.seed_everything(5)
    fit(Grown(), data, strategy, devices, [UnfreezesFirst(), saver], max_epochs=2, enable_checkpointing=True)
    module = Grown(3 if isinstance(strategy, dict) and strategy["save_distributed_checkpoint"] else 5)
    resumed = fit(module, data, strategy, devices, [UnfreezesFirst()], file, max_epochs=3)[0]
    return resumed, module.at_start


@pytest.mark.parametrize("folder", [False, True])
def test_a_checkpoint_is_there_before_hooks_of_a_fit_whatever_the_plan(
    folder: bool, two_ranks: RankPool, tmp_path: Path
) -> None:
    """What callbacks restore in on_fit_start (groups of optimizers), and what hooks put into the file."""
    strategy = {"data_parallel": "zero3", "save_distributed_checkpoint": folder}
    theirs, (weight, kept) = _grown(tmp_path / "one", "auto")
    for ours, (own_weight, own_kept) in two_ranks.run(_grown, tmp_path / "two", strategy, 2):
        assert_equals_one_device([ours], theirs)
        torch.testing.assert_close([own_weight, own_kept], [weight, kept], rtol=1e-4, atol=1e-5)
