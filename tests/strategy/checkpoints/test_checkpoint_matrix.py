"""Checkpoints of every plan, read by every other one and by a plain Trainer: training goes on undisturbed."""

from __future__ import annotations

import dataclasses
import functools
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_spmd import ConfigurationError, SPMDStrategy
from tests.helpers.modules import MLP, samples
from tests.helpers.ranks import RankError, RankPool
from tests.helpers.training import QUIET, InOrder, Result, TrainingCase, deviation, fit
from tests.strategy import killed_while_saving

CASE = TrainingCase("gpt", "adamw", "clip_norm", count=16 * 3, dropout=0.0, eps=1e-5, scheduler="one_cycle")
LAYERS: dict[str, Any] = {
    "tensor_parallel_size": 2,
    "tensor_parallel_plan": {
        "tokens": "embedding",
        "blocks.*.qkv": {"style": "colwise", "parts": 3},
        "blocks.*.projection": "rowwise",
        "blocks.*.mlp.0": "colwise",
        "blocks.*.mlp.2": "rowwise",
    },
}
PLANS: dict[str, dict[str, Any]] = {
    "replicate": {},
    "zero2": {"data_parallel": "zero2"},
    "zero3": {"data_parallel": "zero3"},
    "zero3 folder": {"data_parallel": "zero3", "save_distributed_checkpoint": True},
    "zero2 folder": {"data_parallel": "zero2", "save_distributed_checkpoint": True},
    "tp2": LAYERS,
    "tp2 folder": {**LAYERS, "save_distributed_checkpoint": True},
}
MESHES: dict[str, dict[str, Any]] = {
    "dp2 tp2": LAYERS,
    "zero3 tp2": {**LAYERS, "data_parallel": "zero3"},
    "hybrid": {"data_parallel": "zero3", "data_parallel_shard_size": 2},
    "hybrid folder": {"data_parallel": "zero2", "data_parallel_shard_size": 2, "save_distributed_checkpoint": True},
    "zero3 tp2 folder": {**LAYERS, "data_parallel": "zero3", "save_distributed_checkpoint": True},
}
"""On four ranks."""
FOLDERS = [name for name in PLANS if "folder" in name]
NOT_FOLDERS = [name for name in PLANS if name not in FOLDERS]


def _run(folder: str, strategy: Any, devices: int = 1, resume: str | None = None, epochs: int = 4) -> Result:
    case = CASE
    saver = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    data = InOrder(samples(case.model, case.count), case.rows)
    flags = {
        "max_epochs": epochs,
        "enable_checkpointing": True,
        **{k: v for k, v in case.flags().items() if "clip" in k},
    }
    return fit(case.module(), data, strategy, devices, [saver], resume, **flags)[0]


@functools.cache
def _whole() -> tuple[Result, Path]:
    folder = Path(tempfile.mkdtemp())
    return _run(str(folder), "auto"), folder / "epoch=1.ckpt"


_SAVED: dict[str, Path] = {}


def _saved(pool: RankPool, plan: str, tmp: Any) -> Path:
    if plan not in _SAVED:
        folder = tmp.mktemp("saved")
        pool.run(_run, str(folder), PLANS[plan], pool.size, epochs=2)
        _SAVED[plan] = folder / "epoch=1.ckpt"
    return _SAVED[plan]


def _assert_continues(resumed: Result, batches: int = 6) -> None:
    whole, count = _whole()[0], len(resumed.losses)
    wanted = dataclasses.replace(whole, losses=whole.losses[-count:], logged=[{}])
    found = deviation(dataclasses.replace(resumed, logged=[{}]), wanted)
    assert count == batches
    assert found.loss <= 1e-5, found
    assert found.weights <= 1e-4, found


