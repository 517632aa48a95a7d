"""Processes that others start, by torchrun or by hand with environment variables, equal one device."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.slurm.conftest import PATIENCE, SCRIPT, events, lines_of, uninterrupted, weights_of

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("launchers")]

PLAIN = ("--in-order", "--flags", '{"use_distributed_sampler": false}')
_SCHEDULERS = ("SLURM_", "MASTER_", "TORCHELASTIC_")


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def _start(*command: str, **variables: str) -> subprocess.Popen[bytes]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_SCHEDULERS)}
    return subprocess.Popen(command, env={**kept, **variables})


def _by_torchrun(folder: Path, strategy: str) -> list[subprocess.Popen[bytes]]:
    given = [str(SCRIPT), str(folder), "--devices=2", f"--strategy={strategy}", *PLAIN]
    launcher = f"-m torch.distributed.run --nproc-per-node 2 --master-port {_free_port()}"
    return [_start(sys.executable, *shlex.split(launcher), *given)]


def _by_hand(folder: Path, strategy: str) -> list[subprocess.Popen[bytes]]:
    """As if each were on a node of its own."""
    given = [str(SCRIPT), str(folder), "--devices=1", "--nodes=2", f"--strategy={strategy}", *PLAIN]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    return [_start(sys.executable, *given, **common, NODE_RANK=str(rank)) for rank in range(2)]


def _by_trainer(folder: Path, strategy: str) -> list[subprocess.Popen[bytes]]:
    """The Trainer starts the second process itself."""
    return [_start(sys.executable, str(SCRIPT), str(folder), "--devices=2", f"--strategy={strategy}", *PLAIN)]


@pytest.mark.parametrize("strategy", ["spmd", "spmd_zero3"])
@pytest.mark.parametrize("start", [_by_torchrun, _by_hand, _by_trainer])
def test_equal_one_device(
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    start: Callable[..., list[subprocess.Popen[bytes]]],
    strategy: str,
) -> None:
    processes = start(tmp_path / "run", strategy)
    try:
        assert [process.wait(PATIENCE) for process in processes] == [0] * len(processes)
    finally:
        for process in processes:
            process.kill()
    alone = uninterrupted(tmp_path_factory.getbasetemp() / "launchers alone", *PLAIN)
    expected = [line["loss"] for line in events(lines_of(alone)) if "loss" in line]
    for rank in range(2):
        found = [line["loss"] for line in events(lines_of(tmp_path / "run", rank)) if "loss" in line]
        assert list(map(float.fromhex, found)) == pytest.approx(list(map(float.fromhex, expected)), rel=1e-5)
    reference = weights_of(alone)
    for name, tensor in weights_of(tmp_path / "run").items():
        torch.testing.assert_close(tensor, reference[name], rtol=1e-5, atol=1e-5)
