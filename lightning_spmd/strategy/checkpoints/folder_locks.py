"""Folder locks: one run at a time writes checkpoints into a folder. A second run ends before it trains.

Lightning chooses the next free version number for a run's folder. Two runs that begin at once get the same number and
would overwrite each other's files. The lock is the operating system's (``lockf``) and ends with its process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from pathlib import Path
from typing import Any

from lightning.pytorch.trainer.states import TrainerFn

from lightning_spmd.errors import ConfigurationError
from lightning_spmd.stages.runtime.agreement.control import ControlPlane, Place

MARK = ".lightning_spmd.lock"
_PATIENCE = 5.0
"""Seconds for a process that is just ending."""


class FolderLocks:
    """The folders that the run of this process has locked."""

    def __init__(self) -> None:
        self._held: dict[Path, tuple[int, bool]] = {}

    def begin(self, trainer: Any, control: ControlPlane | None) -> None:
        """Lock the folders of a fit's checkpoint callbacks. Rank 0 locks them for all ranks.

        Raises:
            ConfigurationError: on every rank, if another live run writes into one of them.
        """
        self.end()
        if trainer.state.fn != TrainerFn.FITTING or trainer.fast_dev_run:
            return
        found = self._lock_all(trainer) if trainer.is_global_zero else None
        if control is not None:
            found = control.gather(found, Place("the folders of checkpoints"))[0]
        if found is not None:
            raise ConfigurationError(found)

    def end(self) -> None:
        """Release the folders, and remove those that were created for the lock and are still empty."""
        while self._held:
            folder, (handle, made) = self._held.popitem()
            with contextlib.suppress(OSError):
                (folder / MARK).unlink()
            os.close(handle)
            if made:
                with contextlib.suppress(OSError):  # something was written
                    folder.rmdir()

    def _lock_all(self, trainer: Any) -> str | None:
        for callback in trainer.checkpoint_callbacks:
            given = getattr(callback, "dirpath", None)
            if given is None or "://" in str(given):
                continue
            folder = Path(given).absolute()
            who = self._lock(folder)
            if who is not None:
                return (
                    f"another run ({who}) is writing checkpoints into {folder}: each would replace or delete the "
                    "other's. Give each run a folder of its own (ModelCheckpoint(dirpath=...), "
                    "Trainer(default_root_dir=...), a logger's version), or end that one first"
                )
        return None

    def _lock(self, folder: Path) -> str | None:
        """Lock a folder and return None, or return who holds it. A folder that cannot be written is left to saving."""
        if folder in self._held:
            return None
        made, until = not folder.exists(), time.monotonic() + _PATIENCE
        mark = folder / MARK
        try:
            folder.mkdir(parents=True, exist_ok=True)
            while True:
                handle = os.open(mark, os.O_RDWR | os.O_CREAT, 0o666)
                try:
                    fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except (BlockingIOError, PermissionError):
                    who = os.read(handle, 200).decode(errors="replace")
                    os.close(handle)
                    if time.monotonic() >= until:
                        return who or "of another process"
                    time.sleep(0.2)
                    continue
                except OSError:  # a file system without locks
                    os.close(handle)
                    return None
                if mark.exists() and os.path.samestat(os.fstat(handle), mark.stat()):
                    break
                os.close(handle)  # its owner has just removed it
            os.ftruncate(handle, 0)
            os.write(handle, f"process {os.getpid()} on {socket.gethostname()}".encode())
        except OSError:
            return None
        self._held[folder] = (handle, made)
        return None
