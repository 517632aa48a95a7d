"""A wheel and an sdist are built, installed without the checkout, and train.

The package alone is installed, into a fresh environment: torch, Lightning and the others are those of the environment
that runs the tests, whose folders stand behind the fresh one's own (``borrowed.pth``). Installing them once more would
take gigabytes and show nothing of this package; that its requirements can be had is what `.ci/run` shows. Python reads
no ``.pth`` files in folders that stand in one, so an editable install of the checkout there is not seen.
"""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
SCRIPT = """
import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

import lightning_spmd


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def training_step(self, batch, batch_idx):
        rows, kinds = batch
        return torch.nn.functional.cross_entropy(self.layer(rows), kinds)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


if __name__ == "__main__":
    data = DataLoader(TensorDataset(torch.randn(40, 4), torch.randint(2, (40,))), batch_size=4)
    trainer = L.Trainer(strategy="spmd", accelerator="cpu", devices=1, max_epochs=1, logger=False)
    trainer.fit(Module(), data)
    print("trained:", lightning_spmd.__file__, trainer.strategy.mode, trainer.global_step)
"""


def said(*command: str | Path, folder: Path) -> str:
    """What a command prints; run in a folder, and without what names modules of the checkout."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST"))}
    environment["OMP_NUM_THREADS"] = "1"
    done = subprocess.run(
        list(map(str, command)), cwd=folder, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def packaged(folder: str) -> set[str]:
    """The files that git would take of a folder of the checkout, by path."""
    files = (file for file in (ROOT / folder).rglob("*") if file.is_file() and "__pycache__" not in file.parts)
    return {file.relative_to(ROOT).as_posix() for file in files}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that is built of it."""
    tools = tmp_path_factory.mktemp("tools")
    venv.create(tools, with_pip=True)
    said(tools / "bin/python", "-m", "pip", "install", "--quiet", "build", folder=tools)
    out = tmp_path_factory.mktemp("built")
    said(tools / "bin/python", "-m", "build", "--outdir", out, ROOT, folder=tools)
    return out


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment in which the wheel is installed."""
    fresh = tmp_path_factory.mktemp("fresh")
    venv.create(fresh, with_pip=True)
    (wheel,) = built.glob("*.whl")
    said(fresh / "bin/python", "-m", "pip", "install", "--quiet", "--no-deps", wheel, folder=fresh)
    (own,) = fresh.glob("lib/python*/site-packages")
    borrowed = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    (own / "borrowed.pth").write_text("".join(f"{folder}\n" for folder in borrowed))
    return fresh / "bin"


def test_the_wheel_has_the_package_and_nothing_else(built: Path) -> None:
    (file,) = built.glob("*.whl")
    with zipfile.ZipFile(file) as wheel:
        names = set(wheel.namelist())
        (metadata,) = (wheel.read(name).decode() for name in names if name.endswith(".dist-info/METADATA"))
    package = {name for name in names if ".dist-info/" not in name}
    recipes = {f"lightning_spmd/{name}" for name in packaged("recipes")}
    assert package == packaged("lightning_spmd") | recipes
    assert "lightning_spmd/py.typed" in package
    assert "lightning_spmd/recipes/own_module/spirals.py" in package
    assert any(re.fullmatch(r"lightning_spmd-[\d.]+\.dist-info/licenses/LICENSE", name) for name in names)
    assert "License-Expression: Apache-2.0" in metadata
    assert f"{sys.version_info.major}.{sys.version_info.minor}" in re.findall(r":: Python :: (3\.\d+)", metadata)


def test_the_sdist_has_what_its_tests_and_pages_need(built: Path, tmp_path: Path) -> None:
    (file,) = built.glob("*.tar.gz")
    with tarfile.open(file) as sdist:
        sdist.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    tops = {"LICENSE", "README.md", "pyproject.toml", ".gitignore", "PKG-INFO"}
    wanted = set[str]().union(*(packaged(top) for top in ("lightning_spmd", "recipes", "tests", "docs", ".ci")))
    assert names == wanted | tops
    assert os.access(folder / ".ci/test", os.X_OK)
    tests = ["tests/docs/test_links.py", "tests/cli/test_recipe_names.py", "tests/release"]
    assert " passed" in said(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, folder=folder)


def test_a_recipe_trains_by_name_from_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    ten = ("--trainer.limit_train_batches", "10", "--trainer.max_epochs", "1", "--trainer.limit_val_batches", "2")
    every = ("--trainer.log_every_n_steps", "1", "--trainer.accelerator", "cpu")
    told = said(installed / "lightning-spmd", "fit", "--config", "gpt_bytes", *ten, *every, folder=tmp_path)
    assert "building the training graph" in told
    assert "eagerly" not in told
    results = tmp_path / "runs/gpt_bytes/version_0"
    with (results / "metrics.csv").open() as lines:
        losses = [float(row["train_loss"]) for row in csv.DictReader(lines) if row["train_loss"]]
    assert len(losses) == 10
    assert losses[-1] < losses[0]
    assert (results / "config.yaml").is_file()
    assert list(results.glob("checkpoints/*.ckpt"))


def test_two_processes_train_a_recipe_with_code_beside_it(installed: Path, tmp_path: Path) -> None:
    small = ("--data.points", "200", "--model.width", "8", "--trainer.max_epochs", "1", "--trainer.accelerator", "cpu")
    command = (installed / "lightning-spmd", "fit", "--config", "own_module", *small, "--trainer.devices", "2")
    assert "mesh: data_parallel 2" in said(*command, folder=tmp_path)


def test_a_recipe_is_planned_and_compared_by_name(installed: Path, tmp_path: Path) -> None:
    given = ("--config", "gpt_bytes.yaml", "--model.width", "16", "--model.layers", "1", "--trainer.accelerator", "cpu")
    assert "mesh: data_parallel 2" in said(
        installed / "lightning-spmd", "plan", *given, "--devices", "2", folder=tmp_path
    )
    few = ("--steps", "3", "--warmup", "3", "--rounds", "1")
    assert "ddp" in said(installed / "lightning-spmd", "compare", *given, *few, folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_script_trains_with_the_installed_package(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    told = said(installed / "python", "train.py", folder=tmp_path)
    file, mode, steps = told.partition("trained: ")[2].split()[:3]
    assert Path(file).is_relative_to(installed.parent)
    assert (mode, steps) == ("compiled", "10")


def test_the_command_says_its_version(installed: Path, built: Path, tmp_path: Path) -> None:
    version = said(installed / "lightning-spmd", "--version", folder=tmp_path).split()[1]
    assert [file.name for file in built.glob("*.whl")] == [f"lightning_spmd-{version}-py3-none-any.whl"]
