"""Checkpoints are written under another name and put into place in one step.

Lightning writes a file into the folder for temporary files and moves it: on another file system that is a copy, and a
process that dies in the middle of it, or a disk that is full, leaves half a file in the place of a good one.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from typing_extensions import override

from lightning_spmd.errors import SPMDError
from lightning_spmd.ir.stable_hash import stable_hash
from lightning_spmd.stages.runtime.agreement.lost_ranks import Process

_UNFINISHED = re.compile(r"\..+\.(?P<machine>[0-9a-f]+)-(?P<pid>\d+)\.unfinished")
_AT_FDCWD, _EXCHANGE = -100, 2


class WholeFiles(TorchCheckpointIO):
    """Lightning's own files, written beside their place and put there when they are complete and on the disk.

    What fails leaves nothing behind.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        is_device = Path(path).exists() and not (Path(path).is_file() or Path(path).is_dir())  # nothing to replace
        if storage_options is not None or "://" in str(path) or is_device:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        new = name_beside(path)
        remove_unfinished(path.parent)
        try:
            with new.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            put(new, path)
        except (OSError, RuntimeError) as error:
            if isinstance(error, OSError) or isinstance(error.__context__, OSError):
                raise not_written(path, reason(error)) from error
            raise
        finally:
            remove(new)


def name_beside(path: Path) -> Path:
    """The name of a file or folder until it is complete; another one for each process that writes there."""
    return path.with_name(f".{path.name}.{_this_machine()}-{os.getpid()}.unfinished")


def _this_machine() -> str:
    """Where numbers of processes mean the same."""
    return f"{stable_hash(Process.this().machine):x}"


def reason(error: BaseException) -> str:
    """Why something could not be written, in a few words; torch's streams wrap what the system says."""
    inner = error if isinstance(error, OSError) else error.__context__
    if isinstance(inner, OSError):
        return inner.strerror or str(inner)
    text = (str(error) or type(error).__name__).splitlines()[0]
    broken_off = "unexpected pos" in text  # torch's stream, at its end, of a write that failed before
    return f"the writing broke off, as on a full disk ({text})" if broken_off else text


def not_written(path: Path, why: str) -> SPMDError:
    """The error of a checkpoint that could not be written."""
    with contextlib.suppress(OSError):
        why += f"; {shutil.disk_usage(path.parent).free / 2**20:,.0f} MiB are free there"
    return SPMDError(
        f"the checkpoint {path} could not be written: {why}. An earlier file of that name is unchanged. Make room, "
        "keep fewer checkpoints (ModelCheckpoint(save_top_k=...)), or write elsewhere (ModelCheckpoint(dirpath=...))"
    )


def put(new: Path, path: Path) -> None:
    """Give something complete its name; what was there is there until then, whatever happens."""
    if path.is_dir() or new.is_dir() and path.exists():
        if _exchange(new, path):
            remove(new)
        else:  # a file system that cannot: for a moment the old one is under another name
            old = path.with_name(f".{path.name}.old")
            remove(old)
            path.rename(old)
            new.rename(path)
            remove(old)
    else:
        new.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    except OSError:
        pass  # some network file systems have no such thing
    finally:
        os.close(folder)


def _exchange(one: Path, other: Path) -> bool:
    """Let two files or folders exchange their names, in one step; False where that cannot be done."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):  # not Linux, or an old C library
        return False
    return rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _EXCHANGE) == 0


def remove(path: Path) -> None:
    """Remove a file or folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def remove_unfinished(folder: Path) -> None:
    """Remove what processes of this machine left that died while they wrote."""
    for path in folder.glob(".*.unfinished"):
        found = _UNFINISHED.fullmatch(path.name)
        if found is None or found["machine"] != _this_machine():
            continue
        if Process(Process.this().machine, int(found["pid"])).ended() is not None:
            remove(path)
