"""What the command line answers to mistakes, and to what a recipe has in the way of a flag."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from lightning_spmd import messages
from lightning_spmd.cli.one_line import one_line
from lightning_spmd.cli.recipe_cli import with_class_for_name
from lightning_spmd.cli.recipe_files import with_place

from .conftest import Run
from .recipe import RECIPE, tiny

pytest.importorskip("jsonargparse")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--trainer.strategy", "spdm"], ["no strategy 'spdm'. Did you mean 'spmd'?", "has spmd, spmd_zero2,"]),
        (["--trainer.strategy", "best"], ["no strategy 'best'. This package has spmd", "Lightning has auto, ddp"]),
        (["--trainer.strategy.overlap_iterations", "maybe"], ["'maybe' is not what it takes: true, false, auto"]),
        (["--trainer.strategy.data_parallel", "zero4"], ["'zero4' is not what it takes: replicate, zero2, zero3"]),
        (["--trainer.strategy.reduce_dtype", "int8"], ["'int8' is not what it takes: bf16, fp16, fp32, null"]),
        (["--trainer.strategy.bucket_size_mb", "big"], ["'big' is not what it takes: a number, auto"]),
        (["--trainer.strategy.overlap", "true"], ["no 'overlap'. Did you mean 'overlap_iterations'?"]),
        (["--trainer.strategy.zzz", "true"], ["no 'zzz'. It has accelerator, parallel_devices"]),
        (["--trainer.devises", "2"], ["Did you mean --trainer.devices?"]),
        (["--model.widht", "64"], ["model.init_args.widht: ", "GPTBytes has no 'widht'. Did you mean 'width'?"]),
        (["--model.width", "wide"], ["model.init_args.width: 'wide' is not what it takes: a whole number"]),
        (["--model.heads", "5"], ["GPTBytes(width=128, heads=5): heads must divide width"]),
        (["--trainer.strategy.tensor_parallel_size", "3"], ["tensor_parallel_size=3 needs a tensor_parallel_plan"]),
        (["--trainer.devices", "many", "--trainer.accelerator", "cpu"], ["trainer.devices: many is not"]),
    ],
)  # fmt: skip
def test_a_mistake_is_answered_with_what_to_write(run: Run, arguments: list[str], words: list[str]) -> None:
    status, _, error = run("fit", "--config", RECIPE, *arguments)
    assert status == 2
    for word in words:
        assert word in error, error
    assert len([line for line in error.splitlines() if "Seed set" not in line]) == 1, error


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (
            {"max_epochs": "max_epoch"},
            "line 32: trainer.max_epoch: there is no such key. Did you mean trainer.max_epochs?",
        ),
        (
            {"seed_everything": "seed_evrything"},
            "line 6: seed_evrything: there is no such key. Did you mean seed_everything?",
        ),
        (
            {"batch_size:": "bath_size:"},
            "line 24: data.init_args.bath_size: lightning_spmd.examples.TextBytes has no",
        ),
        (
            {"GPTBytes": "GPTByte"},
            "line 9: model.class_path: lightning_spmd.examples has no 'GPTByte'. Did you mean",
        ),
        ({"lightning_spmd.ex": "lightning_spdm.ex"}, "there is no module lightning_spdm. It is looked for"),
        (
            {"refresh_rate": "refresh_rat"},
            "SPMDProgressBar has no 'refresh_rat'. Did you mean 'refresh_rate'?",
        ),
        ({"model:": "model: [", "data:": "dat"}, "recipe.yaml, line 10, column 12: this is not YAML: "),
    ],
    ids=lambda value: next(iter(value), "") if isinstance(value, dict) else "",
)
def test_a_wrong_key_of_a_recipe_is_answered_in_one_line(
    run: Run, tmp_path: Path, wrong: dict[str, str], words: str
) -> None:
    text = Path(RECIPE).read_text()
    for old, new in wrong.items():
        text = text.replace(old, new)
    (tmp_path / "recipe.yaml").write_text(text)
    status, _, error = run("fit", "--config", str(tmp_path / "recipe.yaml"))
    assert (status, len(error.splitlines())) == (2, 1), error
    assert words in error


@pytest.mark.parametrize("command", ["fit", "plan", "compare"])
def test_each_command_names_key_and_line(run: Run, tmp_path: Path, command: str) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(Path(RECIPE).read_text().replace("max_epochs", "max_epoch"))
    status, _, error = run(command, "--config", str(recipe))
    said = "line 32: trainer.max_epoch: there is no such key. Did you mean trainer.max_epochs?"
    assert (status, error.splitlines()[-1].partition("error: ")[2]) == (2, f"{recipe}, {said}")


RECIPE_OF_CALLBACKS = """\
trainer:
  max_epochs: 1
  callbacks:
  - class_path: lightning.pytorch.callbacks.EarlyStopping
    init_args:
      monitor: loss
      patience: 3
  - class_path: lightning.pytorch.callbacks.Timer
    init_args: {duration: 1}
