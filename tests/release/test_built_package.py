"""The wheel holds every file of the package, and all of its modules are imported from it, outside of the checkout.

In seconds, so it is a default test: no environment is made and nothing is installed. ``test_wheel.py`` does both.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

from tests.release.test_wheel import ROOT, packaged

IMPORTS = """
import importlib
import sys
from pathlib import Path

folder = Path(sys.argv[1])
sys.path.insert(0, str(folder))
for name in sys.argv[2:]:
    file = importlib.import_module(name).__file__
    assert file is not None, f"{name} has no __init__.py"
    assert Path(file).is_relative_to(folder), f"{name} is that of {file}"
"""


def test_every_module_is_imported_from_the_wheel(tmp_path: Path) -> None:
    # hatchling itself, without `build`: that makes an environment first
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    (file,) = tmp_path.glob("*.whl")
    folder = tmp_path / "unpacked"
    with zipfile.ZipFile(file) as wheel:
        wheel.extractall(folder)
    files = {path.relative_to(folder).as_posix() for path in (folder / "lightning_spmd").rglob("*") if path.is_file()}
    recipes = {f"lightning_spmd/{name}" for name in packaged("recipes")}
    missing = sorted((packaged("lightning_spmd") | recipes) - files)
    assert not missing, f"not in the wheel: {missing}. A name in .gitignore without a leading slash is every folder's"

    modules = [
        f.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for f in files - recipes if f[-3:] == ".py"
    ]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [sys.executable, "-c", IMPORTS, str(folder), *sorted(modules)]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
