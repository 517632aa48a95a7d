"""The recipes of the sharding plans train through the command line, and agree with plain data parallelism."""

import csv
import math
import subprocess
import sys
from pathlib import Path

import pytest

from .recipe import RECIPE, tiny

pytest.importorskip("jsonargparse")

BATCH = 4
"""Rows of a step on all ranks together."""


def _validation(recipe: str, devices: int, parts: int, text: Path, results: Path, *more: str) -> float:
    """Train a recipe for four steps; the ``val_bits_per_byte`` it ends with.

    Args:
        recipe: its name.
        devices: how many it is run on; 0 leaves the recipe's own number.
        parts: among how many ranks the batch is split.
        text: what to train on.
        results: where to write.
        *more: other arguments.
    """
    arguments = ["--data.batch_size", str(BATCH // parts), "--trainer.log_every_n_steps", "1", *more]
    arguments += ["--trainer.devices", str(devices)] if devices else []
    arguments = ["--config", str(Path(RECIPE).with_name(f"{recipe}.yaml")), *tiny(text, results, *arguments)[2:]]
    command = [sys.executable, "-m", "lightning_spmd.cli.main", "fit", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert [done.stdout.count(f"sample {number} of 3") for number in (1, 2, 3)] == [1, 1, 1]
    assert "eagerly" not in done.stdout + done.stderr
    folder = results / recipe / "version_0"
    assert list((folder / "checkpoints").iterdir())
    with (folder / "metrics.csv").open() as file:
        found = [row["val_bits_per_byte"] for row in csv.DictReader(file)]
    return float(next(value for value in reversed(found) if value))


@pytest.fixture(scope="module")
def data_parallel(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """A text, and what plain data parallelism ends with on it.

    Two ranks, because one device draws its batches without a distributed sampler and sees others.
    """
    text = tmp_path_factory.mktemp("text")
    (text / "poem.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 100)
    return text, _validation("gpt_bytes", 2, 2, text, tmp_path_factory.mktemp("results"))


@pytest.mark.long
@pytest.mark.parametrize(
    ("recipe", "parts"), [("gpt_bytes_zero3", 2), ("gpt_bytes_tp", 1), ("gpt_bytes_cp", 1), ("gpt_bytes_2d", 2)]
)
def test_a_plans_recipe_trains_as_data_parallelism_does(
    recipe: str, parts: int, data_parallel: tuple[Path, float], tmp_path: Path
) -> None:
    text, wanted = data_parallel
    found = _validation(recipe, 0, parts, text, tmp_path)
    assert math.isfinite(wanted)
    assert found == pytest.approx(wanted, rel=1e-5)


@pytest.mark.long
def test_split_experts_train_as_whole_ones(data_parallel: tuple[Path, float], tmp_path: Path) -> None:
    text, _ = data_parallel
    whole = ("--trainer.strategy.expert_parallel_size", "1")
    found, wanted = (_validation("gpt_bytes_ep", 0, 2, text, tmp_path / str(len(more)), *more) for more in ((), whole))
    assert math.isfinite(wanted)
    assert found == pytest.approx(wanted, rel=1e-5)