"""


@pytest.mark.parametrize(
    ("mistake", "arguments", "place"),
    [
        ("trainer.max_epochs: no", [], "line 2: "),
        ("trainer.max_epochs: no", ["--trainer.max_epochs", "many"], ""),
        ("trainer.max_epochs: no", ["--trainer.max_epoch", "many"], "line 2: "),
        ("trainer.callbacks: no", [], "line 3: "),
        ("trainer.callbacks: no", ["--trainer.callbacks+=Timer"], ""),
        ("trainer.callbacks.init_args.patience: no", [], "line 7: "),
        ("trainer.callbacks.init_args.duration: no", [], "line 9: "),
        ("trainer.callbacks.class_path: no", [], "line 3: "),  # of which one?
        ("trainer.devices is missing", [], "line 1: "),
        ("model.init_args.width is missing: a.B needs it", [], ""),
        ("the disk is full: trainer.max_epochs", [], ""),
    ],
)
def test_the_line_of_a_mistake(tmp_path: Path, mistake: str, arguments: list[str], place: str) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE_OF_CALLBACKS)
    said = with_place(mistake, ["fit", "--config", str(recipe), *arguments])
    assert said == (f"{recipe}, {place}{mistake}" if place else mistake)


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (["--trainer.strategy.overlap_iterations", "true"], {"overlap_iterations": True, "data_parallel": "replicate"}),
        (
            ["--trainer.strategy=spmd_zero2", "--trainer.strategy.bucket_size_mb", "3"],
            {"bucket_size_mb": 3.0, "data_parallel": "zero2"},
        ),
        (
            ["--trainer.strategy", "spmd_zero3", "--trainer.devices", "2", "--trainer.strategy.reduce_dtype=bf16"],
            {"reduce_dtype": "bf16", "data_parallel": "zero3"},
        ),
    ],
)
def test_a_strategy_by_name_takes_options(run: Run, arguments: list[str], options: dict[str, object]) -> None:
    status, out, _ = run("fit", "--config", RECIPE, *arguments, "--print_config")
    assert status == 0
    strategy = yaml.safe_load(out)["trainer"]["strategy"]
    assert strategy["class_path"] == "lightning_spmd.SPMDStrategy"
    assert options.items() <= strategy["init_args"].items()


@pytest.mark.parametrize(
    "arguments",
    [
        ["fit", "--config", RECIPE],
        ["fit", "--config", RECIPE, "--trainer.strategy", "spmd"],
        ["fit", "--trainer.strategy", "ddp", "--trainer.strategy.timeout", "3"],
        ["fit", "--config", RECIPE, "--trainer.strategy=lightning_spmd.SPMDStrategy", "--trainer.strategy.passes", "x"],
        ["fit", "--trainer.strategy.dump_dir", "x"],
    ],
)  # fmt: skip
def test_other_arguments_stay_as_they_are(arguments: list[str]) -> None:
    assert with_class_for_name(arguments) == arguments


def test_a_message_that_nobody_knows_is_told_as_it_is() -> None:
    assert one_line("something\n  else", ["--a"]) == "something else"
    assert one_line("Problem with given class_path 'no.such.Thing':\n Option 'x' is not accepted", []) == (
        ".init_args.x: no.such.Thing has no 'x'. It has "
    )


@pytest.mark.parametrize(
    ("flag", "gone"),
    [
        ("enable_progress_bar", "SPMDProgressBar"),
        ("enable_checkpointing", "ModelCheckpoint"),
        ("logger", "LearningRateMonitor"),
    ],
)
def test_the_recipes_callbacks_step_aside(
    run: Run, text: Path, tmp_path: Path, flag: str, gone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(messages, "rank_zero_info", said.append)
    arguments = [a for a in tiny(text, tmp_path) if "logger" not in a and a != str(tmp_path)]
    arguments.remove("--trainer.default_root_dir")
    flags = [f"--trainer.{flag}", "false", "--trainer.default_root_dir", str(tmp_path)]
    status, out, error = run("fit", *arguments, *flags, "--trainer.max_steps", "1")
    assert status == 0, error
    assert f"{gone} of the recipe steps aside: trainer.{flag} is false" in said
    assert ("building the training graph" in out) == (flag != "enable_progress_bar")
