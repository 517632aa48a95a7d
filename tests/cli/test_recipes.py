"""Every recipe trains, at toy size, and computes what it computes without this package."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from lightning_spmd.examples import GPT2

from .conftest import Run
from .toys import RECIPES, hugging_face_model, toy

pytest.importorskip("jsonargparse")

NAMES = ("gpt2", "long_context", "image_classifier", "fine_tune", "own_module/recipe")


def metrics(results: Path) -> dict[str, list[float]]:
    """What a run logged, by name."""
    (file,) = results.glob("*/version_0/metrics.csv")
    found: dict[str, list[float]] = {}
    with file.open() as lines:
        for row in csv.DictReader(lines):
            for name, value in row.items():
                if value and name not in ("epoch", "step"):
                    found.setdefault(name, []).append(float(value))
    return found


def model_of(recipe: str, folder: Path) -> list[str]:
    """The arguments that name a model to fine-tune, for the recipe that needs one."""
    if recipe != "fine_tune":
        return []
    model = str(hugging_face_model(folder / "model"))
    return ["--model.path", model, "--data.tokenizer", model]


@pytest.mark.parametrize("recipe", NAMES)
def test_a_recipe_computes_what_it_computes_without_this_package(
    run: Run, recipe: str, text: Path, tmp_path: Path
) -> None:
    model = model_of(recipe, tmp_path)
    logged: dict[str, dict[str, list[float]]] = {}
    for strategy in ("spmd", "auto"):
        # The recipes' own strategy comes with its options; on one device only those that change memory matter.
        named = ["--trainer.strategy", "auto"] if strategy == "auto" else []
        arguments = toy(recipe, text, tmp_path / strategy, *model)
        if named:
            arguments = [*_without_strategy(arguments), *named]
        status, out, error = run("fit", *arguments)
        assert status == 0, error
        assert ("building the training graph" in out) == (strategy == "spmd")
        assert "eagerly" not in out + error
        logged[strategy] = metrics(tmp_path / strategy)
    assert len(logged["spmd"]["train_loss"]) >= 3
    assert any(name.startswith("val_") for name in logged["spmd"])
    assert logged["spmd"].keys() == logged["auto"].keys()
    for name, values in logged["auto"].items():
        assert logged["spmd"][name] == pytest.approx(values, rel=1e-5, abs=1e-7), name


@pytest.mark.parametrize("recipe", NAMES)
def test_a_recipe_is_planned(run: Run, recipe: str, text: Path, tmp_path: Path) -> None:
    shared = ["--trainer.strategy.context_parallel_size", "2"] if recipe == "long_context" else []
    given = [*toy(recipe, text, tmp_path / "runs", *model_of(recipe, tmp_path)), *shared]
    status, _, error = run("plan", *given, "--devices", "2", "--json", str(tmp_path / "plan.json"))
    assert status == 0, error
    facts = json.loads((tmp_path / "plan.json").read_text())
    assert facts["time"]["step"] > 0
    assert facts["run"]["mesh"]["context_parallel" if shared else "data_parallel"] == 2
    assert not (tmp_path / "runs").exists(), "a plan writes no logs"


def test_a_second_recipe_overrides_the_first(run: Run) -> None:
    both = ("--config", str(RECIPES / "gpt2.yaml"), "--config", str(RECIPES / "gpt2_8_gpus.yaml"))
    status, out, error = run("fit", *both, "--trainer.num_nodes", "4", "--print_config")
    assert status == 0, error
    recipe = yaml.safe_load(out)
    assert recipe["model"]["init_args"]["layers"] == 12
    trainer = recipe["trainer"]
    assert (trainer["devices"], trainer["num_nodes"], trainer["strategy"]) == (8, 4, "spmd_zero2")
    windows = recipe["data"]["init_args"]["batch_size"] * trainer["accumulate_grad_batches"] * 8
    assert windows == 512
    status, out, _ = run("fit", *both[:2], "--print_config")
    trainer = yaml.safe_load(out)["trainer"]
    assert 16 * trainer["accumulate_grad_batches"] == 512


def test_gpt2_is_the_model_of_124_million_parameters() -> None:
    with torch.device("meta"):
        module = GPT2()
        module.configure_model()
    assert sum(p.numel() for p in module.parameters()) == 124_439_808


def test_two_processes_find_the_class_beside_the_recipe(tmp_path: Path) -> None:
    arguments = toy("own_module/recipe", tmp_path, tmp_path / "results", "--trainer.devices", "2")
    command = [sys.executable, "-m", "lightning_spmd.cli.main", "fit", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "mesh: data_parallel 2" in done.stdout + done.stderr
    assert metrics(tmp_path / "results")["train_loss"]


def _without_strategy(arguments: list[str]) -> list[str]:
    """The arguments without options of the recipe's strategy."""
    options = [i for i, a in enumerate(arguments) if a.startswith("--trainer.strategy.")]
    return [a for i, a in enumerate(arguments) if i not in options and i - 1 not in options]
