"""The command line as a user meets it: recipes, overrides, mistakes."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lightning_spmd.cli import main as cli

from .recipe import RECIPE, tiny

pytest.importorskip("jsonargparse")


def test_print_config_fills_in_the_recipe(run) -> None:
    status, out, _ = run("fit", "--config", RECIPE, "--trainer.devices", "2", "--data.path", "books", "--print_config")
    config = yaml.safe_load(out)
    assert status == 0
    assert config["trainer"]["devices"] == "2"
    assert config["trainer"]["strategy"] == "spmd"
    assert config["data"] == {
        "class_path": "lightning_spmd.examples.TextBytes",
        "init_args": {
            "path": "books",
            "sequence_length": 128,
            "batch_size": 16,
            "num_workers": 0,
            "validation_fraction": 0.05,
        },
    }
    assert config["model"]["class_path"] == "lightning_spmd.examples.GPTBytes"


def test_help_names_the_subcommands(run) -> None:
    status, out, _ = run("--help")
    assert status == 0
    assert out.startswith("usage: lightning-spmd {fit,validate,test,predict,compare,plan} ")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--trainer.devises", "2"), "devises"),
        (("--model.widht", "64"), "widht"),
        (("--data.pathh", "books"), "pathh"),
        (("--trainer.max_epochs", "two"), "two"),
    ],
)
def test_a_wrong_argument_is_named(run, arguments: tuple[str, ...], named: str) -> None:
    status, _, error = run("fit", "--config", RECIPE, *arguments)
    assert status == 2
    assert named in error
    assert len(error.splitlines()) < 20


@pytest.mark.parametrize(
    ("section", "key"),
    [("trainer", "max_epoch"), ("model", "width_"), ("data", "folder"), (None, "modle")],
)
def test_a_wrong_key_in_a_recipe_is_named(run, tmp_path: Path, section: str | None, key: str) -> None:
    recipe = yaml.safe_load(Path(RECIPE).read_text())
    place = recipe if section is None else recipe[section].get("init_args", recipe[section])
    place[key] = 1
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe))
    status, _, error = run("fit", "--config", str(file))
    assert status == 2
    assert key in error


def test_a_missing_recipe_is_named(run) -> None:
    status, _, error = run("fit", "--config", "recipes/nowhere.yaml")
    assert status == 2
    assert "recipes/nowhere.yaml" in error


def test_without_jsonargparse_the_fix_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "RequirementCache", lambda requirement: False)
    with pytest.raises(SystemExit, match=r"pip install 'lightning-spmd\[cli\]'"):
        cli.main(["fit"])


@pytest.mark.parametrize("strategy", ["auto", "spmd"])
def test_fit_trains_validates_samples_and_saves(run, text: Path, tmp_path: Path, strategy: str) -> None:
    status, out, _ = run("fit", *tiny(text, tmp_path, "--trainer.strategy", strategy))
    assert status == 0
    assert out.count("sample ") == 3
    results = tmp_path / "gpt_bytes" / "version_0"
    assert "val_bits_per_byte" in (results / "metrics.csv").read_text()
    assert yaml.safe_load((results / "config.yaml").read_text())["trainer"]["strategy"] == strategy
    (checkpoint,) = (results / "checkpoints").glob("*.ckpt")
    for command in ("validate", "test", "predict"):
        assert (
            run(command, *tiny(text, tmp_path, "--trainer.strategy", strategy, "--ckpt_path", str(checkpoint)))[0] == 0
        )


def test_a_rerun_into_the_same_folder_replaces_its_recipe(run, text: Path, tmp_path: Path) -> None:
    same_folder = ("--trainer.logger.version", "0", "--trainer.strategy", "auto")
    for seed in ("1", "2"):
        assert run("fit", *tiny(text, tmp_path, *same_folder, "--seed_everything", seed))[0] == 0
    saved = tmp_path / "gpt_bytes" / "version_0" / "config.yaml"
    assert yaml.safe_load(saved.read_text())["seed_everything"] == 2


def test_two_processes_train_from_the_console_script(text: Path, tmp_path: Path) -> None:
    arguments = tiny(text, tmp_path, "--trainer.strategy", "spmd", "--trainer.devices", "2")
    command = [sys.executable, "-m", "lightning_spmd.cli.main", "fit", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sample 1 of 3") == 1
