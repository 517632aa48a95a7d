"""Mistakes in recipes, from files that are none to checkpoints of another model: one line, with what to write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_spmd import messages
from lightning_spmd.cli.first_steps import refused_with
from lightning_spmd.cli.recipe_files import mistake_in_recipes
from lightning_spmd.cli.trainer_values import wrong_value
from lightning_spmd.errors import RankLostError

from .conftest import Run
from .recipe import RECIPE, tiny
from .toys import RECIPES, hugging_face_model, toy

pytest.importorskip("jsonargparse")

MAIN = Path(RECIPE).read_text()


def lines(error: str) -> list[str]:
    """What a command wrote to stderr, without what Lightning says at its start."""
    said = [line.split("\r")[-1] for line in error.split("\n")]
    return [line for line in said if line and "Seed set" not in line and "it/s]" not in line]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (MAIN.replace("    width: 128", "\twidth: 128"), ", line 11, column 1: this is not YAML|there is a tab"),
        (MAIN.replace("    width: 128", "   width: 128"), ", line 12, column 11: this is not YAML: mapping values"),
        (
            MAIN.replace("layers: 4", "layers: 4\n    layers: 8"),
            "line 13: model.init_args.layers is there already, in li",
        ),
        (MAIN + "trainer:\n  devices: 2\n", "trainer is there already, in line"),
        (
            MAIN.replace("refresh_rate: 20", "leave: 1"),
            "trainer.callbacks[0].init_args.leave is there already, in line",
        ),
        ("", "it holds nothing; a recipe has keys: model, data, trainer"),
        ("# a comment\n", "it holds nothing"),
        ("- a\n- b\n", "it holds a list; a recipe has keys"),
        ("hello\n", "it holds one value; a recipe has keys"),
        (
            MAIN.replace("class_path: lightning_spmd.examples.GPT", "class_pth: G"),
            "model.class_pth: there is no such key",
        ),
        (MAIN.replace("Bytes\n  init_args", "Bytes\n  init_arg"), "Did you mean model.init_args?"),
        (b"\xff\xfe\x00", "this is no text, so no recipe"),
        (
            MAIN.replace("lightning_spmd.examples.GPTBytes", "5"),
            "line 9: model.class_path: give the path of a class, such",
        ),
        (
            "model:\n  class_path: a.B\n  init_args: [1]\n",
            "line 3: model.init_args: give names with values, one a line;",
        ),
        (
            "trainer:\n  callbacks: [a.B, null]\n",
            "line 2: trainer.callbacks: number 2 of the list is 'null', which is no",
        ),
        ("trainer:\n  callbacks:\n  - EarlyStoping\n", "is 'EarlyStoping', which is no callback. Did you mean EarlySt"),
    ],
)
def test_a_file_that_is_no_recipe_is_named_with_its_line(text: str | bytes, words: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    mistake = mistake_in_recipes(["fit", "--config", str(file)])
    assert mistake is not None
    assert "\n" not in mistake
    assert str(file) in mistake
    for part in words.split("|"):
        assert part in mistake, mistake


def test_every_recipe_here_is_one() -> None:
    assert mistake_in_recipes([]) is None
    for file in RECIPES.rglob("*.yaml"):
        assert mistake_in_recipes(["fit", f"--config={file}"]) is None


def test_a_name_that_is_taken_twice_by_an_alias_is_fine(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("model: &m\n  a: &m2 [1]\ndata:\n  <<: *m\n  b: *m2\ntrainer:\n  a: *m2\n")
    assert mistake_in_recipes(["-c", str(tmp_path / "a.yaml")]) is None


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gpt_byte.yaml", "there is no such file, seen from |Did you mean {folder}/gpt_bytes.yaml?"),
        ("zzz", "there is no such file|: fine_tune.yaml, gpt2.yaml"),
        ("", "this is a folder. Name a file in it: fine_tune.yaml, gpt2.yaml"),
        ("nowhere/recipe.yaml", "there is no such file, seen from"),
    ],
)
def test_a_recipe_that_is_not_there_is_named_with_those_that_are(run: Run, name: str, words: str) -> None:
    status, _, error = run("fit", "--config", str(RECIPES / name))
    assert (status, len(error.splitlines())) == (2, 1), error
    assert error.startswith("lightning-spmd: error: --config ")
    for part in words.format(folder=RECIPES).split("|"):
        assert part in error


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("accumulate_grad_batches", 0, "a whole number of at least 1"),
        ("check_val_every_n_epoch", 0, "a whole number of at least 1"),
        ("devices", "0", "a whole number of at least 1, a list of devices, auto"),
        ("devices", "-2", "a whole number"),
        ("devices", "1.5", "a whole number"),
        ("gradient_clip_val", -1.0, "a number of at least 0, or null"),
        ("limit_train_batches", -1, "a share of them between 0.0 and 1.0"),
        ("limit_train_batches", 1.5, "a whole number of batches"),
        ("log_every_n_steps", -1, "at least 0"),
        ("max_epochs", -3, "at least -1, where -1 is without end"),
        ("max_steps", -5, "at least -1"),
        ("num_nodes", 0, "at least 1"),
        ("val_check_interval", 0, "a whole number of batches of at least 1"),
        ("val_check_interval", 2.0, "a share of an epoch above 0.0"),
    ],
)
def test_a_number_that_the_trainer_cannot_mean_is_refused(key: str, value: Any, allowed: str) -> None:
    wrong = wrong_value({"devices": "auto", key: value})
    assert wrong is not None
    assert wrong.startswith(f"trainer.{key}: {value} is not what it takes: ")
    assert allowed in wrong


@pytest.mark.parametrize(
    "trainer",
    [
        {"devices": "auto", "max_epochs": None, "max_steps": -1, "limit_val_batches": 0, "val_check_interval": 0.25},
        {"devices": [0, 2], "num_sanity_val_steps": -1, "limit_train_batches": 1.0, "gradient_clip_val": None},
        {"devices": "-1", "overfit_batches": 0.0, "max_epochs": -1, "val_check_interval": "00:01:00:00"},
        {"devices": 4, "gradient_clip_val": 0, "log_every_n_steps": 0, "barebones": True},
        {"devices": "0,1"},
    ],
)
def test_what_the_trainer_takes_is_left_alone(trainer: dict[str, Any]) -> None:
    assert wrong_value(trainer) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"trainer:": "trianer:"}, "trianer: there is no such key. Did you mean trainer?"),
        ({"\nmodel:": "\nmodell:"}, "modell: there is no such key. Did you mean model?"),
        ({"  class_path: lightning_spmd.examples.GPTBytes\n": ""}, "model.class_path is missing: name the class"),
        (
            {"length: 200": "length: -3"},
            "trainer.callbacks: SampleText(length=-3, temperature=0.7): neither may be neg",
        ),
        ({"batch_size: 16": "batch_size: 0"}, "data: TextBytes(sequence_length=128, batch_size=0): both must be"),
        ({"layers: 4": "layers: null"}, "model: GPTBytes(layers=None): give a whole number of at least 1."),
        ({'["def ", "class ", "import "]': "abc"}, "init_args.prompts: 'abc' is not what it takes: a list"),
        ({"layers: 4": "layers: 0"}, "model: GPTBytes(layers=0): give a whole number of at least 1."),
        ({"log_every_n_steps: 10": "log_every_n_steps: -10"}, "trainer.log_every_n_steps: -10 is not what it takes"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_wrong_value_names_its_place_in_the_recipe(
    run: Run, tmp_path: Path, change: dict[str, str], words: str
) -> None:
    text = MAIN
    for old, new in change.items():
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "recipe.yaml").write_text(text)
    status, _, error = run("fit", "--config", str(tmp_path / "recipe.yaml"), "--trainer.accelerator", "cpu")
    assert (status, len(lines(error))) == (2, 1), error
    assert words in error


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--model", "spirals.SpiralClassifer"],
            "model.class_path: spirals has no 'SpiralClassifer'. Did you mean 'Sp",
        ),
        (
            ["--model", "spiral.Mine"],
            "model.class_path: spiral.Mine: there is no module spiral. It is looked for beside",
        ),
        (
            ["--model", "my_project.models.Mine"],
            "there is no module my_project. It is looked for beside the recipe, in",
        ),
        (
            ["--model", "broken.Mine"],
            "model.class_path: broken.Mine: broken was found, and it imports not_installed, wh",
        ),
        (["--model", "spirals.TwoSpirals"], "model.class_path: spirals.TwoSpirals is no LightningModule"),
        (["--data", "spirals.SpiralClassifier"], "data.class_path: spirals.SpiralClassifier is no LightningDataModule"),
        (
            ["--trainer.callbacks", "bar"],
            "trainer.callbacks: bar is not what it takes: a class_path (my_project.MyClass)",
        ),
        (
            ["--optimizer", "AdamWW"],
            "optimizer: AdamWW is not what it takes: a class_path (my_project.MyClass). Did you",
        ),
        (
            ["--model.widht", "3"],
            "model.init_args.widht: spirals.SpiralClassifier has no 'widht'. Did you mean 'width'?",
        ),
        (["--trainer.strategy", "lightning_spmd.SPMDStrateg"], "Did you mean 'lightning_spmd.SPMDStrategy'?"),
        (["--trainer.accelerator", "gppu"], "trainer.accelerator: You selected an invalid accelerator name"),
        (["--trainer.strategy.bucket_size_mb", "-1"], "trainer.strategy: bucket_size_mb=-1.0: give a number of MiB"),
    ],
)
def test_a_class_that_cannot_be_had_is_named_with_where_it_was_looked_for(
    run: Run, tmp_path: Path, arguments: list[str], words: str
) -> None:
    for file in ("spirals.py", "recipe.yaml"):
        (tmp_path / file).write_text((RECIPES / "own_module" / file).read_text())
    (tmp_path / "broken.py").write_text("import not_installed\n\n\nclass Mine: ...\n")
    status, _, error = run("fit", "--config", str(tmp_path / "recipe.yaml"), *arguments)
    assert (status, len(lines(error))) == (2, 1), error
    assert words in error


def _longer(arguments: list[str], _: Path) -> list[str]:
    return [*arguments, "--data.sequence_length", "32"]


def _no_text(arguments: list[str], folder: Path) -> list[str]:
    (folder / "empty").mkdir()
    return [*arguments, "--data.path", str(folder / "empty")]


def _foreign(arguments: list[str], folder: Path) -> list[str]:
    (folder / "foreign.ckpt").write_bytes(b"garbage")
    return [*arguments, "--ckpt_path", str(folder / "foreign.ckpt")]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda given, _: [*given, "--data.path", "/nowhere"], "--data.path='/nowhere' does not exist"),
        (_no_text, "holds no text file"),
        (_longer, "data.sequence_length=32 is more than 16, the longest input of GPTBytes (model.sequence_length)"),
        (
            lambda given, _: [*given, "--ckpt_path", "/nowhere.ckpt"],
            "ckpt_path: Checkpoint file not found: /nowhere.ckpt",
        ),
        (_foreign, "foreign.ckpt cannot be read: it is no file of torch.save (7 bytes)"),
        (
            lambda given, _: [*given, "--trainer.val_check_interval", "99"],
            "`val_check_interval` (99) must be less than",
        ),
        (lambda given, _: [*given, "--trainer.strategy.data_parallel_size", "3"], "data_parallel_size=3"),
        (lambda given, _: [*given, "--model.learning_rate", "-1"], "Invalid learning rate: -1.0"),
    ],
)
def test_what_data_and_checkpoints_refuse_is_one_line(
    run: Run, text: Path, tmp_path: Path, change: Callable[[list[str], Path], list[str]], words: str
) -> None:
    status, _, error = run("fit", *change(tiny(text, tmp_path), tmp_path))
    assert (status, len(lines(error))) == (1, 1), error
    assert lines(error)[0].startswith("lightning-spmd fit: error: ")
    assert words in error


def test_a_checkpoint_of_another_model_is_named(
    run: Run, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(messages, "rank_zero_info", said.append)
    assert run("fit", *tiny(text, tmp_path, "--trainer.limit_train_batches", "1"))[0] == 0
    (checkpoint,) = tmp_path.rglob("*.ckpt")
    given = [*tiny(text, tmp_path), "--model.width", "32", "--ckpt_path", str(checkpoint)]
    status, _, error = run("validate", *given)
    assert status == 0, error
    assert "model.width is 16, as the checkpoint of ckpt_path has it, not 32" in said
    content = torch.load(checkpoint, weights_only=True)
    del content["hyper_parameters"]
    torch.save(content, checkpoint)
    for command in ("fit", "validate"):
        status, _, error = run(command, *given)
        assert (status, len(lines(error))) == (1, 1), error
        assert "ckpt_path: the checkpoint is not of this GPTBytes: size mismatch for model." in error


@pytest.mark.parametrize(
    ("recipe", "arguments", "words"),
    [
        ("gpt2", ["--data.tokenizer", "/nowhere"], "--data.tokenizer='/nowhere' is not a folder"),
        ("gpt2", ["--data.path", "/nowhere.bin"], "--data.path='/nowhere.bin' does not exist"),
        ("gpt2", ["--model.vocabulary_size", "100"], "the data has 256 different tokens, and GPT2 knows 100"),
        (
            "image_classifier",
            ["--model.classes", "3"],
            "the data has 8 classes (circle, ring, square, frame, triangle, ..",
        ),
        (
            "image_classifier",
            ["--data.path", "{empty}"],
            "empty has 0 subfolders. Give one subfolder of images for each",
        ),
        ("fine_tune", [], "model.init_args.path is missing: lightning_spmd.examples.FineTunedLM needs it"),
        ("fine_tune", ["--model.path", "/nowhere"], "model: model.path='/nowhere' is not a folder"),
        ("fine_tune", ["--model.path", "{empty}"], "holds no causal language model"),
        ("fine_tune", ["--model.path", "{model}", "--data.tokenizer", "{empty}"], "holds no tokenizer"),
        (
            "fine_tune",
            ["--model.path", "{model}", "--model.frozen", "[nope]"],
            "no parameter of the model begins with 'no",
        ),
        (
            "fine_tune",
            ["--model.path", "{model}", "--data.sequence_length", "32"],
            "is more than 16, the longest input",
        ),
    ],
)
def test_what_a_recipes_classes_refuse_is_one_line(
    run: Run, text: Path, tmp_path: Path, recipe: str, arguments: list[str], words: str
) -> None:
    (tmp_path / "empty").mkdir()
    if "{model}" in arguments:
        hugging_face_model(tmp_path / "model")
    given = [a.format(empty=tmp_path / "empty", model=tmp_path / "model") for a in arguments]
    status, _, error = run("fit", *toy(recipe, text, tmp_path / "results"), *given)
    assert status in (1, 2), error
    assert len(lines(error)) == 1, error
    assert words in error


def test_a_bug_keeps_its_traceback() -> None:
    def raised(make: Callable[[], Any]) -> BaseException:
        with pytest.raises(Exception) as caught:  # noqa: PT011  (of many kinds)
            make()
        return caught.value

    assert refused_with(raised(lambda: torch.zeros(2) @ torch.zeros(3))) is None
    assert refused_with(raised(lambda: int("x"))) is None
    assert refused_with(MisconfigurationException("said\n so")) == "said so"


def test_another_ranks_end_is_one_line() -> None:
    lost = RankLostError("rank 1 failed with ValueError: no\n (at data.py:3). This rank was waiting")
    assert refused_with(lost) == "rank 1 failed with ValueError: no (at data.py:3). This rank was waiting"


def test_a_recipe_without_its_flag_is_told_the_flag(run: Run) -> None:
    status, _, error = run("fit", RECIPE)
    assert (status, error) == (2, f"lightning-spmd: error: {RECIPE}: a recipe is named with --config {RECIPE}\n")


@pytest.mark.parametrize("command", [(), ("fit",), ("fitt",), ("--config", RECIPE), ("fit", "--config")])
def test_half_a_command_is_answered(run: Run, command: tuple[str, ...]) -> None:
    status, _, error = run(*command)
    assert (status, len(error.splitlines())) == (2, 1), error
