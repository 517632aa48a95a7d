"""Every recipe trains, at toy size, and computes what it computes without this package."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from .conftest import Run
from .toys import hugging_face_model, toy

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


def _without_strategy(arguments: list[str]) -> list[str]:
    """The arguments without options of the recipe's strategy."""
    options = [i for i, a in enumerate(arguments) if a.startswith("--trainer.strategy.")]
    return [a for i, a in enumerate(arguments) if i not in options and i - 1 not in options]
