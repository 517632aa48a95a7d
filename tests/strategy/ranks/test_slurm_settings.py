"""Mistakes between a SLURM script and a Trainer are said, with what to change, before ranks wait for each other."""

from __future__ import annotations

import ast
import os
import signal
import socket
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path

import pytest
from lightning.fabric.plugins.environments import LightningEnvironment, SLURMEnvironment, TorchElasticEnvironment

import lightning_spmd
from lightning_spmd import early_signals
from lightning_spmd.errors import ConfigurationError
from lightning_spmd.strategy.ranks.slurm import check_own_checkpoint, check_tasks, choose_port, job_name, meet

STEP = {
    "SLURM_JOB_ID": "17",
    "SLURM_JOB_NAME": "train",
    "SLURM_NTASKS": "4",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_NNODES": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "1",
}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> SLURMEnvironment:
    monkeypatch.setenv("SLURM_NTASKS", "1")
    return SLURMEnvironment()


def test_one_task_a_device_is_right(cluster: SLURMEnvironment) -> None:
    check_tasks(cluster, 2, 2, STEP)


@pytest.mark.parametrize(
    ("devices", "num_nodes", "changes", "message"),
    [
        (1, 2, {}, r"starts 4 tasks on 2 nodes, and Trainer\(devices=1, num_nodes=2\) needs 2.*devices=2, num_nodes=2"),
        (4, 1, {}, r"Trainer\(devices=4, num_nodes=1\) needs 4.*`#SBATCH --nodes=1 --ntasks-per-node=4`, or Trainer\("),
        (1, 1, {}, r"4 tasks on 2 nodes, and Trainer\(devices=1, num_nodes=1\) needs 1"),
        (2, 1, {"SLURM_NTASKS": "1", "SLURM_NNODES": "1"}, r"starts 1 task on 1 node, and Trainer\(devices=2"),
        (2, 2, {"SLURM_STEP_ID": None}, "has 4 tasks, but this program was started without srun"),
    ],
)
def test_tasks_that_do_not_fit(
    cluster: SLURMEnvironment, devices: int, num_nodes: int, changes: dict[str, str | None], message: str
) -> None:
    environment = {k: v for k, v in {**STEP, **changes}.items() if v is not None}
    with pytest.raises(ConfigurationError, match=message):
        check_tasks(cluster, devices, num_nodes, environment)


def test_many_tasks_named_bash_are_each_the_only_one_for_lightning() -> None:
    environment = {**STEP, "SLURM_JOB_NAME": "bash"}
    with pytest.raises(ConfigurationError, match="started 4 tasks of a job with the name 'bash'.*--job-name=train"):
        check_tasks(LightningEnvironment(), 1, 1, environment)
    check_tasks(LightningEnvironment(), 2, 1, {**environment, "SLURM_STEP_NUM_TASKS": "1"})  # somebody types
    check_tasks(TorchElasticEnvironment(), 2, 1, environment)  # torchrun


@pytest.mark.parametrize(
    ("name", "entry", "changes", "fine"),
    [
        ("hpc_ckpt_1.ckpt", {"slurm_job": "17"}, {"SLURM_RESTART_COUNT": "1"}, True),
        ("hpc_ckpt_1.ckpt", None, {"SLURM_RESTART_COUNT": "1"}, True),  # written by another strategy
        ("last.ckpt", None, {}, True),
        ("hpc_ckpt_1.ckpt", None, {}, False),
        ("hpc_ckpt_1.ckpt", {"slurm_job": "16"}, {"SLURM_RESTART_COUNT": "1"}, False),
        ("hpc_ckpt_1.ckpt", {"slurm_job": "9_1"}, {"SLURM_ARRAY_JOB_ID": "9", "SLURM_ARRAY_TASK_ID": "2"}, False),
    ],
)
def test_checkpoints_of_other_jobs(
    name: str, entry: dict[str, str] | None, changes: dict[str, str], fine: bool
) -> None:
    environment = {**STEP, **changes}
    if fine:
        check_own_checkpoint(f"runs/{name}", entry, environment)
        return
    with pytest.raises(ConfigurationError, match=f"runs/{name} was left by .* this job, {job_name(environment)},"):
        check_own_checkpoint(f"runs/{name}", entry, environment)


