"""Two runs want the same: a port, a folder."""

from __future__ import annotations

import dataclasses
import socket
import time
from pathlib import Path
from typing import Any

import lightning as L

from tests.reliability.fault import (
    LIMIT,
    Account,
    Case,
    Fault,
    ended,
    nothing_lost,
    same_end,
    says,
    start,
    undisturbed,
)
from tests.reliability.job import EVERY, Job, note_the_fault, train


def _port_taken(case: Case) -> Account:
    """Somebody else listens on the port where the ranks are to meet."""
    account, job = Account(), case.job(timeout=10.0)
    job.folder.mkdir(exist_ok=True)
    taken = socket.socket()
    taken.bind(("0.0.0.0", 0))
    taken.listen()
    note_the_fault(job)
    port = taken.getsockname()[1]
    run = start(job, lambda j, _rank: train(j), port=port)
    found = run.wait(LIMIT)
    taken.close()
    account.outputs, account.codes = [e.output for e in found], tuple(e.code for e in found)
    account.seconds = max(e.at for e in found) - run.begun
    account.demand(all(e.code == 1 for e in found), f"ended with {account.codes}")
    for one in found:
        says(account, one, rf"rank {one.rank} cannot meet the others at \S+, port {port}", "in use", "MASTER_PORT=")
    return account


def _one_folder(case: Case) -> Account:
    """A second run begins in the folder of one that trains."""
    account, job = Account(), case.job()
    other = dataclasses.replace(job, folder=case.folder / "other")
    other.folder.mkdir(parents=True)
    other.checkpoints.symlink_to(job.checkpoints, target_is_directory=True)
    first = start(job, lambda j, _rank: train(j, [Waits(j, other.folder / "ended")]))
    until = time.time() + LIMIT
    while not (job.folder / "fault.json").exists() and time.time() < until:
        time.sleep(0.02)
    found = ended(account, start(other, lambda j, _rank: train(j)), job, {0: (1,), 1: (1,)})
    for one in found:
        says(account, one, r"another run \(process \d+ on \S+\) is writing checkpoints into", "default_root_dir")
    (other.folder / "ended").touch()
    codes = [e.code for e in first.wait(LIMIT)]
    if account.demand(codes == [0, 0], f"the first run ended with another code: {codes}"):
        nothing_lost(account, job)
        same_end(account, job, undisturbed(job.plan, 2, job.precision, job.width))
    return account


class Waits(L.Callback):
    """In the middle of training, until another run has ended."""

    def __init__(self, job: Job, ended: Path) -> None:
        self.job, self.ended = job, ended

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == EVERY + 1:
            if trainer.is_global_zero:
                note_the_fault(self.job)
            while not self.ended.exists():
                time.sleep(0.05)


FAULTS = (
    Fault(
        "one folder",
        "a second run begins in the checkpoint folder of one that trains",
        "the second run's ranks end with an error that names the folder and the first run, which ends as ever",
        _one_folder,
    ),
    Fault(
        "port taken",
        "somebody else listens on `MASTER_PORT`",
        "all ranks end; the message names the port and how to choose another",
        _port_taken,
    ),
)
