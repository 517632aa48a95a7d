"""A cluster for the tests of a run, and jobs on it."""

from __future__ import annotations

import faulthandler
import functools
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.slurm.cluster import ENDED, Cluster, Job, a_cluster, why_not

SCRIPT = Path(__file__).with_name("train.py")
PATIENCE = 420
"""Seconds that a job may take, on a machine that has other things to do."""


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Two virtual nodes."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with a_cluster() as running:
        yield running


class Jobs:
    """Jobs on a cluster, with files in a folder.

    Args:
        cluster: the cluster.
        folder: a folder.
    """

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        self.submitted: list[int] = []

    def submit(self, body: str, *options: str, name: str = "job", **variables: str) -> int:
        """Submit a job; what it says goes to ``name.out``."""
        file = self.folder / f"{name}.sbatch"
        file.write_text(f"#!/bin/bash\n{body}\n")
        output = (f"--output={self.folder / name}.out", "--open-mode=append")
        number = self.cluster.submit(file, *output, *options, **{"MASTER_ADDR": "127.0.0.1", **variables})
        self.submitted.append(number)
        return number

    def train(self, nodes: int, tasks: int, *arguments: str, options: Sequence[str] = (), name: str = "run") -> int:
        """Submit training; it leaves what it does in the folder ``name``."""
        layout = [f"--nodes={nodes}", f"--ntasks-per-node={tasks}", "--cpus-per-task=1", *options]
        given = [str(self.folder / name), f"--devices={tasks}", f"--nodes={nodes}", *arguments]
        return self.submit(f"srun {shlex.join([sys.executable, '-u', str(SCRIPT), *given])}", *layout, name=name)

    def said(self, name: str = "run") -> str:
        """What a job has said so far."""
        file = self.folder / f"{name}.out"
        return file.read_text() if file.is_file() else ""

    def wait(self, number: int, timeout: float = PATIENCE) -> Job:
        """Wait until a job has ended."""
        return self.cluster.wait(number, timeout)

    def wait_for(self, condition: Any, timeout: float = PATIENCE) -> None:
        """Wait until something is so."""
        until = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > until:
                raise TimeoutError(f"it never came: {[self.cluster.job(n).text for n in self.submitted]}")
            time.sleep(0.05)

    def wait_for_restart(self, number: int, count: int, timeout: float = PATIENCE) -> None:
        """Wait until a job has been started again so many times, and help it to be so at once."""
        until = time.monotonic() + timeout
        while True:
            job = self.cluster.job(number)
            if job.restarts >= count and job.state == "RUNNING":
                return
            if job.state == "PENDING":
                self.cluster.run("scontrol", "update", f"jobid={number}", "StartTime=now", check=False)
            if job.state in ENDED or time.monotonic() > until:
                raise AssertionError(f"not started again ({count}): {job.text}\n{self.said()}")
            time.sleep(0.1)

    def lines(self, name: str = "run", rank: int = 0) -> list[dict[str, Any]]:
        """What a rank of a training did."""
        return lines_of(self.folder / name, rank)


@pytest.fixture
def jobs(cluster: Cluster, tmp_path: Path) -> Iterator[Jobs]:
    """Jobs that are gone when the test is over."""
    faulthandler.cancel_dump_traceback_later()  # jobs have a limit of their own
    found = Jobs(cluster, tmp_path)
    yield found
    for number in found.submitted:
        cluster.run("scancel", str(number), check=False)
    cluster.wait_until_empty(60)


def lines_of(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    """What a rank of a training did."""
    file = folder / f"rank{rank}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def events(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Batches and validations, without what says when they were."""
    return [{k: v for k, v in line.items() if k != "start"} for line in lines if "step" in line or "validated" in line]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """The weights at the end of a training."""
    return torch.load(folder / "weights.pt", weights_only=True)


@functools.cache
def uninterrupted(folder: Path, *arguments: str) -> Path:
    """The folder of a training in one process, outside of SLURM."""
    command = [sys.executable, str(SCRIPT), str(folder), *arguments]
    subprocess.run(command, check=True, timeout=PATIENCE)
    return folder


@pytest.fixture(scope="session")
def one_device(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Trains in one process, once for all tests that ask for the same."""
    folder = tmp_path_factory.mktemp("one_device")
    return lambda *arguments: uninterrupted(folder / str(abs(hash(arguments))), *arguments)