# ---------------------------------------------------------------------- where ranks meet
def test_steps_of_a_job_take_different_ports() -> None:
    ports = []
    for step in ("0", "1", "2"):
        environment = {**STEP, "SLURM_STEP_ID": step}
        choose_port(environment)
        ports.append(environment.get("MASTER_PORT"))
    assert ports == [None, "17494", "19971"]  # Lightning's own for the first
    given = {**STEP, "SLURM_STEP_ID": "1", "MASTER_PORT": "29500"}
    choose_port(given)
    assert given["MASTER_PORT"] == "29500"


@pytest.fixture
def port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def test_an_address_that_nobody_knows() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.sleep", lambda _: None)
        with pytest.raises(ConfigurationError, match="does not know the address 'n1.invalid'.*Export MASTER_ADDR"):
            meet("n1.invalid", 15017, 0, "17.0", None)


def test_ranks_of_one_step_meet(port: int) -> None:
    first = meet("127.0.0.1", port, 0, "17.0", None)
    meet("127.0.0.1", port, 1, "17.0", None)
    del first


def test_two_steps_on_one_port(port: int) -> None:
    first = meet("127.0.0.1", port, 0, "17.0", None)
    with pytest.raises(ConfigurationError, match="rank 1 of step 17.1 finds step 17.0 .* same MASTER_PORT"):
        meet("127.0.0.1", port, 1, "17.1", None)
    del first


def test_a_port_that_is_taken(port: int) -> None:
    with socket.socket() as other:
        other.bind(("0.0.0.0", port))
        other.listen()
        with pytest.raises(ConfigurationError, match=f"rank 0 of step 17.1 cannot open port {port}.*another step"):
            meet("127.0.0.1", port, 0, "17.1", None)


def test_a_first_rank_that_never_comes(port: int) -> None:
    with pytest.raises(ConfigurationError, match=f"rank 1 of step 17.0 does not find rank 0 at 127.0.0.1:{port}"):
        meet("127.0.0.1", port, 1, "17.0", timedelta(seconds=1))


# ---------------------------------------------------------------------- signals before fit
def test_signals_are_noted_before_anything_else_is_imported() -> None:
    tree = ast.parse(Path(lightning_spmd.__file__).read_text())
    first = next((node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))), None)
    assert isinstance(first, ast.Import)
    assert first.names[0].name == early_signals.__name__


ANSWERS = """
import os, runpy, signal, subprocess, sys
names = runpy.run_path(sys.argv[1])
os.kill(os.getpid(), signal.SIGUSR1)
child = "import os, signal; os.kill(os.getpid(), signal.SIGUSR1)"
print(names["received"](signal.SIGUSR1), subprocess.run([sys.executable, "-c", child]).returncode, flush=True)
names["forget"](signal.SIGUSR1)
print(names["received"](signal.SIGUSR1), flush=True)
print(names["release"](), signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL, flush=True)
os.kill(os.getpid(), signal.SIGUSR1)
"""


def test_a_handler_that_comes_later_gets_what_has_come() -> None:
    got: list[int] = []
    assert early_signals.watch(signal.SIGUSR1)
    try:
        signal.signal(signal.SIGUSR1, lambda number, _: got.append(number))
        # To this thread: others of this process, which earlier tests may have started, do not block it.
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        assert got == []
        assert not early_signals.watch(signal.SIGUSR1)  # as a run does when it begins
        assert got == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        early_signals.release()


@pytest.mark.parametrize(("job", "survives"), [("train", True), ("bash", False)])
def test_a_signal_before_fit_is_kept(job: str, survives: bool) -> None:
    """SLURM sends it to child processes too, such as data loaders' workers."""
    done = subprocess.run(
        [sys.executable, "-c", ANSWERS, early_signals.__file__],
        env={**os.environ, **STEP, "SLURM_JOB_NAME": job},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == -signal.SIGUSR1
    assert done.stdout == ("True 0\nFalse\n[] True\n" if survives else "")
