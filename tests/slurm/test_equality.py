"""Jobs on several nodes equal one device."""

from __future__ import annotations

import csv
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.slurm.conftest import PATIENCE, Jobs, events, lines_of, weights_of

pytestmark = pytest.mark.slurm

PLAIN = ("--in-order", "--rows=32", "--epochs=2", "--flags", '{"use_distributed_sampler": false}')


@pytest.mark.parametrize(
    ("nodes", "tasks", "strategy"), [(2, 1, "spmd"), (2, 2, "spmd"), (2, 1, "spmd_zero3"), (2, 2, "spmd_zero3")]
)
def test_a_script_equals_one_device(jobs: Jobs, one_device: Any, nodes: int, tasks: int, strategy: str) -> None:
    job = jobs.wait(jobs.train(nodes, tasks, *PLAIN, f"--strategy={strategy}"))
    assert job.state == "COMPLETED", jobs.said()
    alone = one_device(*PLAIN)
    _assert_equal(jobs.folder / "run", alone, ranks=nodes * tasks)


def _assert_equal(folder: Path, alone: Path, ranks: int) -> None:
    expected = events(lines_of(alone))
    for rank in range(ranks):
        found = events(lines_of(folder, rank))
        assert [e.keys() for e in found] == [e.keys() for e in expected]
        for ours, theirs in zip(found, expected, strict=True):
            for key in ("loss", "validated"):
                if key in ours:
                    assert float.fromhex(ours[key]) == pytest.approx(float.fromhex(theirs[key]), rel=1e-5)
    weights, reference = weights_of(folder), weights_of(alone)
    assert weights.keys() == reference.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, reference[name], rtol=1e-5, atol=1e-5)


RECIPE = Path(__file__).parents[2] / "recipes/gpt_bytes.yaml"
TOY = {
    "model.width": 32,
    "model.layers": 1,
    "model.heads": 2,
    "model.sequence_length": 16,
    "data.sequence_length": 16,
    "data.path": str(Path(__file__)),
    "trainer.max_epochs": 2,
    "trainer.limit_train_batches": 6,
    "trainer.overfit_batches": 6,  # in order
    "trainer.log_every_n_steps": 1,
    "trainer.enable_progress_bar": "false",
    "trainer.accelerator": "cpu",
}


def _command(folder: Path, batch: int, **options: Any) -> list[str]:
    given = {**TOY, **{k.replace("__", "."): v for k, v in options.items()}, "data.batch_size": batch}
    given |= {"trainer.default_root_dir": folder, "trainer.logger.init_args.save_dir": folder}
    entry = [sys.executable, "-u", "-m", "lightning_spmd.cli.main", "fit", "--config", str(RECIPE)]
    return [*entry, *(f"--{k}={v}" for k, v in given.items())]


def _losses(folder: Path) -> list[float]:
    (file,) = folder.rglob("metrics.csv")
    rows = list(csv.DictReader(file.open()))
    (key,) = {key for key in rows[0] if key.startswith("loss") or key == "train_loss"} or {""}
    return [float(row[key]) for row in rows if row[key]]


@pytest.mark.parametrize(("nodes", "tasks"), [(2, 1), (2, 2)])
def test_the_main_recipe_equals_one_device(jobs: Jobs, tmp_path: Path, nodes: int, tasks: int) -> None:
    """``lightning-spmd fit --config gpt_bytes``, made small."""
    many = _command(tmp_path / "job", 16 // (nodes * tasks), trainer__devices=tasks, trainer__num_nodes=nodes)
    number = jobs.submit(f"srun {shlex.join(many)}", f"--nodes={nodes}", f"--ntasks-per-node={tasks}")
    subprocess.run(_command(tmp_path / "alone", 16), check=True, timeout=PATIENCE)
    assert jobs.wait(number).state == "COMPLETED", jobs.said("job")
    expected = _losses(tmp_path / "alone")
    assert len(expected) == 12
    assert _losses(tmp_path / "job") == pytest.approx(expected, rel=1e-5)
    ours, theirs = (_saved(tmp_path / name) for name in ("job", "alone"))
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-5, atol=1e-5)


def _saved(folder: Path) -> dict[str, torch.Tensor]:
    newest = max(folder.rglob("*.ckpt"), key=lambda file: file.stat().st_mtime)
    return torch.load(newest, weights_only=False)["state_dict"]
