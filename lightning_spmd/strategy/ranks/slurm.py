"""Mistakes in SLURM scripts and Trainers, reported before ranks wait for each other in vain."""

from __future__ import annotations

import contextlib
import inspect
import os
import socket
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from typing_extensions import override

from lightning_spmd import _private_api as private
from lightning_spmd.errors import ConfigurationError
from lightning_spmd.messages import warn
from lightning_spmd.strategy.ranks.boundary import Launcher
from lightning_spmd.strategy.ranks.rendezvous import LONGEST, connected

JOB = "slurm_job"
"""Key of a checkpoint: the job that wrote it."""
FIT = "slurm_fit"
"""Key of a checkpoint: the number of the fit within the program that wrote it."""
_IDENTITY = "lightning_spmd/step"
_SAY_SO = timedelta(seconds=60)
_PORTS = 15000
_distributed: Any = dist  # pyright does not know its stores
_SEE = "docs/slurm.md has scripts that work"


def job_name(environment: Mapping[str, str] = os.environ) -> str | None:
    """The job's name as ``scontrol`` shows it, unchanged after a requeue; None outside of SLURM."""
    array = environment.get("SLURM_ARRAY_JOB_ID")
    if array is not None:
        return f"{array}_{environment.get('SLURM_ARRAY_TASK_ID')}"
    return environment.get("SLURM_JOB_ID")


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "")
    return int(text) if text.isdecimal() else None


# ---------------------------------------------------------------------- tasks and devices
def check_tasks(
    cluster: ClusterEnvironment | None, devices: int, num_nodes: int, environment: Mapping[str, str] = os.environ
) -> None:
    """Check that SLURM starts one task per device.

    Raises:
        ConfigurationError: it does not. The message names the option of ``sbatch`` or of the Trainer to change.
    """
    if isinstance(cluster, LightningEnvironment):
        _check_name(environment)
    if not isinstance(cluster, SLURMEnvironment):
        return
    tasks, wanted = _number(environment, "SLURM_NTASKS") or 1, devices * num_nodes
    asked = f"Trainer(devices={devices}, num_nodes={num_nodes})"
    nodes, on_node = _number(environment, "SLURM_NNODES"), _number(environment, "SLURM_NTASKS_PER_NODE")
    options = f"--nodes={num_nodes} --ntasks-per-node={devices}"
    if environment.get("SLURM_JOB_NAME") in ("bash", "interactive"):
        return
    if tasks > 1 and "SLURM_STEP_ID" not in environment:
        raise ConfigurationError(
            f"job {job_name(environment)} has {tasks} tasks, but this program was started without srun, so it is the "
            f"only one and would wait for the others for ever: write `srun` in front of it in the script. {_SEE}"
        )
    if tasks != wanted or nodes not in (None, num_nodes) or on_node not in (None, devices):
        given = f"{tasks} task{'s' * (tasks > 1)}"
        given += "" if nodes is None else f" on {nodes} node{'s' * (nodes > 1)}"
        fits = nodes is not None and tasks % nodes == 0
        other = f"Trainer(devices={tasks // nodes}, num_nodes={nodes})" if fits and nodes is not None else None
        raise ConfigurationError(
            f"SLURM starts {given}, and {asked} needs {wanted}, one for each device: give `#SBATCH {options}`"
            + ("" if other in (None, asked) else f", or {other}")
            + f". {_SEE}"
        )


def _check_name(environment: Mapping[str, str]) -> None:
    name, tasks = environment.get("SLURM_JOB_NAME"), _number(environment, "SLURM_STEP_NUM_TASKS") or 1
    if name in ("bash", "interactive") and tasks > 1 and "SLURM_PROCID" in environment:
        raise ConfigurationError(
            f"srun started {tasks} tasks of a job with the name {name!r}, which Lightning takes for an interactive "
            "shell: each task would run as the only one. Give the job another name: "
            f"`srun --job-name=train ...`. {_SEE}"
        )


class SlurmLauncher(Launcher):
    """The launcher under SLURM, which starts no processes. It knows whether Lightning chose the checkpoint of a fit.

    Attributes:
        chooses_checkpoint: the user named no checkpoint, so Lightning takes that of a requeued job.
        fits: how many times this process has begun to train.
    """

    chooses_checkpoint = False
    fits = 0

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        given = inspect.signature(function).bind(*args, **kwargs).arguments
        self.chooses_checkpoint = given.get("ckpt_path") is None
        if private.is_fit(function):
            SlurmLauncher.fits += 1
            return super().launch(function, *args, trainer=trainer, **kwargs)
        # Lightning would evaluate a checkpoint from the middle of the training that has just ended
        with private.no_requeued_checkpoint() if self.chooses_checkpoint else contextlib.nullcontext():
            return super().launch(function, *args, trainer=trainer, **kwargs)


