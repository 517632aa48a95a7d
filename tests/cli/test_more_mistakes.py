"""Mistakes of somebody new: one line each, with what was written and what is allowed."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import fx

from lightning_spmd.errors import ConfigurationError
from lightning_spmd.ir.printer import write_stage
from lightning_spmd.ir.signature import Signature

from .conftest import Run
from .toys import RECIPES, toy

pytest.importorskip("jsonargparse")

OWN = ["fit", "--config", str(RECIPES / "own_module" / "recipe.yaml")]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([*OWN, "--model.class_path", "spirals.TwoSpirals"], "model.class_path: spirals.TwoSpirals is no LightningMod"),
        ([*OWN, "--trainer.strategy.timeout", "-5"], "'-5' is not what it takes: a time as hours:minutes:seconds (0:0"),
        ([*OWN, "--seed_everything", "-3"], "seed_everything: -3 is not what it takes: a whole number from 0 to 4294"),
        ([*OWN, "--seed_everything", "4294967296"], "seed_everything: 4294967296 is not what it takes"),
        ([*OWN, "--trainer.callbacks", "ModelChekpoint"], "a list. Did you mean ModelCheckpoint?"),
        ([*OWN, "--trainer.logger", "CSVLoger"], "Did you mean CSVLogger?"),
        (["train", *OWN[1:]], "train: there is no such command. There are fit, validate, test, predict, compare, plan"),
        (["plann", *OWN[1:]], "plann: there is no such command. Did you mean plan?"),
        (
            [],
            "which command? There are fit, validate, test, predict, compare, plan: lightning-spmd fit --config RECIPE",
        ),
        (["fit"], "there is no model: name a recipe with --config RECIPE, or a class with --model"),
        (["plan"], "there is no model: name a recipe with --config RECIPE, or a class with --model"),
        (["compare"], "there is no model: name a recipe with --config RECIPE, or a class with --model"),
    ],
    ids=lambda value: " ".join(value[-2:]) if isinstance(value, list) else "",
)
def test_it_is_one_line_that_says_what_to_write(run: Run, arguments: list[str], words: str) -> None:
    status, _, error = run(*arguments)
    said = [line for line in error.split("\n") if line]
    assert (status, len(said)) == (2, 1), error
    assert words in error


@pytest.mark.parametrize(("name", "hint"), [("EarlyStoping", ". Did you mean EarlyStopping?"), ("Foo", "a list\n")])
def test_a_class_in_a_list_of_a_recipe_is_named(run: Run, tmp_path: Path, name: str, hint: str) -> None:
    file = tmp_path / "callbacks.yaml"
    file.write_text(f"trainer:\n  callbacks:\n  - class_path: {name}\n    init_args: {{monitor: loss}}\n")
    status, _, error = run(*OWN, "--config", str(file))
    assert (status, len(error.splitlines())) == (2, 1), error
    assert f"trainer.callbacks: {name} is not what it takes: a class_path" in error
    assert hint in error


def test_a_metric_that_a_callback_misses_is_one_line(run: Run, tmp_path: Path) -> None:
    watch = ["--trainer.callbacks+", "EarlyStopping", "--trainer.callbacks.monitor", "vall"]
    status, _, error = run("fit", *toy("image_classifier", tmp_path, tmp_path), *watch)
    assert status == 1
    assert "error: trainer.callbacks: Early stopping conditioned on metric `vall` which is not" in error
    assert "Traceback" not in error


def test_graphs_that_cannot_be_written_name_the_option(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    empty = fx.GraphModule({}, fx.Graph())
    empty.graph.output(())
    with pytest.raises(ConfigurationError, match=r"dump_dir='.*file/graphs': graphs cannot be written there \(NotADir"):
        write_stage(tmp_path / "file" / "graphs", "captured", empty, Signature((), ()))
