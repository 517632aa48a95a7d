"""Numbers that are none, and memory that is not there."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import EarlyStopping

from tests.reliability.fault import LIMIT, Account, Case, Fault, ended, goes_on, nothing_lost, says, start
from tests.reliability.job import BATCHES, Job, Net, Rows, note_the_fault, train


class Poisoned(Net):
    """A loss that is not finite in the sixth step, on the rows of all ranks or of one."""

    kind = float("nan")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss + batch[2].sum() * loss


class PoisonedRows(Rows):
    """One row has a third value that is not finite."""

    kind = float("nan")

    def __iter__(self) -> Any:
        for index, (x, y) in enumerate(super().__iter__()):
            poison = torch.zeros(len(x))
            if index == 5 and len(self) == BATCHES:
                poison[-1] = self.kind
            yield x, y, poison


def _poisoned(job: Job, rank: int, kind: float, stopping: bool) -> None:
    PoisonedRows.kind = kind
    note_the_fault(job)
    callbacks: Any = [EarlyStopping("loss", check_finite=True, patience=99, check_on_train_epoch_end=True)]
    train(
        job, callbacks if stopping else [], make=Poisoned,
        data=lambda: (PoisonedRows(BATCHES, job.devices), PoisonedRows(2, job.devices)),
    )  # fmt: skip


def _not_finite(case: Case) -> Account:
    """Training goes on, as one device's does: the same values are NaN in the end, and ranks agree."""
    kind = float("nan") if case.index % 2 else float("inf")
    stopping = case.index % 4 >= 2  # EarlyStopping(check_finite=True) ends training at the epoch's end
    account, job = Account(), case.job()
    ended(account, start(job, lambda j, r: _poisoned(j, r, kind, stopping)), job, {0: (0,), 1: (0,)})
    alone = Job(case.folder / "alone", devices=1)
    codes = [e.code for e in start(alone, lambda j, r: _poisoned(j, r, kind, stopping)).wait(LIMIT)]
    if not account.problems and account.demand(codes == [0], "one device failed"):
        theirs = torch.load(alone.end(0))
        for rank in (0, 1):
            ours = torch.load(job.end(rank))
            account.demand(ours["steps"] == theirs["steps"] == (BATCHES if stopping else 2 * BATCHES), "other steps")
            finite = {k: bool(torch.as_tensor(v).isfinite().all()) for k, v in ours.items()}
            expected = {k: bool(torch.as_tensor(v).isfinite().all()) for k, v in theirs.items()}
            account.demand(finite == expected, f"rank {rank}: other values are finite than on one device")
        account.said = "as one device"
    return account


class RunsOut(Net):
    """One rank has not enough memory in its sixth step."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.job is not None and self.trainer.global_step == 5:
            note_the_fault(self.job)
            self.job = None
            if self.really:
                size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
                resource.setrlimit(resource.RLIMIT_AS, (size + 2**26, resource.RLIM_INFINITY))
                torch.empty(2**28).fill_(1.0)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    job: Job | None = None
    really = False


def _out_of_memory(case: Case) -> Account:
    account, job = Account(), case.job()

    def training(job: Job, rank: int) -> None:
        RunsOut.job = job if rank == case.victim else None
        RunsOut.really = case.index // 2 % 2 == 0
        train(job, make=RunsOut)

    found = ended(account, start(job, training), job, {0: (1,), 1: (1,)})
    says(account, found[case.victim], "rematerialize", "zero3", "memory")
    says(account, found[case.survivor], rf"rank {case.victim} failed with (OutOfMemoryError|RuntimeError)", "memory")
    nothing_lost(account, job)
    goes_on(account, job)
    return account


FAULTS = (
    Fault(
        "NaN or inf",
        "the loss of one rank's row is NaN or inf in one step",
        "training goes on, or ends where `EarlyStopping(check_finite=True)` says, as on one device",
        _not_finite,
    ),
    Fault(
        "out of memory",
        "one rank runs out of memory: a limit on its address space, or `torch.OutOfMemoryError`",
        "that rank's error says what helps (`rematerialize`, `zero3`), the other names it",
        _out_of_memory,
    ),
)