def check_own_checkpoint(path: Any, entry: Mapping[str, Any] | None, environment: Mapping[str, str]) -> None:
    """Check that a checkpoint which the user did not name was written by this job before it was requeued.

    Raises:
        ConfigurationError: it is another job's.
    """
    if not Path(path).name.startswith("hpc_ckpt_"):
        return
    wrote, this = (entry or {}).get(JOB), job_name(environment)
    fit = (entry or {}).get(FIT)
    if wrote == this and fit not in (None, SlurmLauncher.fits):
        raise ConfigurationError(
            f"{path} was written in fit number {fit} of this program, and this is number {SlurmLauncher.fits}: "
            "Lightning would let each go on from there. Give each Trainer a default_root_dir of its own"
        )
    if wrote == this or (wrote is None and (_number(environment, "SLURM_RESTART_COUNT") or 0) > 0):
        return
    raise ConfigurationError(
        f"{path} was left by {'another run' if wrote is None else f'job {wrote}'}, and Lightning would let this job, "
        f"{this}, go on from there because it lies in default_root_dir. To go on from it, say so: ckpt_path='hpc' "
        "(--ckpt_path hpc). To begin anew, delete it, or give each job a folder: default_root_dir="
        "'runs/$SLURM_JOB_ID'"
    )


# ---------------------------------------------------------------------- where ranks find each other
def step_name(environment: Mapping[str, str] = os.environ) -> str:
    """The name of this job step, which one ``srun`` started."""
    return f"{job_name(environment)}.{environment.get('SLURM_STEP_ID', 'batch')}"


def choose_port(environment: Any = os.environ) -> None:
    """Choose a port for each job step. Lightning derives it from the job's number, which simultaneous steps share."""
    job, step = _number(environment, "SLURM_JOB_ID"), _number(environment, "SLURM_STEP_ID")
    if "MASTER_PORT" not in environment and job is not None and step:
        environment["MASTER_PORT"] = str(_PORTS + (job + 2477 * step) % 10000)


def meet(address: str, port: int, rank: int, step: str, timeout: timedelta | None) -> Any:
    """Let all ranks of a step find rank 0 before the process group is created.

    Args:
        address: of the first rank's node.
        port: of rank 0.
        rank: of this process.
        step: name of the step.
        timeout: how long to wait for the others; None: 30 minutes.

    Returns:
        what keeps the port open until somebody else has opened it too.

    Raises:
        ConfigurationError: they cannot meet there.
    """
    until = time.monotonic() + (timeout or LONGEST).total_seconds()
    _check_address(address, port)
    if rank == 0:
        try:
            store = _distributed.TCPStore(address, port, is_master=True, wait_for_workers=False, multi_tenant=True)
        except (dist.DistNetworkError, RuntimeError) as error:
            raise ConfigurationError(
                f"rank 0 of step {step} cannot open port {port} ({str(error).splitlines()[0]}): another step of this "
                "job, or another job on this node, has it. Do not give steps that run at once the same MASTER_PORT: "
                "leave it out, or export a different one in front of each srun"
            ) from error
        store.set(_IDENTITY, step)
        return store
    said = False
    while True:
        patience = min(_SAY_SO.total_seconds(), until - time.monotonic())
        try:
            patient = timedelta(seconds=max(patience, 1))
            store = connected(address, port, patient)
            found = store.get(_IDENTITY).decode()
            break
        except (dist.DistNetworkError, dist.DistStoreError, RuntimeError) as error:
            trouble = f"rank {rank} of step {step} does not find rank 0 at {address}:{port}"
            advice = "is that the node of rank 0, is the port open between nodes, does rank 0 still start?"
            if time.monotonic() >= until:
                raise ConfigurationError(f"{trouble}; {advice} ({str(error).splitlines()[0]})") from error
            if not said:
                warn(f"{trouble} since {patience:.0f} s; {advice}", everywhere=True)
            said = True
            time.sleep(0.2)
    if found != step:
        raise ConfigurationError(
            f"rank {rank} of step {step} finds step {found} at {address}:{port}: both have the same MASTER_PORT. Leave "
            "it out, or export a different one in front of each srun"
        )
    return store


def _check_address(address: str, port: int) -> None:
    for again in (1.0, 3.0, None):  # name servers are busy when many ranks start
        try:
            socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
            return
        except socket.gaierror as error:
            if again is None:
                raise ConfigurationError(
                    f"this node ({socket.gethostname()}) does not know the address {address!r} of the first rank: "
                    "MASTER_ADDR, or else the first node of the job. Export MASTER_ADDR, a name or an IP address of "
                    f"the first node that all nodes know, in front of srun ({error}). {_SEE}"
                ) from error
            time.sleep(again)
