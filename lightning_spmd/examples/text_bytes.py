"""Text files as one row of bytes, cut into windows: a LightningDataModule."""

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

SKIPPED_STDLIB_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})
"""Inside the standard library: what was installed beside it, and its tests, whose tables of data are not prose."""


class ByteWindows(Dataset[dict[str, Tensor]]):
    """Windows that tile a row of bytes (or tokens), each with its bytes and the same bytes one position later.

    Args:
        data: uint8 ``[bytes]``, or integers of any kind.
        sequence_length: Bytes of a window's ``"inputs"``. Windows start ``sequence_length`` apart, so that every byte
            but the first is a target once; an incomplete last window is left out.
    """

    def __init__(self, data: Tensor, sequence_length: int) -> None:
        self.data = data
        self.sequence_length = sequence_length

    def __len__(self) -> int:
        return (len(self.data) - 1) // self.sequence_length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start = index * self.sequence_length
        window = self.data[start : start + self.sequence_length + 1].long()
        return {"inputs": window[:-1], "targets": window[1:]}


class TextBytes(LightningDataModule):
    """Every text file of a folder, in one fixed order, as training and validation windows of bytes.

    Batches are dicts ``{"inputs", "targets"}`` of int64 ``[batch_size, sequence_length]``, the targets one byte ahead.
    The last ``validation_fraction`` of the bytes is for validation (and test and predict), the rest for training.

    Args:
        path: A folder, searched with its subfolders (hidden files and folders are skipped, and files that contain a
            zero byte, which text does not), or one file. By default the ``*.py`` files of Python's own standard
            library.
        sequence_length: Bytes in a window.
        batch_size: Windows per batch and *per device*: ``N`` devices train on ``N * batch_size`` windows a step.
        num_workers: Processes that load batches; 0 loads in the training process.
        validation_fraction: Share of the bytes kept for validation, between 0 and 1.

    Raises:
        ValueError: If an argument is out of range; at ``setup``, if there is too little text for one window.
        FileNotFoundError: At ``setup``, if ``path`` does not exist.
    """

    unit = "bytes of text"
    """What a window consists of, for messages."""

    def __init__(
        self,
        path: str | None = None,
        sequence_length: int = 128,
        batch_size: int = 16,
        num_workers: int = 0,
        validation_fraction: float = 0.05,
    ) -> None:
        super().__init__()
        if sequence_length < 1 or batch_size < 1:
            raise ValueError(
                f"{type(self).__name__}(sequence_length={sequence_length}, batch_size={batch_size}): both must be at "
                "least 1."
            )
        if not 0 < validation_fraction < 1:
            raise ValueError(
                f"{type(self).__name__}(validation_fraction={validation_fraction}): must lie between 0 and 1."
            )
        self.path = path
        self.sequence_length = sequence_length
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.validation_fraction = validation_fraction
        self._train: ByteWindows | None = None
        self._validation: ByteWindows | None = None

    @override
    def setup(self, stage: str) -> None:
        """Read the files, once per process."""
        if self._train is not None:
            return
        data = self.read()
        split = len(data) - int(len(data) * self.validation_fraction)
        train = ByteWindows(data[:split], self.sequence_length)
        validation = ByteWindows(data[split:], self.sequence_length)
        for name, windows in (("training", train), ("validation", validation)):
            if len(windows) < 1:
                raise ValueError(
                    f"--data.path={self.path!r} leaves {len(windows.data)} {self.unit} for {name}; one window needs "
                    f"{self.sequence_length + 1}. Give more text, or lower --data.sequence_length."
                )
        self._train, self._validation = train, validation

    def read(self) -> Tensor:
        """All text in one row, of which windows are cut."""
        return read_text(self.path)

    @override
    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Training windows, shuffled; an incomplete last batch is left out."""
        return self._loader(self._train, shuffle=True, drop_last=True)

    @override
    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Validation windows in the order of the text."""
        return self._loader(self._validation, shuffle=False, drop_last=False)

    @override
    def test_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """The validation windows."""
        return self.val_dataloader()

    @override
    def predict_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """The validation windows."""
        return self.val_dataloader()

    def _loader(self, windows: ByteWindows | None, *, shuffle: bool, drop_last: bool) -> DataLoader[dict[str, Tensor]]:
        if windows is None:
            raise RuntimeError("TextBytes has not read its files yet: call setup('fit') before asking for a loader.")
        # Never so strict that a small folder of text gives no batch at all.
        drop_last = drop_last and len(windows) >= self.batch_size
        return DataLoader(
            windows,
            batch_size=self.batch_size,
            shuffle=shuffle,
            drop_last=drop_last,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
        )


def read_text(path: str | None) -> Tensor:
    """Concatenate text files into one uint8 ``[bytes]``, a newline between two files.

    Args:
        path: See :class:`TextBytes`.

    Raises:
        FileNotFoundError: If ``path`` does not exist.
        ValueError: If there is no text in it.
    """
    # A bytearray, because torch warns about sharing memory with immutable bytes.
    return torch.frombuffer(bytearray(b"\n".join(read_files(path))), dtype=torch.uint8)


def read_files(path: str | None) -> list[bytes]:
    """The contents of text files, of each by itself.

    Args:
        path: See :class:`TextBytes`.

    Raises:
        FileNotFoundError: If ``path`` does not exist.
        ValueError: If there is no text in it.
    """
    contents = [content for content in map(Path.read_bytes, _files(path)) if content and b"\0" not in content]
    if not contents:
        raise ValueError(
            f"--data.path={path!r} holds no text file (hidden files, empty files and files with zero bytes do not "
            "count). Give a folder of text, or leave --data.path out to read Python's standard library."
        )
    return contents


def _files(path: str | None) -> Iterator[Path]:
    if path is None:
        stdlib = Path(sysconfig.get_paths()["stdlib"])
        yield from (file for file in _walk(stdlib, SKIPPED_STDLIB_FOLDERS) if file.suffix == ".py")
    elif (root := Path(path).expanduser()).is_file():
        yield root
    elif root.is_dir():
        yield from _walk(root, frozenset())
    else:
        raise FileNotFoundError(
            f"--data.path={path!r} does not exist (seen from {os.getcwd()}). Give a folder of text files or one file, "
            "or leave --data.path out to read Python's standard library."
        )


def _walk(root: Path, skipped_folders: frozenset[str]) -> Iterator[Path]:
    """Files below ``root`` in an order that no file system decides."""
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(n for n in subfolders if n not in skipped_folders and not n.startswith("."))
        files = (Path(folder, name) for name in sorted(names) if not name.startswith("."))
        # A named pipe would block its reader, and a broken link has nothing to read.
        yield from (file for file in files if file.is_file())
