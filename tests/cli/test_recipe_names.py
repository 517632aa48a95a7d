"""Recipes of the package are found by name, from any folder."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from lightning_spmd.cli.recipe_names import named_recipes, recipe_folder, recipe_named, with_files_for_names

from .conftest import Run
from .toys import RECIPES

pytest.importorskip("jsonargparse")

FILES = sorted(RECIPES.rglob("*.yaml"))


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_every_recipe_has_a_name() -> None:
    assert recipe_folder() == RECIPES
    assert sorted(named_recipes().values()) == FILES
    assert named_recipes()["gpt_bytes"] == RECIPES / "gpt_bytes.yaml"
    assert named_recipes()["own_module"] == RECIPES / "own_module/recipe.yaml"


@pytest.mark.parametrize("name", named_recipes())
def test_a_recipe_is_found_by_name(name: str) -> None:
    for written in (name, f"{name}.yaml"):
        assert with_files_for_names(["fit", "--config", written]) == ["fit", "--config", str(named_recipes()[name])]


def test_commands_read_the_recipe_of_a_name(run: Run) -> None:
    status, out, error = run("fit", "--config", "gpt2", "--config", "gpt2_8_gpus", "--print_config")
    assert status == 0, error
    recipe = yaml.safe_load(out)
    assert (recipe["model"]["init_args"]["layers"], recipe["trainer"]["devices"]) == (12, 8)


@pytest.mark.parametrize("name", ["own_module/recipe", "own_module/recipe.yaml", "own_module.yaml"])
def test_a_recipe_beside_code_is_named_by_folder_or_file(name: str) -> None:
    assert recipe_named(name) == RECIPES / "own_module/recipe.yaml"


@pytest.mark.parametrize(
    "name", ["", ".", "recipe", "recipes", "gpt_bytes.yml", "recipes/gpt_bytes.yaml", "/gpt_bytes"]
)
def test_what_is_no_name_stays_what_it_is(name: str) -> None:
    for given in (["fit", "--config", name], ["fit", "-c", name], ["fit", f"--config={name}"], ["fit", name]):
        assert with_files_for_names(given) == given


def test_only_what_follows_the_flag_is_a_name() -> None:
    file = str(RECIPES / "gpt2.yaml")
    given = ["fit", "gpt2", "--config", "gpt2", "--config=gpt2.yaml", "-c", "gpt2", "--data.path", "gpt2", "--config"]
    assert with_files_for_names(given) == [
        *("fit", "gpt2", "--config", file, f"--config={file}", "-c", file, "--data.path", "gpt2", "--config")
    ]


def test_a_file_that_exists_wins(run: Run, tmp_path: Path) -> None:
    (tmp_path / "gpt_bytes").write_text((RECIPES / "gpt_bytes.yaml").read_text().replace("layers: 4", "layers: 7"))
    status, out, error = run("fit", "--config", "gpt_bytes", "--print_config")
    assert status == 0, error
    assert yaml.safe_load(out)["model"]["init_args"]["layers"] == 7


def test_a_folder_that_hides_a_recipe_says_how_to_name_it(run: Run, tmp_path: Path) -> None:
    (tmp_path / "gpt_bytes").mkdir()
    status, _, error = run("fit", "--config", "gpt_bytes")
    assert (status, len(error.splitlines())) == (2, 1), error
    assert "--config gpt_bytes: this is a folder." in error
    assert error.endswith(f"The recipe gpt_bytes of this package is --config {RECIPES / 'gpt_bytes.yaml'}\n")


@pytest.mark.parametrize("command", ["fit", "validate", "plan", "compare"])
def test_a_mistyped_name_is_answered_with_those_that_are_near_and_all_that_there_are(run: Run, command: str) -> None:
    status, _, error = run(command, "--config", "gpt_byte")
    assert (status, len(error.splitlines())) == (2, 1), error
    assert "no recipe of this package has that name. Did you mean gpt_bytes" in error
    assert error.endswith(f"The package has {', '.join(named_recipes())}\n")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--config", "zzz"], "no recipe of this package has that name. The package has fine_tune, "),
        (["--config", "recipes/gpt_bytes.yaml"], "Did you mean gpt_bytes, a recipe of this package?"),
        (["--config", "recipes/own_module/recipe.yaml"], "Did you mean own_module, a recipe of this package?"),
        (["gpt_bytes"], "gpt_bytes: a recipe is named with --config gpt_bytes"),
    ],
)
def test_what_was_nearly_a_name_is_answered_with_the_name(run: Run, given: list[str], words: str) -> None:
    status, _, error = run("fit", *given)
    assert (status, len(error.splitlines())) == (2, 1), error
    assert words in error


def test_a_file_beside_is_a_guess_too(run: Run, tmp_path: Path) -> None:
    (tmp_path / "gpt_bits.yaml").write_text("trainer: {}\n")
    _, _, error = run("fit", "--config", "gpt_bit.yaml")
    assert "Did you mean gpt_bits.yaml or " in error


def test_a_recipe_is_planned_by_name(run: Run, tmp_path: Path) -> None:
    small = ("--model.width", "16", "--model.layers", "1", "--data.batch_size", "2")
    status, out, error = run("plan", "--config", "gpt_bytes", *small, "--devices", "2", "--device-type", "cpu")
    assert status == 0, error
    assert out
    assert list(tmp_path.iterdir()) == []


def test_commands_in_the_recipes_comments_name_recipes() -> None:
    named = [
        (file, name)
        for file in FILES
        for line in re.sub(r"\\\n#", "", file.read_text()).splitlines()
        if line.startswith("#") and "lightning-spmd" in line
        for name in re.findall(r"--config (\S+)", line)
    ]
    assert {file.name for file, _ in named} == {file.name for file in FILES} - {"gpt2_8_gpus.yaml"}
    for file, name in named:
        assert name in named_recipes(), f"{file}: {name}"


def test_the_version_is_told_with_those_that_matter(run: Run) -> None:
    status, out, _ = run("--version")
    assert status == 0
    said = " ".join(out.split())
    assert re.fullmatch(r"lightning-spmd \d+\.\d+\.\d+ \(torch \S+, lightning \S+, Python \S+\)", said)
