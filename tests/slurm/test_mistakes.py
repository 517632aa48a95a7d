"""Mistakes in a script end the job at once, with a message that says what to change."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from tests.slurm.conftest import SCRIPT, Jobs

pytestmark = pytest.mark.slurm

SRUN = "srun --kill-on-bad-exit"


def _train(folder: Path, *arguments: str) -> str:
    return shlex.join([sys.executable, "-u", str(SCRIPT), str(folder), "--epochs=1", *arguments])


def test_mistakes_are_said_before_anybody_waits(jobs: Jobs) -> None:
    two = _train(jobs.folder / "two", "--nodes=2")
    cases = {
        "tasks": (f"{SRUN} {two}", ("--nodes=2", "--ntasks-per-node=2"), "SLURM starts 4 tasks on 2 nodes"),
        "srun": (two, ("--nodes=2", "--ntasks-per-node=1"), "started without srun"),
        "ntasks": (f"{SRUN} {two}", ("--nodes=2", "--ntasks=2"), "--ntasks-per-node=2"),
        "address": (
            f"unset MASTER_ADDR; {SRUN} {two}",
            ("--nodes=2", "--ntasks-per-node=1"),
            "does not know the address 'n1' of the first rank",
        ),
    }
    numbers = {name: jobs.submit(body, *options, name=name) for name, (body, options, _) in cases.items()}
    for name, (_, _, message) in cases.items():
        assert jobs.wait(numbers[name]).state == "FAILED"
        assert message in jobs.said(name)


def test_a_job_called_bash(jobs: Jobs) -> None:
    said = jobs.cluster.run(
        *("srun", "--nodes=2", "--ntasks-per-node=1", "--kill-on-bad-exit", "bash", "-c"),
        _train(jobs.folder / "run"),
        check=False,
        timeout=300,
    )
    assert "srun started 2 tasks of a job with the name 'bash'" in said


@pytest.mark.parametrize("port", [None, 23456])
def test_two_steps_at_once(jobs: Jobs, port: int | None) -> None:
    """Each has a port of its own, unless the script gives them one."""
    both = [
        f"({SRUN} --overlap {_train(jobs.folder / name, '--nodes=2', '--pause=2')} && echo {name} is done) &"
        for name in ("first", "second")
    ]
    export = "" if port is None else f"export MASTER_PORT={port}"
    number = jobs.submit("\n".join([export, *both, "wait"]), "--nodes=2", "--ntasks-per-node=1")
    assert jobs.wait(number).state == "COMPLETED"
    said = jobs.said("job")
    assert said.count("is done") == (2 if port is None else 1), said
    assert ("MASTER_PORT" in said) == (port is not None)


def test_a_checkpoint_of_another_job(jobs: Jobs) -> None:
    arguments = ("--rows=256", "--pause=0.3")
    first = jobs.train(1, 1, *arguments, options=("--requeue",))
    jobs.wait_for(lambda: any("step" in line for line in jobs.lines()))
    jobs.cluster.tell(first)
    jobs.wait_for_restart(first, 1)
    jobs.cluster.run("scancel", str(first))
    second = jobs.wait(jobs.train(1, 1, *arguments))
    assert second.state == "FAILED"
    assert f"was left by job {first}, and Lightning would let this job, {second.number}, go on" in jobs.said()
