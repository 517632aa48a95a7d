"""Checkpoints take their name in one step, and what is damaged is refused before anything is read."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch

from lightning_spmd import SPMDStrategy
from lightning_spmd.errors import ConfigurationError, SPMDError
from lightning_spmd.strategy.checkpoints import whole_files
from lightning_spmd.strategy.checkpoints.intact import damage_of_file, damage_of_folder, seals_of, write_seals
from lightning_spmd.strategy.checkpoints.whole_files import WholeFiles, name_beside, put
from tests.helpers.training import QUIET
from tests.reliability.loading import _cut, _flip
from tests.strategy.small import Quiet, loader_of, rows


def _write(path: Path, value: int) -> None:
    WholeFiles().save_checkpoint({"state_dict": {"w": torch.full((100,), value)}}, path)


def _value(path: Path) -> int:
    return int(torch.load(path)["state_dict"]["w"][0])


def test_what_is_being_written_lies_beside_its_place_and_not_on_another_file_system(tmp_path: Path) -> None:
    """Fsspec writes into the folder for temporary files and copies from there: half a copy took a good one's name."""
    path = tmp_path / "last.ckpt"
    _write(path, 1)
    with (
        mock.patch("shutil.move", side_effect=AssertionError("copied")),
        mock.patch.object(whole_files, "put") as placed,
    ):
        _write(path, 2)
    assert placed.call_args.args[0].parent == tmp_path
    assert _value(path) == 1  # until it is put there
    assert [p.name for p in tmp_path.iterdir()] == ["last.ckpt"]


def test_a_disk_that_is_full_leaves_what_was_there_and_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    _write(path, 1)
    full = OSError(28, "No space left on device")
    with (
        mock.patch("torch.save", side_effect=full),
        pytest.raises(SPMDError, match="could not be written: No space left"),
    ):
        _write(path, 2)
    assert _value(path) == 1
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("exchange", [True, False])
@pytest.mark.parametrize(("old", "new"), [("folder", "folder"), ("folder", "file"), ("file", "folder")])
def test_files_and_folders_take_each_others_place(old: str, new: str, exchange: bool, tmp_path: Path) -> None:
    path, beside = tmp_path / "last.ckpt", tmp_path / ".new"
    for kind, place in ((old, path), (new, beside)):
        if kind == "folder":
            place.mkdir()
        (place / "x" if kind == "folder" else place).write_text(str(place))
    with mock.patch.object(whole_files, "_exchange", whole_files._exchange if exchange else lambda *_: False):
        put(beside, path)
    assert (path / "x" if new == "folder" else path).read_text() == str(beside)
    assert [p.name for p in tmp_path.iterdir()] == ["last.ckpt"]


def test_what_a_killed_process_left_is_removed_and_what_another_writes_is_not(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    ended, parent = subprocess.Popen([sys.executable, "-S", "-c", ""]), os.getppid()
    ended.wait()
    with mock.patch("os.getpid", return_value=ended.pid):
        left = name_beside(path)
    with mock.patch("os.getpid", return_value=parent):
        busy = name_beside(path)
    left.touch()
    busy.touch()
    _write(path, 1)
    assert not left.exists()
    assert busy.exists()


@pytest.mark.parametrize("index", range(8))
def test_a_bit_that_changed_is_found_and_so_is_an_end_that_is_missing(index: int, tmp_path: Path) -> None:
    """``torch.load`` gives the tensor with the other bit, without a word."""
    path = tmp_path / "last.ckpt"
    _write(path, 1)
    assert damage_of_file(path) is None
    kept = path.read_bytes()
    _flip(path, index)
    assert _value(path) == 1 or index  # it loads
    assert "is not what was written" in str(damage_of_file(path))
    path.write_bytes(kept)
    _cut(path, index)
    with pytest.raises(ConfigurationError, match="cannot be read: .* Go on from another one"):
        _fit_from(path)


def _fit_from(path: Any) -> None:
    trainer = L.Trainer(strategy=SPMDStrategy(), devices=1, max_epochs=1, **QUIET)
    trainer.fit(Quiet(), loader_of(rows(16)), ckpt_path=path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"first.weight": torch.ones(2)}, "is no checkpoint of Lightning's: it has no 'state_dict' but first.weight"),
        ([1, 2], "it holds a list"),
    ],
)
def test_what_something_else_saved_is_no_checkpoint(content: Any, words: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "foreign.ckpt")
    with pytest.raises(ConfigurationError, match=words):
        _fit_from(tmp_path / "foreign.ckpt")


def test_a_folder_that_is_no_checkpoint_is_one_in_words(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="it is a folder without meta.pt"):
        _fit_from(tmp_path)


def test_a_folders_files_are_sealed(tmp_path: Path) -> None:
    for name in (".metadata", "meta.pt", "__0_0.distcp", "__1_0.distcp"):
        (tmp_path / name).write_bytes(name.encode() * 10)
    assert damage_of_folder(tmp_path, 0, 1) is None  # of an earlier version
    write_seals(tmp_path, [seals_of(tmp_path, 0), seals_of(tmp_path, 1)])
    assert damage_of_folder(tmp_path, 0, 1) is None
    for change, words in (
        (lambda p: p.write_bytes(p.read_bytes()[::-1]), "__1_0.distcp is not what was written"),
        (lambda p: p.write_bytes(b"x"), "__1_0.distcp has 1 bytes where 120 were written"),
        (lambda p: p.unlink(), "__1_0.distcp is missing"),
    ):
        spoilt = Path(shutil.copytree(tmp_path, tmp_path.with_name("spoilt"), dirs_exist_ok=True))
        change(spoilt / "__1_0.distcp")
        found = [damage_of_folder(spoilt, rank, 2) for rank in (0, 1)]
        assert words in found


@pytest.mark.parametrize("index", range(8))
def test_a_file_that_ends_too_early_is_named(index: int, tmp_path: Path) -> None:
    """Some ends make the archive's reader look before the file's beginning: "Invalid argument", without a name."""
    path = tmp_path / "last.ckpt"
    _write(path, 1)
    _cut(path, index)
    with pytest.raises(ConfigurationError, match="last.ckpt cannot be read: "):
        SPMDStrategy().load_checkpoint(path, weights_only=False)


def test_a_part_that_could_not_be_written_says_what_the_system_said(tmp_path: Path) -> None:
    """The other ranks get the error without its context: torch's stream says "unexpected pos" around it."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    from lightning_spmd.strategy.checkpoints.distributed import _Writer

    def write(*_: Any) -> Any:
        try:
            raise OSError(27, "File too large")
        finally:
            raise RuntimeError("unexpected pos 704 vs 598")

    with (
        mock.patch.object(FileSystemWriter, "write_data", side_effect=write),
        pytest.raises(OSError, match="File too large"),
    ):
        _Writer(tmp_path).write_data(mock.Mock(), mock.Mock())
