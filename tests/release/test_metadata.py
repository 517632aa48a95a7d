"""What pyproject.toml says of the package is true."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import lightning_spmd

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_types_are_marked_and_the_license_is_there() -> None:
    assert (Path(lightning_spmd.__file__).parent / "py.typed").is_file()
    assert [(ROOT / name).is_file() for name in PROJECT["license-files"]] == [True]


def test_the_oldest_python_is_the_same_everywhere() -> None:
    named = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if re.search(r":: Python :: 3\.\d+$", c)]
    assert PROJECT["requires-python"] == f">={named[0]}"
    candidates = re.search(r"\$\{PYTHON:-(.*?)\}", (ROOT / ".ci/environment").read_text())
    assert candidates is not None
    assert re.findall(r"python(3\.\d+)", candidates[1]) == named


def test_the_change_log_begins_with_this_version() -> None:
    versions = re.findall(r"^## (\S+)", (ROOT / "docs/changelog.md").read_text(), re.MULTILINE)
    assert versions[0] == lightning_spmd.__version__
