"""A file of the user's that cannot be imported, or a class that cannot be made: one line with file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_spmd.cli.broken_modules import broken_module

from .conftest import Run

pytest.importorskip("jsonargparse")

BROKEN = {
    "syntax": ("class M(L.LightningModule)\n    pass\n", "SyntaxError: expected ':'"),
    "no_attribute": ("WIDTH = [].no_such_thing()\n", "AttributeError: 'list' object has no attribute 'no_such_thing'"),
    "refuses": ("raise RuntimeError('set MY_DATA first')\n", "RuntimeError: set MY_DATA first"),
}


@pytest.mark.parametrize("how", BROKEN)
@pytest.mark.parametrize("by", ["recipe", "flag"])
def test_a_file_that_cannot_be_imported(run: Run, tmp_path: Path, how: str, by: str) -> None:
    code, said = BROKEN[how]
    module = f"broken_{how}_{by}"
    (tmp_path / f"{module}.py").write_text(f"import lightning as L\n\n{code}")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"model:\n  class_path: {module}.M\n" if by == "recipe" else "trainer:\n  max_steps: 1\n")
    flags = ["--model", f"{module}.M"] if by == "flag" else []
    status, _, error = run("fit", "--config", str(recipe), *flags)
    place = f"{tmp_path}/{module}.py:3"
    line = f"{recipe}, line 2: " if by == "recipe" else ""
    assert (status, error) == (
        2,
        f"lightning-spmd: error: {line}model.class_path: {module}.M: {module} cannot be imported: {said} at {place}\n",
    )


def test_a_class_that_fails_when_it_is_made(run: Run, tmp_path: Path) -> None:
    code = "import lightning as L\n\nclass M(L.LightningModule):\n    def __init__(self):\n        super().__init__()\n"
    (tmp_path / "fails_when_made.py").write_text(f"{code}        self.width = undefined_name\n")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model:\n  class_path: fails_when_made.M\n")
    status, _, error = run("fit", "--config", str(recipe))
    said = f"{recipe}, line 1: model: name 'undefined_name' is not defined at {tmp_path}/fails_when_made.py:6"
    assert status == 2
    assert error.endswith(f"lightning-spmd: error: {said}\n")


def test_files_that_are_not_there_are_told_elsewhere() -> None:
    assert broken_module("model", "Given value: {'class_path': 'nowhere.M'}") is None
    assert broken_module("model", "Given value: {'class_path': 'json.M'}") is None
