"""A run is told to stop: SIGTERM to one rank or to all, Ctrl-C."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import lightning as L

from tests.reliability.fault import LIMIT, Account, Case, Fault, ended, goes_on, nothing_lost, says, start
from tests.reliability.job import BATCHES, Job, Rows, note_the_fault, train
from tests.reliability.ranks import Run

SLOWLY = 0.03
"""Seconds between batches, so that a signal comes in the middle of training."""


class SlowRows(Rows):
    """Batches that take a while, as loading does."""

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            time.sleep(SLOWLY)
            yield batch


def _slowly(job: Job, callbacks: list[L.Callback]) -> None:
    train(job, [NotesTheEnd(job), *callbacks], data=lambda: (SlowRows(BATCHES, job.devices), SlowRows(2, job.devices)))


class ReadyAt(L.Callback):
    """Says that training has come to a step; then signals may come, at any moment."""

    def __init__(self, job: Job, step: int) -> None:
        self.job, self.step = job, step

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            note_the_fault(self.job)


class KilledByItself(L.Callback):
    """A signal comes to this process a random while after a step."""

    def __init__(self, job: Job, step: int, number: signal.Signals, delay: float) -> None:
        self.job, self.step, self.number, self.delay = job, step, number, delay

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            note_the_fault(self.job)
            threading.Timer(self.delay, os.kill, (os.getpid(), self.number)).start()


def _wait_for(file: Path, seconds: float) -> bool:
    deadline = time.time() + seconds
    while not file.exists() and time.time() < deadline:
        time.sleep(0.01)
    return file.exists()


def _job(case: Case) -> Job:
    return case.job(on_exception=case.index % 2 == 0, overlap=case.index % 3 == 1, distributed=case.index % 5 == 4)


class NotesTheEnd(L.Callback):
    """Writes down with which step training ended."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def on_exception(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.is_global_zero:
            (self.job.folder / "ended").write_text(str(trainer.global_step))


def _saved_at_the_end(account: Account, job: Job) -> None:
    """Where a checkpoint is to be written at an exception it is there."""
    if job.on_exception and account.demand((job.folder / "ended").exists(), "training was not ended"):
        name = f"step={(job.folder / 'ended').read_text()}.ckpt"
        account.demand((job.checkpoints / name).exists(), f"{name} was not written at the end")


def _sigterm_on_one(case: Case) -> Account:
    job, delay = _job(case), random.Random(case.index).uniform(0.0, SLOWLY * 6)

    def training(job: Job, rank: int) -> None:
        _slowly(job, [KilledByItself(job, 4, signal.SIGTERM, delay)] if rank == case.victim else [])

    account = Account()
    found = ended(account, start(job, training), job, {0: (0,), 1: (0,)})
    account.demand(not any(job.end(rank).exists() for rank in (0, 1)), "training was not ended")
    for one in found[:1]:
        says(account, one, rf"rank {case.victim} received SIGTERM: all ranks end")
    _saved_at_the_end(account, job)
    nothing_lost(account, job)
    goes_on(account, job, on_exception=False)
    return account


def _to_all(case: Case, number: signal.Signals, codes: tuple[int, ...]) -> Account:
    job, delay = _job(case), random.Random(case.index).uniform(0.0, SLOWLY * 6)
    account = Account()
    run = start(job, lambda j, rank: _slowly(j, [ReadyAt(j, 4)] if rank == 0 else []))
    _wait_for(job.folder / "fault.json", LIMIT)
    time.sleep(delay)
    run.signal_all(number)
    found = ended(account, run, job, {0: codes, 1: codes})
    account.demand(not any(job.end(rank).exists() for rank in (0, 1)), "training was not ended")
    told = number == signal.SIGTERM
    # the other rank's interrupt may be known here before its own
    says(account, found[0], "received SIGTERM: all ranks end" if told else "(Detected|failed with) KeyboardInterrupt")
    if told:
        _saved_at_the_end(account, job)
    nothing_lost(account, job)
    if told or not job.on_exception:  # what Ctrl-C in the middle of a batch saves leaves that batch out
        goes_on(account, job, on_exception=False)
    return account


def _twice(case: Case) -> Account:
    """Ctrl-C before the first batch: while ranks meet, set up, capture."""
    job = case.job()
    account = Account()
    run: Run = start(job, lambda j, _rank: _slowly(j, []))
    time.sleep(random.Random(case.index).uniform(0.2, 2.0))
    note_the_fault(job)
    run.signal_all(signal.SIGINT)
    codes = (0, 1, -int(signal.SIGINT), -int(signal.SIGKILL), 130)
    for one in ended(account, run, job, {0: codes, 1: codes}):
        account.demand(one.code != 0 or job.end(one.rank).exists(), f"rank {one.rank} ended well without an end")
    nothing_lost(account, job)
    goes_on(account, job)
    return account


_SAME = "all ranks end at the same batch with code 0 (Lightning's); with `save_on_exception` that state is saved"
FAULTS = (
    Fault("SIGTERM on one", "one rank gets SIGTERM", _SAME, _sigterm_on_one),
    Fault("SIGTERM on all", "all ranks get SIGTERM", _SAME, lambda case: _to_all(case, signal.SIGTERM, (0,))),
    Fault(
        "Ctrl-C", "SIGINT to all ranks, as a terminal sends it, in training",
        "all ranks end with code 1 (Lightning's)", lambda case: _to_all(case, signal.SIGINT, (1,)),
    ),
    Fault(
        "Ctrl-C early", "SIGINT to all ranks in the first two seconds: while they meet, set up, capture",
        "all ranks end", _twice,
    ),
)  # fmt: skip
