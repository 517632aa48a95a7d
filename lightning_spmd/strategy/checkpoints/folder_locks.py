"""Folder locks: only one run at a time writes checkpoints into a folder, and a second one notices before it trains.

Lightning numbers the folders of runs by what is there already, so two that begin at once get the same, and each
replaces or deletes the other's files. The mark is a lock of the system's, which ends with its process.
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
from lightning_spmd.stages.runtime.control import ControlPlane, Place

MARK = ".lightning_spmd.lock"
_PATIENCE = 5.0
"""Seconds for a process that is just ending."""


class Claims:
    """The folders into which this process's run writes."""

    def __init__(self) -> None:
        self._held: dict[Path, tuple[int, bool]] = {}

    def begin(self, trainer: Any, control: ControlPlane | None) -> None:
        """Claim the folders of a fit's checkpoint callbacks; rank 0 does, for all.

        Raises:
            ConfigurationError: on every rank; another run that is alive writes into one.
        """
        self.end()
        if trainer.state.fn != TrainerFn.FITTING or trainer.fast_dev_run:
            return
        found = self._claim_all(trainer) if trainer.is_global_zero else None
        if control is not None:
            found = control.gather(found, Place("the folders of checkpoints"))[0]
        if found is not None:
            raise ConfigurationError(found)

    def end(self) -> None:
        """Leave the folders to others, as they were."""
        while self._held:
            folder, (handle, made) = self._held.popitem()
            with contextlib.suppress(OSError):
                (folder / MARK).unlink()
            os.close(handle)
            if made:
                with contextlib.suppress(OSError):  # something was written
                    folder.rmdir()

    def _claim_all(self, trainer: Any) -> str | None:
        for callback in trainer.checkpoint_callbacks:
            given = getattr(callback, "dirpath", None)
            if given is None or "://" in str(given):
                continue
            folder = Path(given).absolute()
            who = self._claim(folder)
            if who is not None:
                return (
                    f"another run ({who}) is writing checkpoints into {folder}: each would replace or delete the "
                    "other's. Give each run a folder of its own (ModelCheckpoint(dirpath=...), "
                    "Trainer(default_root_dir=...), a logger's version), or end that one first"
                )
        return None

    def _claim(self, folder: Path) -> str | None:
        """Who else has a folder; None: it is ours now, or cannot be marked, of which saving will say more."""
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
