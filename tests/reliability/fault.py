"""What a fault is, what is asked of its end, and what is written down of it."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lightning_spmd.parallel.parallel_plan import data_parallel_plan
from lightning_spmd.strategy.checkpoints.state_dicts import is_distributed_checkpoint
from tests.reliability.job import TIMEOUT, Job, Net, train
from tests.reliability.ranks import Ended, Run

PLANS = ("replicate", "zero3", "zero2")
LIMIT = 90.0
"""Seconds after which ranks are killed."""
GRACE = 15.0
"""Seconds beyond the timeout that a rank may take to end: five for the others' notes, the rest for a busy machine."""
KILLED = -int(signal.SIGKILL)


@dataclass(frozen=True)
class Case:
    """One run of a fault: which rank it happens to, and under which plan, goes by the run's number.

    Args:
        index: the run's number.
        folder: its own.
    """

    index: int
    folder: Path

    @property
    def victim(self) -> int:
        """The rank to which it happens."""
        return (self.index + 1) % 2

    @property
    def survivor(self) -> int:
        """The other one."""
        return 1 - self.victim

    def job(self, **settings: Any) -> Job:
        """The training."""
        return Job(self.folder, **{"plan": PLANS[self.index // 2 % len(PLANS)], **settings})


@dataclass
class Account:
    """What came of one run.

    Args:
        seconds: from the fault to the last process' end.
        codes: exit codes by rank.
        said: what the user reads, in one line.
        problems: what was not as it should be.
        outputs: of the ranks, for whoever looks for the reason.
    """

    seconds: float = 0.0
    codes: tuple[int | None, ...] = ()
    said: str = ""
    problems: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)

    def demand(self, holds: bool, otherwise: str) -> bool:
        """Note a problem unless something holds."""
        if not holds:
            self.problems.append(otherwise)
        return holds


@dataclass(frozen=True)
class Fault:
    """One row of the table.

    Args:
        name: for ``--only``.
        what: happens.
        result: what should come of it, for the table.
        play: one run.
    """

    name: str
    what: str
    result: str
    play: Callable[[Case], Account]


# ---------------------------------------------------------------------- pieces of a play
def start(job: Job, training: Callable[[Job, int], None], **settings: Any) -> Run:
    """Start the ranks of a job."""
    job.folder.mkdir(parents=True, exist_ok=True)
    return Run([functools.partial(training, job, rank) for rank in range(job.devices)], **settings)


def ended(
    account: Account, run: Run, job: Job, codes: Mapping[int, Collection[int]], asleep: float = 0.0
) -> list[Ended]:
    """Wait for the ranks; none may outlive the fault by more than the timeout, or end with another code.

    Args:
        account: of the run.
        run: that is waited for.
        job: its job.
        codes: with which each rank may end.
        asleep: seconds for which the fault keeps a rank from ending.
    """
    found = run.wait(LIMIT)
    account.outputs = [e.output for e in found]
    account.codes = tuple(e.code for e in found)
    note = job.folder / "fault.json"
    if account.demand(note.exists(), "the fault did not happen"):
        account.seconds = max(e.at for e in found) - json.loads(note.read_text())["at"]
        late = account.seconds > max(job.timeout, asleep) + GRACE
        account.demand(not late, f"took {account.seconds:.0f} s to end")
    for one in found:
        if account.demand(one.code is not None, f"rank {one.rank} hung"):
            allowed = codes[one.rank]
            account.demand(one.code in allowed, f"rank {one.rank} ended with {one.code}, not {sorted(allowed)}")
    return found


def says(account: Account, end: Ended, *words: str) -> None:
    """A rank's last words: all of these, as regular expressions."""
    for word in words:
        account.demand(re.search(word, end.output) is not None, f"rank {end.rank} does not say {word!r}")
    account.said = account.said or last_words(end.output)


def last_words(output: str) -> str:
    """The message with which a process ended: the last paragraph that begins like an exception."""
    lines = [re.sub(r"^\[rank\d+\]: ?", "", line) for line in output.rstrip().splitlines()]
    begins = [i for i, line in enumerate(lines) if re.match(r"[\w.]*(Error|Exception|Interrupt)(:|$)", line)]
    return " ".join(line for line in lines[begins[-1] :] if line)[:600] if begins else " ".join(lines[-2:])[:600]


def nothing_lost(account: Account, job: Job) -> None:
    """Each checkpoint that was there is there, and all that bear a name are whole."""
    note = job.folder / "fault.json"
    before = json.loads(note.read_text())["checkpoints"] if note.exists() else []
    for name in before:
        account.demand((job.checkpoints / name).exists(), f"{name} is lost")
    (checked,) = Run([functools.partial(_load_all, job)]).wait(LIMIT)
    account.demand(checked.code == 0, f"a checkpoint does not load: {last_words(checked.output)}")


def _load_all(job: Job) -> None:
    from lightning_spmd.strategy.checkpoints.distributed import CheckpointLayout, load_distributed

    for path in sorted(job.checkpoints.glob("*.ckpt")):
        if is_distributed_checkpoint(path):
            found = load_distributed(
                path,
                Net(job.width),
                data_parallel_plan("replicate", reduce_gradients=False),
                CheckpointLayout(None, None, None),
            )
        else:
            found = torch.load(path, weights_only=False)
        named = re.search(r"step=(\d+)", path.name)
        if named is not None and found["global_step"] != int(named[1]):
            raise RuntimeError(f"{path.name} is of step {found['global_step']}")
        print(path.name, found["global_step"])


def goes_on(account: Account, job: Job, **settings: Any) -> None:
    """The run continued with ``ckpt_path="last"`` ends with the bits of the one that nobody disturbed."""
    job = dataclasses.replace(job, **settings).going_on()
    found = start(job, lambda j, _rank: train(j)).wait(LIMIT)
    codes = [e.code for e in found]
    if not account.demand(codes == [0] * job.devices, f"the continued run ended with {codes}"):
        account.outputs += [e.output for e in found]
        return
    same_end(account, job, undisturbed(job.plan, job.devices, job.precision, job.width))


def same_end(account: Account, job: Job, reference: Job, ranks: Sequence[int] | None = None) -> None:
    """Two runs ended with the same bits on each rank."""
    for rank in range(job.devices) if ranks is None else ranks:
        ours, theirs = torch.load(job.end(rank)), torch.load(reference.end(rank))
        other = [
            k for k in theirs if k not in ours or not torch.equal(torch.as_tensor(ours[k]), torch.as_tensor(theirs[k]))
        ]
        account.demand(not other, f"rank {rank} ended with another {', '.join(other[:3])}")


@functools.cache
def undisturbed(plan: str, devices: int, precision: str, width: int, distributed: bool = False) -> Job:
    """A run to which nothing happens."""
    settings: Any = {"devices": devices, "precision": precision, "width": width, "distributed": distributed}
    job = Job(Path(tempfile.mkdtemp(prefix="undisturbed")), plan, **settings)
    found = start(job, lambda j, _rank: train(j)).wait(LIMIT)
    if [e.code for e in found] != [0] * devices:
        sys.exit("a run without any fault failed:\n" + "\n".join(e.output for e in found))
    return job


def played(fault: Fault, index: int) -> Account:
    """One run of a fault, in a folder of its own."""
    folder = Path(tempfile.mkdtemp(prefix=fault.name.replace(" ", "_")))
    account = fault.play(Case(index, folder))
    shutil.rmtree(folder, ignore_errors=True)
    return account


TIMEOUT_IN_WORDS = f"{TIMEOUT:.0f} s"
