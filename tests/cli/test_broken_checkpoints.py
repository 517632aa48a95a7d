"""``--ckpt_path`` with a file that is no checkpoint: LightningCLI opens it before the strategy does."""

from __future__ import annotations

import errno
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.cli import LightningCLI

from lightning_spmd import SPMDStrategy
from lightning_spmd.cli.first_steps import refused_with
from lightning_spmd.errors import ConfigurationError
from tests.cli.conftest import Run
from tests.cli.recipe import tiny


def _truncated(path: Path) -> None:
    torch.save({"state_dict": {"weight": torch.zeros(4000)}}, path)
    path.write_bytes(path.read_bytes()[:5000])


def _text(path: Path) -> None:
    path.write_text("seed_everything: 1\ntrainer:\n  strategy: spmd\n")


def _objects(path: Path) -> None:
    torch.save({"state_dict": {}, "folder": Path("x")}, path)


NOT_CHECKPOINTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (_truncated, "it ends too early (it has 5,000 bytes)"),
    "empty": (Path.touch, "it is no file of torch.save (0 bytes)"),
    "text": (_text, "it is no file of torch.save (4"),
}
MORE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a list": (lambda path: torch.save([1], path), "is no checkpoint of Lightning's, which is a dictionary"),
    "objects": (_objects, "holds objects that torch.load(weights_only=True) does not read"),
}


@pytest.mark.parametrize(("make", "words"), [*NOT_CHECKPOINTS.values(), *MORE.values()])
def test_the_command_names_the_file_and_what_it_is(tmp_path: Path, make: Callable[[Path], Any], words: str) -> None:
    path = tmp_path / "the.ckpt"
    make(path)
    cli: Any = SimpleNamespace(config=_Config(path))
    with pytest.raises((OSError, EOFError, LookupError, AttributeError, ValueError, pickle.UnpicklingError)) as raised:
        LightningCLI._parse_ckpt_path(cli)
    said = refused_with(raised.value) or ""
    assert said.startswith("ckpt_path: ")
    assert all(word in said for word in (str(path), words)), said


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize(("make", "words"), NOT_CHECKPOINTS.values())
def test_the_strategy_names_the_file_and_what_it_is(
    tmp_path: Path, make: Callable[[Path], Any], words: str, weights_only: bool
) -> None:
    path = tmp_path / "the.ckpt"
    make(path)
    with pytest.raises(ConfigurationError) as raised:
        SPMDStrategy().load_checkpoint(path, weights_only=weights_only)
    assert all(word in str(raised.value) for word in (str(path), words))


def test_a_disk_that_cannot_be_read_is_no_broken_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "the.ckpt"
    torch.save({"state_dict": {}}, path)

    def fails(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr(torch, "load", fails)
    with pytest.raises(OSError, match="Input/output error"):
        SPMDStrategy().load_checkpoint(path)


def test_a_full_disk_in_the_middle_of_training_is_one_line(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be " * 40)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    status, _, error = run("fit", *tiny(text, tmp_path / "results"))
    assert status == 1
    assert "Traceback" not in error, error
    (line,) = [line for line in error.splitlines() if "error: " in line]
    assert all(word in line for word in ("could not be written: No space left on device", ".ckpt", "MiB are free"))


class _Config(dict[str, Any]):
    """As much of LightningCLI's as is read before the file is opened."""

    def __init__(self, path: Path) -> None:
        super().__init__(subcommand="fit", fit={"ckpt_path": str(path)})
        self.subcommand = "fit"
