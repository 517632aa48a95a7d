"""A rank is killed: while it captures, runs a graph, finishes pending work, writes a checkpoint, or anywhere."""

from __future__ import annotations

import os
import random
import resource
import signal
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

import lightning as L
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_spmd.stages.runtime.executor import Executable
from tests.reliability.fault import KILLED, Account, Case, Fault, ended, goes_on, nothing_lost, says, start
from tests.reliability.job import BATCHES, EVERY, Job, Net, note_the_fault, train

GONE = r"RankLostError: rank {} is gone: its process \d+"
GO_ON = r"ckpt_path='last'"
AT = BATCHES + 1
"""The step in which most faults happen: there are checkpoints, and graphs have their final form."""


def die(job: Job) -> None:
    """As the kernel does it."""
    noting = threading.Thread(target=note_the_fault, args=(job,))  # which reads files: no capture sees another thread
    noting.start()
    noting.join()
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def _lost(case: Case, job: Job, training: Any, codes: Sequence[int] = (KILLED,)) -> Account:
    """One rank dies, the other one says so and ends; nothing is lost."""
    account = Account()
    found = ended(account, start(job, training), job, {case.victim: codes, case.survivor: (1,)})
    says(account, found[case.survivor], GONE.format(case.victim), GO_ON)
    nothing_lost(account, job)
    goes_on(account, job)
    return account


# ---------------------------------------------------------------------- in capture
class DiesInCapture(Net):
    """Python sees training_step while it is captured, and when a graph is looked at again."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.job is not None and _begun[-1] >= self.at:
            die(self.job)
        return super().training_step(batch, batch_idx)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        _begun.append(self.trainer.global_step)

    job: Job | None = None
    at = 0


_begun = [0]
"""Steps. What one rank alone asked the Trainer for in training_step would be a difference between the ranks."""


def _in_capture(case: Case) -> Account:
    job = case.job()

    def training(job: Job, rank: int) -> None:
        DiesInCapture.job = job if rank == case.victim else None
        DiesInCapture.at = BATCHES if case.index % 4 >= 2 else 0
        train(job, make=DiesInCapture)

    return _lost(case, job, training)


# ---------------------------------------------------------------------- in a graph
class DiesAtOperator(TorchDispatchMode):
    """Dies in front of an operator.

    Args:
        job: for the note.
        number: of the operator, counted from the first collective on, or from the first operator.
        collective: which of the two.
    """

    def __init__(self, job: Job, number: int, *, collective: bool) -> None:
        super().__init__()
        self.job, self.left, self.counts = job, number, not collective

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts = self.counts or "c10d" in str(func)
        if self.counts:
            if self.left == 0:
                die(self.job)
            self.left -= 1
        return func(*args, **(kwargs or {}))


def _in_main(case: Case) -> Account:
    """In the middle of an iteration's graph, at or behind its first collective."""
    job = case.job()

    def training(job: Job, rank: int) -> None:
        original, runs = Executable._compute, [0]

        def compute(*args: Any) -> Any:
            runs[0] += 1
            if rank != case.victim or runs[0] <= AT:
                return original(*args)
            with DiesAtOperator(job, case.index % 4, collective=True):
                return original(*args)

        mock.patch.object(Executable, "_compute", compute).start()
        train(job)

    return _lost(case, job, training)


def _in_cleanup(case: Case) -> Account:
    """In work that an iteration left for the next one: where it is done by itself, and where the next graph has it."""
    job = case.job(overlap=True)
    together = case.index % 4 >= 2

    def training(job: Job, rank: int) -> None:
        name = "_compute" if together else "clean_up"
        original, runs = getattr(Executable, name), [0]

        def finish(self: Executable, *args: Any) -> Any:
            runs[0] += not together or bool(args[2])  # what the iteration before left
            if rank != case.victim or runs[0] <= (AT // 2 if together else 1):
                return original(self, *args)
            with DiesAtOperator(job, case.index // 4, collective=False):
                return original(self, *args)

        mock.patch.object(Executable, name, finish).start()
        train(job)

    return _lost(case, job, training)


# ---------------------------------------------------------------------- in a checkpoint
_FILE_EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.move", "shutil.rmtree", "ctypes.call")


def dies_at_file_event(job: Job, number: int) -> None:
    """Die at a call that changes files; audit hooks see it in front of it."""
    left = [number]

    def hook(event: str, args: Any) -> None:
        if not event.startswith(_FILE_EVENTS) or left[0] < 0:
            return
        writes = event != "open" or set(str(args[1])) & set("wxa+") or (args[2] or 0) & os.O_CREAT
        if not writes:
            return
        left[0] -= 1
        if left[0] < 0:
            die(job)

    sys.addaudithook(hook)


def dies_at_size(job: Job, size: int) -> None:
    """The kernel ends the process as soon as a file becomes larger."""
    note_the_fault(job)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


class DiesWhileSaving(L.Callback):
    """From the second checkpoint on: at a file event if ``index`` is even, in the middle of the bytes if it is odd."""

    def __init__(self, job: Job, index: int) -> None:
        self.job, self.index, self.armed = job, index, False

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step < 2 * EVERY or self.armed:
            return
        self.armed = True
        if self.index % 2:
            dies_at_size(self.job, 512 * (1 + self.index // 2))
        else:
            dies_at_file_event(self.job, self.index // 2)


def _while_saving(case: Case, *, distributed: bool) -> Account:
    # a file is rank 0's to write
    case = Case(case.index if distributed else case.index * 2 + 1, case.folder)
    job = case.job(distributed=distributed)
    number = case.index // 2

    def training(job: Job, rank: int) -> None:
        train(job, [DiesWhileSaving(job, number)] if rank == case.victim else [])

    return _lost(case, job, training, (KILLED, -int(signal.SIGXFSZ)))


# ---------------------------------------------------------------------- anywhere
def _anywhere(case: Case) -> Account:
    job = case.job(overlap=case.index % 3 == 0, distributed=case.index % 4 == 1)
    delay = random.Random(case.index).uniform(0.0, 2.5)

    def training(job: Job, rank: int) -> None:
        if rank == case.victim:
            threading.Timer(delay, die, (job,)).start()
        train(job)
        time.sleep(3 if rank == case.victim else 0)

    account = Account()
    found = ended(account, start(job, training), job, {case.victim: (KILLED,), case.survivor: (0, 1)})
    if found[case.survivor].code == 1:
        # killed before it came, it is any of those that rank 0 waits for
        says(account, found[case.survivor], rf"rank {case.victim}\b|has waited for the other ranks")
    nothing_lost(account, job)
    goes_on(account, job)
    return account


_ENDS = "the other rank ends with `RankLostError`, which names rank, process, signal and place"
_KEPT = f"{_ENDS}; what was under that name is there"
FAULTS = (
    Fault("killed in capture", "a rank is killed while training_step is captured", _ENDS, _in_capture),
    Fault("killed in main", "a rank is killed in the middle of an iteration's graph", _ENDS, _in_main),
    Fault("killed in cleanup", "a rank is killed in work left by overlapped iterations", _ENDS, _in_cleanup),
    Fault(
        "killed in a checkpoint",
        "rank 0 is killed while it writes a checkpoint file: between calls that change files, and amid the bytes",
        _KEPT,
        lambda case: _while_saving(case, distributed=False),
    ),
    Fault(
        "killed in a distributed checkpoint",
        "either rank is killed while a checkpoint folder is written, likewise",
        _KEPT,
        lambda case: _while_saving(case, distributed=True),
    ),
    Fault("killed anywhere", "a rank is killed at a random moment of its first seconds", _ENDS, _anywhere),
)
