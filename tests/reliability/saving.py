"""The disk is full while a checkpoint is written."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import lightning as L

from tests.reliability.fault import Account, Case, Fault, ended, goes_on, nothing_lost, says, start
from tests.reliability.job import EVERY, Job, note_the_fault, train

WIDTH, ROOM = 3000, 2**16
"""A checkpoint is larger than the room; what ranks print, which a limit holds for too, is less."""


class FillsTheDisk(L.Callback):
    """Before the third checkpoint files cannot grow any more: the file system is full, or a limit holds.

    Args:
        job: for the note.
        mounted: the small file system of the checkpoints; None: this process gets a limit on the size of files, which
            needs no rights.
        room: bytes that are left.
    """

    def __init__(self, job: Job, mounted: Path | None, room: int) -> None:
        self.job, self.mounted, self.room = job, mounted, room

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step != 3 * EVERY - 1:
            return
        note_the_fault(self.job)
        if self.mounted is None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.room, resource.RLIM_INFINITY))
            return
        free = shutil.disk_usage(self.mounted).free
        with (self.mounted / "filler").open("wb") as file:
            file.write(bytes(max(free - self.room, 0)))


def mount_small(folder: Path) -> bool:
    """Mount a file system of 4 MiB; only root may."""
    folder.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(folder)]
    return os.geteuid() == 0 and subprocess.run(command, check=False, capture_output=True).returncode == 0


def _full(case: Case, *, distributed: bool, really: bool) -> Account:
    job = case.job(distributed=distributed, width=WIDTH)
    mounted = job.checkpoints if really and mount_small(job.checkpoints) else None
    victim = case.victim if distributed and not really else 0

    def training(job: Job, rank: int) -> None:
        train(
            job,
            [FillsTheDisk(job, mounted, ROOM * (case.index % 3) // 2 if mounted else ROOM)] if rank == victim else [],
        )

    account = Account()
    found = ended(account, start(job, training), job, {0: (1,), 1: (1,)})
    words = "No space left on device" if mounted else "File too large"
    says(account, found[0], rf"the checkpoint \S+ could not be written: .*{words}", "save_top_k")
    says(account, found[1], words)
    if distributed:
        says(account, found[1], rf"rank {victim}: {words}")
    else:
        says(account, found[1], "rank 0 failed with SPMDError: the checkpoint")
    account.demand(not list(job.checkpoints.glob(".*")), "an unfinished file was left")
    (job.checkpoints / "filler").unlink(missing_ok=True)
    nothing_lost(account, job)
    goes_on(account, job)
    if mounted is not None:
        subprocess.run(["umount", str(mounted)], check=False)
    return account


_SAYS = "all ranks end with an error that names checkpoint, rank, reason and what to do; nothing unfinished stays"


def faults() -> tuple[Fault, ...]:
    """With a small file system mounted where this process may, and with a limit on the size of files."""
    found: list[Fault] = []
    for kind, distributed in (("file", False), ("folder", True)):
        for how, really in (
            ("a file system of 4 MiB is full (mounted, needs root)", True),
            ("a limit on the size of files", False),
        ):
            if really and os.geteuid() != 0:
                continue
            name = f"full disk, {kind}, {'mounted' if really else 'limit'}"

            def play(case: Case, distributed: bool = distributed, really: bool = really) -> Account:
                return _full(case, distributed=distributed, really=really)

            found.append(Fault(name, f"full disk while a checkpoint {kind} is written: {how}", _SAYS, play))
    return tuple(found)


FAULTS = faults()
