"""TextBytes: which files, which windows, which mistakes."""

from pathlib import Path

import pytest
import torch

from lightning_spmd.examples import TextBytes
from lightning_spmd.examples.text_bytes import ByteWindows, read_text


def test_windows_tile_the_text_and_targets_are_one_byte_ahead() -> None:
    windows = ByteWindows(torch.arange(10, dtype=torch.uint8), sequence_length=4)
    assert [(w["inputs"].tolist(), w["targets"].tolist()) for w in (windows[i] for i in range(len(windows)))] == [
        ([0, 1, 2, 3], [1, 2, 3, 4]),
        ([4, 5, 6, 7], [5, 6, 7, 8]),
    ]
    assert windows[0]["inputs"].dtype == torch.int64


def test_files_are_read_in_a_fixed_order_without_hidden_and_binary_ones(tmp_path: Path) -> None:
    for name, content in {"b.txt": b"B", "a.md": b"A", "z/c": b"C", ".git/d": b"D", ".e": b"E", "f.bin": b"\0"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert bytes(read_text(str(tmp_path)).tolist()) == b"A\nB\nC"
    assert bytes(read_text(str(tmp_path / "b.txt")).tolist()) == b"B"


def test_the_default_is_the_standard_library_without_what_was_installed_beside_it() -> None:
    data = read_text(None)
    text = bytes(data.tolist()).decode(errors="replace")
    assert len(data) > 1_000_000
    assert "class NamedTemporaryFile" in text or "def NamedTemporaryFile" in text
    assert "class LightningModule" not in text


def test_training_and_validation_are_the_head_and_the_tail(text: Path) -> None:
    data = TextBytes(str(text), sequence_length=16, batch_size=4, validation_fraction=0.25)
    data.setup("fit")
    (batch, *_) = data.train_dataloader()
    assert batch["inputs"].shape == batch["targets"].shape == (4, 16)
    whole = read_text(str(text))
    split = len(whole) * 3 // 4
    validation = next(iter(data.val_dataloader()))
    assert validation["inputs"][0].tolist() == whole[split : split + 16].tolist()
    assert all(b["inputs"].shape[0] == 4 for b in data.train_dataloader())


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"--data\.path='.*nowhere' does not exist"):
        TextBytes(str(tmp_path / "nowhere")).setup("fit")


def test_a_folder_without_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--data\.path='.*' holds no text file"):
        TextBytes(str(tmp_path)).setup("fit")


def test_too_little_text_says_how_much_is_needed(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("short")
    with pytest.raises(ValueError, match=r"for training; one window needs 129.*--data\.sequence_length"):
        TextBytes(str(tmp_path)).setup("fit")


@pytest.mark.parametrize(
    "argument", [{"validation_fraction": 1.0}, {"batch_size": 0}, {"sequence_length": 0}], ids=lambda a: next(iter(a))
)
def test_an_argument_out_of_range_is_named(argument: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(argument))):
        TextBytes(**argument)
