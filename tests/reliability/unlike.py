"""One rank is not like the other: other code, other shapes, other settings, another version, another pace."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch import nn

from tests.reliability.fault import (
    Account,
    Case,
    Fault,
    ended,
    goes_on,
    nothing_lost,
    same_end,
    says,
    start,
    undisturbed,
)
from tests.reliability.job import Job, Net, note_the_fault, train

Change = Callable[[Job, int], dict[str, Any]]
"""What is different on the victim, as arguments of ``train``; called there, with the number of the run."""


def _differs(case: Case, change: Change, *words: str, **settings: Any) -> Account:
    """Both ranks end with an error that names the difference, before or while the first graph is built."""
    job = case.job(**settings)

    def training(job: Job, rank: int) -> None:
        note_the_fault(job)
        train(job, **(change(job, case.index) if rank == case.victim else {}))

    account = Account()
    for one in ended(account, start(job, training), job, {0: (1,), 1: (1,)}):
        says(account, one, *words)
    account.demand(not any(job.end(rank).exists() for rank in (0, 1)), "training went on")
    return account


def _other_code(case: Case) -> Account:
    """As above. Only other calls in ``training_step`` can be trained with whole parameters, eagerly as with DDP."""
    job, change = case.job(), {"make": (OtherStep, OtherOptimizer, MoreParameters)[case.index % 3]}
    if change["make"] is not OtherStep or job.plan != "replicate":
        return _differs(case, lambda *_: change, *_NAMES)
    account = Account()

    def training(job: Job, rank: int) -> None:
        note_the_fault(job)
        train(job, **(change if rank == case.victim else {}))

    first, _ = ended(account, start(job, training), job, {0: (0,), 1: (0,)})
    says(account, first, r"the ranks call different things: .*rank \d calls mul at .*unlike.py:\d+")
    account.demand(all(job.end(rank).exists() for rank in (0, 1)), "training did not go on")
    return account


class OtherStep(Net):
    """Another line in training_step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * 2


class OtherOptimizer(Net):
    """Another rate."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class MoreParameters(Net):
    """A layer more."""

    def __init__(self, width: int = 10) -> None:
        super().__init__(width)
        self.more = nn.Linear(3, 3)

    def forward(self, x: Any) -> Any:
        return self.more(super().forward(x))


class WiderLayer(Net):
    """Layers of another width."""

    def __init__(self, width: int = 10) -> None:
        super().__init__(width + 6)


def _shapes(job: Job, index: int) -> dict[str, Any]:
    return {"make": WiderLayer}


def _version(job: Job, index: int) -> dict[str, Any]:
    torch.__version__ = "2.12.0"
    return {}


def _flags(job: Job, index: int) -> dict[str, Any]:
    """Settings that a user's script or environment makes on one rank alone."""
    if index % 3 == 0:
        torch.use_deterministic_algorithms(True)
    elif index % 3 == 1:
        torch.set_float32_matmul_precision("medium")
    else:
        torch.set_default_dtype(torch.float64)
    return {}


def _trainers_flags(job: Job, index: int) -> dict[str, Any]:
    name, value = (("gradient_clip_val", 0.5), ("accumulate_grad_batches", 2), ("limit_train_batches", 3))[index % 3]
    os.environ[f"PL_TRAINER_{name.upper()}"] = str(value)
    return {}


def _hash_seed(case: Case) -> Account:
    """Sets of names are in another order on each rank; nothing may depend on it."""
    job = case.job()

    def training(job: Job, rank: int) -> None:
        note_the_fault(job)
        command = f"from tests.reliability.unlike import again; again({str(job.folder)!r}, {job.plan!r})"
        os.environ["PYTHONHASHSEED"] = str(1 + rank + 2 * case.index)
        os.execv(os.sys.executable, [os.sys.executable, "-c", command])  # type: ignore[attr-defined]

    account = Account()
    found = start(job, training).wait(120)
    account.codes = tuple(e.code for e in found)
    account.outputs = [e.output for e in found]
    if account.demand(account.codes == (0, 0), f"ranks ended with {account.codes}"):
        same_end(account, job, undisturbed(job.plan, 2, job.precision, job.width))
    account.said = "trains, bitwise as ever"
    return account


def again(folder: str, plan: str) -> None:
    """A rank in a fresh interpreter."""
    from pathlib import Path

    torch.set_num_threads(1)
    train(Job(Path(folder), plan))


# ---------------------------------------------------------------------- pace
class Sleeps(L.Callback):
    """Before the fifth step, for so many seconds."""

    def __init__(self, job: Job, seconds: float) -> None:
        self.job, self.seconds = job, seconds

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 5:
            note_the_fault(self.job)
            time.sleep(self.seconds)


def _slow(case: Case, timeout: float, sleep: float, *, survives: bool) -> Account:
    job = case.job(timeout=timeout)

    def training(job: Job, rank: int) -> None:
        train(job, [Sleeps(job, sleep)] if rank == case.victim else [])

    account = Account()
    codes = (0,) if survives else (1,)
    found = ended(account, start(job, training), job, {0: codes, 1: codes}, asleep=sleep)
    if survives:
        same_end(account, job, undisturbed(job.plan, 2, job.precision, job.width))
        account.said = "trains, bitwise as ever"
        return account
    says(account, found[case.survivor], rf"rank {case.victim} \(process \d+", r"timeout", "waited")
    says(account, found[case.victim], rf"rank {case.survivor}\b")
    nothing_lost(account, job)
    goes_on(account, job)
    return account


_BOTH = "all ranks end with an error that names the ranks and the first difference; nothing is trained"
_AS_EVER = "trains, with the bits of an undisturbed run"
_NAMES = ("rank 0", "rank 1")
_ROWS = (
    (
        "other code",
        "one rank has another training_step, optimizer or layer",
        f"{_BOTH}. Under `replicate` other calls in `training_step` are named, and train eagerly as with DDP",
        _other_code,
    ),
    ("other shapes", "one rank's layers are of another width", _BOTH, lambda c: _differs(c, _shapes, *_NAMES)),
    (
        "other settings",
        "deterministic algorithms, matmul precision or default dtype are set on one rank alone",
        _BOTH,
        lambda c: _differs(c, _flags, *_NAMES),
    ),
    (
        "other Trainer flags",
        "clipping, accumulation or limit_train_batches are set on one rank alone (`PL_TRAINER_...`)",
        "all ranks end with an error that names the ranks and where they differ",
        lambda c: _differs(c, _trainers_flags, *_NAMES),
    ),
    (
        "other torch",
        "one rank has another version of torch (simulated: another version string)",
        _BOTH,
        lambda c: _differs(c, _version, "torch 2.12.0"),
    ),
    (
        "other hash seed",
        "ranks hash strings otherwise (`PYTHONHASHSEED`, fresh interpreters)",
        _AS_EVER,
        _hash_seed,
    ),
    (
        "slow rank",
        "a rank sleeps for 8 s where the timeout is 20 s",
        _AS_EVER,
        lambda c: _slow(c, 20.0, 8.0, survives=True),
    ),
    (
        "stuck rank",
        "a rank sleeps for 12 s where the timeout is 6 s",
        "the waiting rank ends in time and names the other one and the timeout; the sleeper ends when it wakes up",
        lambda c: _slow(c, 6.0, 12.0, survives=False),
    ),
)
FAULTS = tuple(Fault(name, what, result, play) for name, what, result, play in _ROWS)
