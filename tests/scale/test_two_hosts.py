"""What ``two_hosts.sh`` refuses, and that both of its hosts train what one device does on the batches of both.

The network itself needs root; ``bench_two_hosts.py`` says how to run it. Here the two hosts are two processes.
"""

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.ranks import RankPool, free_port
from tests.scale import bench_two_hosts

SCRIPT = Path(__file__).with_name("two_hosts.sh")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [((), "COMMAND"), (("-n", "two", "--", "true"), "-n two"), (("-x", "--", "true"), "COMMAND")],
)
def test_wrong_arguments_are_answered_with_the_usage(arguments: tuple[str, ...], named: str) -> None:
    done = subprocess.run(["bash", str(SCRIPT), *arguments], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode in (1, 2)
    assert named in done.stderr


def test_a_missing_tool_is_named(tmp_path: Path) -> None:
    bash = Path("/bin/bash") if Path("/bin/bash").exists() else Path("/usr/bin/bash")
    done = subprocess.run(
        [str(bash), str(SCRIPT), "--", "true"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        env={"PATH": str(tmp_path)},
    )
    assert done.returncode == 1
    assert "install iproute2" in done.stderr


def _host(file: str, port: int) -> str:
    """In a process of its own, as ``two_hosts.sh`` starts it; gives what it printed."""
    rank = os.environ["RANK"]
    for name in ("RANK", "WORLD_SIZE", "GROUP_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    os.environ.update(NNODES="2", NODE_RANK=rank, LOCAL_RANK="0", MASTER_PORT=str(port))
    sys.argv = ["bench_two_hosts", "simulated", "--against", "ddp:4,alone", "--output", file]
    sys.argv += ["--steps", "3", "--warmup", "3", "--rounds", "1"]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        bench_two_hosts.main()
    return out.getvalue()


def test_two_hosts_measure_the_simulated_accelerator(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    hosts = RankPool(2)
    try:
        outputs = hosts.run(_host, str(file), free_port())
    finally:
        hosts.close()
    sides = {side["name"]: side for side in json.loads(file.read_text())["sides"]}
    assert list(sides) == ["ddp:4", "alone", "spmd"]
    assert all("reason" not in side for side in sides.values()), sides
    # 16 layers of 3.2 and 6.4 ms: nobody may skip the work, and the graph must not repeat it
    assert all(side["median_seconds"] > 0.153 for side in sides.values())
    assert sides["spmd"]["loss_difference"] < 1e-6
    assert "of the best DDP (ddp:4)" in outputs[0]
    assert outputs[1] == ""
