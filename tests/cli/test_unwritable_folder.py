"""Results go nowhere: one line that says which folder, and how to choose another."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from lightning.pytorch import Callback

from lightning_spmd.cli import first_steps
from lightning_spmd.cli.first_steps import refused_with

pytest.importorskip("jsonargparse")
FIX = ". Give results a folder that can be written: --trainer.default_root_dir FOLDER, or that of the logger"


@pytest.fixture(autouse=True)
def not_the_users_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_steps, "own_line", lambda _: None)


def _raised(error: Exception, callback: object = None) -> Exception:
    class SaveConfigCallback(Callback):
        def setup(self, *_: object, **__: object) -> None:
            raise error

    try:
        SaveConfigCallback().setup() if callback else _raise(error)
    except Exception as caught:
        return caught
    raise AssertionError


def _raise(error: Exception) -> None:
    raise error


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_of_the_logs(number: int) -> None:
    error = _raised(OSError(number, "no", "/read/only/lightning_logs"))
    assert refused_with(error) == f"[Errno {number}] no: '/read/only/lightning_logs'{FIX}"


def test_what_another_folder_would_not_help() -> None:
    error = _raised(OSError(errno.ENOENT, "no", "/gone"))
    assert refused_with(error) == f"[Errno {errno.ENOENT}] no: '/gone'"


def test_what_is_there_and_cannot_be_read(tmp_path: Path) -> None:
    error = _raised(OSError(errno.EACCES, "no", str(tmp_path)))
    assert FIX not in (refused_with(error) or "")


def test_of_the_recipe_as_it_was_run(tmp_path: Path) -> None:
    error = _raised(TypeError("File is not creatable: 'config.yaml'"), "SaveConfigCallback")
    assert refused_with(error) == f"File is not creatable: 'config.yaml'{FIX}"
