"""Jobs that SLURM starts again, whenever its signal comes, are the run that was never ended, bit for bit."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.slurm.conftest import Jobs, events, weights_of

pytestmark = pytest.mark.slurm

REQUEUES = 20
USR1 = 1 << 9
LONG = (
    "--rows=128",
    "--epochs=10",
    "--dropout=0.2",
    "--pause=0.1",
    "--validation-pause=0.05",
    "--checkpoints",
    "--flags",
    '{"val_check_interval": 4, "limit_val_batches": 4}',
)
"""160 batches, a validation after every 4 of them, a checkpoint after each."""


def _seen(jobs: Jobs, start: int, kind: str) -> int:
    return sum(kind in line and line["start"] == str(start) for line in jobs.lines())


def _listening(jobs: Jobs, tasks: int) -> bool:
    """Whether the tasks have come past their first line."""
    found = 0
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            command = status.with_name("cmdline").read_bytes()
            blocked = next(line for line in status.read_text().splitlines() if line.startswith("SigBlk"))
        except (OSError, StopIteration):
            continue
        mine = str(jobs.folder / "run").encode() in command and b"python" in command.split(b"\0")[0]
        found += mine and bool(int(blocked.split()[1], 16) & USR1)
    return found >= tasks


def _imports(jobs: Jobs, start: int, draws: random.Random) -> None:
    jobs.wait_for(lambda: _listening(jobs, 2))
    time.sleep(draws.uniform(0, 2))


def _capture(jobs: Jobs, start: int, draws: random.Random) -> None:
    jobs.wait_for(lambda: _seen(jobs, start, "fit"))
    time.sleep(draws.uniform(0, 1))


def _training(jobs: Jobs, start: int, draws: random.Random) -> None:
    jobs.wait_for(lambda: _seen(jobs, start, "step") >= 2)
    time.sleep(draws.uniform(0, 0.3))


def _validation(jobs: Jobs, start: int, draws: random.Random) -> None:
    jobs.wait_for(lambda: _seen(jobs, start, "validating"))
    time.sleep(draws.uniform(0, 0.2))


def _checkpoint(jobs: Jobs, start: int, draws: random.Random) -> None:
    jobs.wait_for(lambda: _seen(jobs, start, "saving"))


MOMENTS: tuple[Callable[[Jobs, int, random.Random], None], ...] = (
    _training,
    _imports,
    _validation,
    _capture,
    _checkpoint,
)


def test_twenty_requeues(jobs: Jobs) -> None:
    """During the imports, in capture, in training, in validation, in a checkpoint; then to the end."""
    draws = random.Random(3)
    number = jobs.train(2, 1, *LONG, options=("--requeue",))
    took = []
    for start in range(REQUEUES):
        moment = MOMENTS[start % len(MOMENTS)]
        moment(jobs, start, draws)
        jobs.cluster.tell(number)
        told = time.monotonic()
        jobs.wait_for_restart(number, start + 1)
        took.append(time.monotonic() - told)
        print(f"requeue {start + 1}: {moment.__name__.strip('_')}, {took[-1]:.1f} s", flush=True)
    job = jobs.wait(number)
    assert (job.state, job.restarts) == ("COMPLETED", REQUEUES), jobs.said()
    print(f"{REQUEUES} requeues, from signal to start {min(took):.1f} to {max(took):.1f} s")
    _assert_as_if_never_ended(jobs, *LONG)


def _assert_as_if_never_ended(jobs: Jobs, *arguments: str) -> None:
    whole = jobs.wait(jobs.train(2, 1, *arguments, name="whole"))
    assert whole.state == "COMPLETED", jobs.said("whole")
    for rank in range(2):
        found, expected = (events(jobs.lines(name, rank)) for name in ("run", "whole"))
        assert found == expected
    ours, theirs = (weights_of(jobs.folder / name) for name in ("run", "whole"))
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def test_the_time_limit(jobs: Jobs) -> None:
    """``--signal=USR1@60``: SLURM sends it by itself, up to a minute too early, as its manual says."""
    slow = ("--rows=256", "--epochs=4", "--dropout=0.2", "--pause=1.6")
    number = jobs.train(2, 1, *slow, options=("--time=4", "--signal=USR1@60", "--requeue"))
    job = jobs.wait(number, timeout=900)
    assert job.state == "COMPLETED", jobs.said()
    assert job.restarts >= 1
    fast = [argument for argument in slow if not argument.startswith("--pause")]
    _assert_as_if_never_ended(jobs, *fast)


@pytest.mark.parametrize("layout", [(2, 2, "spmd"), (2, 1, "spmd_zero3"), (2, 1, "in_parts")], ids=str)
def test_other_layouts(jobs: Jobs, layout: tuple[int, int, str]) -> None:
    nodes, tasks, strategy = layout
    arguments = ("--rows=64", "--dropout=0.2", "--pause=0.2", f"--strategy={strategy}")
    number = jobs.train(nodes, tasks, *arguments, options=("--requeue",))
    jobs.wait_for(lambda: _seen(jobs, 0, "step") >= 2)
    jobs.cluster.tell(number)
    job = jobs.wait(number)
    assert (job.state, job.restarts) == ("COMPLETED", 1), jobs.said()
    assert jobs.wait(jobs.train(nodes, tasks, *arguments, name="whole")).state == "COMPLETED"
    assert events(jobs.lines()) == events(jobs.lines("whole"))


def test_sigterm_ends_all_ranks_at_one_batch(jobs: Jobs) -> None:
    """``scancel`` and preemption: no requeue of our own."""
    number = jobs.train(2, 1, *LONG)
    jobs.wait_for(lambda: _seen(jobs, 0, "step") >= 3)
    jobs.cluster.tell(number, "TERM")
    job = jobs.wait(number)
    assert job.restarts == 0
    steps = [[line["step"] for line in jobs.lines("run", rank) if "step" in line] for rank in range(2)]
    assert steps[0] == steps[1]
    assert len(steps[0]) < 160


def test_other_strategies_answer_as_ever(jobs: Jobs) -> None:
    """Lightning's own handler, though this package had noted signals until then."""
    number = jobs.train(1, 1, *LONG, "--strategy=auto", options=("--requeue",))
    jobs.wait_for(lambda: _seen(jobs, 0, "step") >= 2)
    jobs.cluster.tell(number)
    jobs.wait_for(lambda: "Handling auto-requeue signal" in jobs.said())
    jobs.wait_for_restart(number, 1)
