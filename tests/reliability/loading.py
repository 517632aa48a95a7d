"""A run is to go on from a checkpoint that is cut off, changed, another model's, another framework's, or incomplete."""

from __future__ import annotations

import json
import pickle
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from tests.reliability.fault import Account, Case, Fault, ended, nothing_lost, says, start, undisturbed
from tests.reliability.job import Net, note_the_fault, train

Spoil = Callable[[Path, int], None]
"""Changes a checkpoint; the number is the run's."""


def _cut(path: Path, index: int) -> None:
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate([0, 1, size // 4, size // 2, size - 1000, size - 100, size - 22, size - 1][index % 8])


def _flip(path: Path, index: int) -> None:
    """One bit of a tensor."""
    with zipfile.ZipFile(path) as archive:
        parts = [i for i in archive.infolist() if "/data/" in i.filename and i.file_size > 4]
    part = parts[index % len(parts)]
    with path.open("rb") as file:  # the part's own header says how long its name and torch's padding are
        file.seek(part.header_offset + 26)
        name, padding = struct.unpack("<HH", file.read(4))
    _flip_at(path, part.header_offset + 30 + name + padding + part.file_size // 2)


def _flip_at(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << at % 8]))


def _plain_weights(path: Path, index: int) -> None:
    torch.save(Net().state_dict() if index % 2 else {"epoch": 3, "model": Net().state_dict()}, path)


def _no_checkpoint(path: Path, index: int) -> None:
    contents = [
        b"",
        b"\x89HDF\r\n\x1a\n" + bytes(100),
        pickle.dumps([1, 2]),
        b"trainer:\n  max_epochs: 1\n",
        bytes(5000),
    ]
    path.write_bytes(contents[index % len(contents)])
    if index % 6 == 5:  # the files of a safetensors checkpoint, and of numpy
        path.write_bytes((40).to_bytes(8, "little") + json.dumps({"w": {"dtype": "F32"}}).encode().ljust(40))


class Other(Net):
    """Another model: a layer of another width and a layer more."""

    def __init__(self, width: int = 10) -> None:
        super().__init__(width + 2)
        self.more = nn.Linear(3, 3)


def _missing_shard(path: Path, index: int) -> None:
    sorted(p for p in path.iterdir() if p.suffix == ".distcp")[index % 2].unlink()


def _damaged_shard(path: Path, index: int) -> None:
    shard = sorted(p for p in path.iterdir() if p.suffix == ".distcp")[index % 2]
    if index % 4 < 2:
        _flip_at(shard, shard.stat().st_size // 3)
    else:
        with shard.open("r+b") as file:
            file.truncate(shard.stat().st_size // 2)


def _missing_head(path: Path, index: int) -> None:
    (path / ("meta.pt" if index % 2 else ".metadata")).unlink()


def _loads(
    case: Case, spoil: Spoil, words: tuple[str, ...], *, distributed: bool = False, other: bool = False
) -> Account:
    """A run is to go on from a checkpoint of an earlier one, which is spoilt."""
    account, job = Account(), case.job(distributed=distributed)
    before = undisturbed(job.plan, job.devices, job.precision, job.width, distributed)
    shutil.copytree(before.checkpoints, job.checkpoints)
    path = job.checkpoints / "step=6.ckpt"
    spoil(path, case.index)
    note_the_fault(job)
    again = job.going_on(str(path))
    found = ended(account, start(again, lambda j, _r: train(j, make=Other if other else Net)), job, {0: (1,), 1: (1,)})
    for one in found:
        says(account, one, *words)
        account.demand(not job.end(one.rank).exists(), "training went on")
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    (job.folder / "fault.json").unlink()
    nothing_lost(account, job)
    return account


_NAMED = "all ranks end with an error that names the checkpoint and what is wrong with it; nothing is trained"
READ = r"the checkpoint \S*step=6.ckpt cannot be read: "
ANOTHER = "Go on from another one"
CHANGED = (READ, "is not what was written", ANOTHER)
FOREIGN = (r"step=6.ckpt is no checkpoint of Lightning's", "load_state_dict")


def _nothing(path: Path, index: int) -> None:
    """The checkpoint is good."""


def _file(spoil: Spoil, *words: str, other: bool = False) -> Callable[[Case], Account]:
    return lambda case: _loads(case, spoil, words, other=other)


def _folder(spoil: Spoil, *words: str, other: bool = False) -> Callable[[Case], Account]:
    return lambda case: _loads(case, spoil, words, other=other, distributed=True)


_ROWS = (
    ("truncated checkpoint", "a checkpoint file ends too early", _file(_cut, READ, ANOTHER)),
    ("corrupt checkpoint", "one bit of a checkpoint file's tensors is another", _file(_flip, *CHANGED)),
    ("foreign checkpoint", "weights that something else saved", _file(_plain_weights, *FOREIGN)),
    (
        "no checkpoint",
        "a file of another kind, or an empty one",
        _file(_no_checkpoint, r"step=6.ckpt (cannot be read|is no checkpoint)"),
    ),
    (
        "another model, file",
        "a checkpoint file of another model",
        _file(_nothing, r"first.weight|more\.", "of another model", "step=6.ckpt", other=True),
    ),
    (
        "another model, folder",
        "a checkpoint folder of another model",
        _folder(_nothing, "is one of another model", "more.weight", other=True),
    ),
    (
        "missing shard",
        "a shard of a checkpoint folder is missing",
        _folder(_missing_shard, READ, r"__\d_0.distcp is missing"),
    ),
    (
        "damaged shard",
        "a shard is cut off, or one bit of it is another",
        _folder(_damaged_shard, READ, r"__\d_0.distcp (has|is not)"),
    ),
    (
        "missing head",
        "`meta.pt` or `.metadata` of a checkpoint folder is missing",
        _folder(_missing_head, READ, "meta"),
    ),
)
FAULTS = tuple(Fault(name, what, _NAMED, play) for name, what, play in _ROWS)