@pytest.mark.long
@pytest.mark.parametrize("target", NOT_FOLDERS)  # a folder is another way to write, not to read
@pytest.mark.parametrize("source", PLANS)
def test_saved_under_one_plan_and_resumed_under_another(
    source: str, target: str, two_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    checkpoint = _saved(two_ranks, source, tmp_path_factory)
    assert checkpoint.is_dir() == (source in FOLDERS)
    folder = str(tmp_path_factory.mktemp("again"))
    _assert_continues(two_ranks.run(_run, folder, PLANS[target], 2, str(checkpoint))[0])


@pytest.mark.long
@pytest.mark.parametrize("target", ["zero2", "zero3"])
@pytest.mark.parametrize("source", ["zero3", "zero3 folder"])
def test_resumed_on_more_devices(
    source: str, target: str, two_ranks: RankPool, four_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    checkpoint = _saved(two_ranks, source, tmp_path_factory)
    folder = str(tmp_path_factory.mktemp("again"))
    _assert_continues(four_ranks.run(_run, folder, PLANS[target], 4, str(checkpoint))[0])


@pytest.mark.long
@pytest.mark.parametrize("target", MESHES)
@pytest.mark.parametrize("source", ["zero3 folder", "tp2"])
def test_resumed_on_a_mesh(
    source: str,
    target: str,
    two_ranks: RankPool,
    four_ranks: RankPool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    checkpoint = _saved(two_ranks, source, tmp_path_factory)
    folder = tmp_path_factory.mktemp("again")
    _assert_continues(four_ranks.run(_run, str(folder), MESHES[target], 4, str(checkpoint))[0])
    back = str(tmp_path_factory.mktemp("back"))
    _assert_continues(two_ranks.run(_run, back, PLANS["zero2"], 2, str(folder / "epoch=2.ckpt"))[0], batches=3)


@pytest.mark.parametrize("source", NOT_FOLDERS)
def test_a_plain_trainer_resumes(source: str, two_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> None:
    checkpoint = _saved(two_ranks, source, tmp_path_factory)
    _assert_continues(_run(str(tmp_path_factory.mktemp("again")), "auto", resume=str(checkpoint)))


@pytest.mark.parametrize(
    "target", [pytest.param(name, marks=() if name == "zero3" else pytest.mark.long) for name in NOT_FOLDERS]
)
def test_a_plain_trainers_checkpoint_is_resumed(
    target: str, two_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = str(tmp_path_factory.mktemp("again"))
    _assert_continues(two_ranks.run(_run, folder, PLANS[target], 2, str(_whole()[1]))[0])


@pytest.mark.long
@pytest.mark.parametrize("source", FOLDERS)
def test_one_device_resumes_from_a_folder(
    source: str, two_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    checkpoint = _saved(two_ranks, source, tmp_path_factory)
    _assert_continues(_run(str(tmp_path_factory.mktemp("again")), "spmd", resume=str(checkpoint)))


@pytest.mark.parametrize("plan", ["zero2", "zero3"])
def test_a_file_holds_plain_tensors(plan: str, two_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> None:
    """So it is safe to load, and a process without this package can."""
    loaded = torch.load(_saved(two_ranks, plan, tmp_path_factory), weights_only=True)
    tensors = [*loaded["state_dict"].values()]
    for values in loaded["optimizer_states"][0]["state"].values():
        tensors += [v for v in values.values() if isinstance(v, torch.Tensor)]
    assert {type(t) for t in tensors} == {torch.Tensor}
    assert all(t.device.type == "cpu" for t in tensors)
    assert set(loaded["optimizer_states"][0]["state"]) == set(range(len(loaded["optimizer_states"][0]["state"])))


def _validate_another_model(path: str) -> None:
    strategy = SPMDStrategy(data_parallel="zero3")
    trainer = L.Trainer(strategy=strategy, devices=2, **{**QUIET, "max_epochs": 5})
    trainer.fit(MLP(), InOrder(samples("mlp", 32), 16), ckpt_path=path)


@pytest.mark.parametrize("source", ["zero3", "zero3 folder"])
def test_another_models_checkpoint_is_refused_by_name(
    source: str, two_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with pytest.raises(RankError, match=r"tokens\.weight") as failure:
        two_ranks.run(_validate_another_model, str(_saved(two_ranks, source, tmp_path_factory)))
    assert None not in failure.value.type_names


def test_an_unknown_plan_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="zero4"):
        SPMDStrategy(data_parallel="zero4")  # type: ignore[arg-type]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_process_killed_while_saving_leaves_the_checkpoint_before(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    command = [sys.executable, "-m", killed_while_saving.__name__, str(path), kind]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode != 0
    case = killed_while_saving.CASE
    data = InOrder(samples(case.model, case.count), case.rows)
    result, trainer = fit(case.module(), data, "spmd", ckpt_path=str(path), max_epochs=2)
    assert trainer.global_step == 12
    assert len(result.losses) == 10  # it was written after two of twelve batches
