"""A SLURM cluster of virtual nodes on this machine: daemons, ports and files of its own, in one folder."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGES = "slurmctld slurmd slurm-client munge"
INSTALL = f"apt-get update && apt-get install -y --no-install-recommends {PACKAGES}"
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sinfo", "sbatch", "srun", "scontrol", "scancel", "squeue")
_SBIN = "/usr/sbin:/usr/local/sbin"

_CONF = """\
ClusterName=spmd
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={root}/munge.socket,cred_expire=5
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SwitchType=switch/none
ReturnToService=2
KillWait=20
JobRequeue=1
FirstJobId={first}
SlurmctldPidFile={root}/slurmctld.pid
SlurmctldLogFile={root}/slurmctld.log
StateSaveLocation={root}/state
SlurmdPidFile={root}/slurmd.%n.pid
SlurmdLogFile={root}/slurmd.%n.log
SlurmdSpoolDir={root}/spool.%n
SlurmdParameters=config_overrides
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str | None:
    """Why no cluster can be started here; None if one can."""
    path = f"{os.environ.get('PATH', '')}:{_SBIN}"
    missing = [program for program in _PROGRAMS if shutil.which(program, path=path) is None]
    if missing:
        return f"SLURM is not installed ({', '.join(missing)} missing); on Debian, as root: {INSTALL}"
    if os.geteuid() != 0:
        return "SLURM's daemons start jobs for others: run these tests as root, in a container for instance"
    return None


ENDED = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT",
}  # fmt: skip
"""States in which a job stays; of others there are more (``SIGNALING``, for a moment, where SLURM sends a signal)."""


@dataclass(frozen=True)
class Job:
    """What SLURM says of a job."""

    number: int
    state: str
    restarts: int
    text: str


class Cluster:
    """A running cluster.

    Args:
        root: its folder.
        nodes: number of virtual nodes, ``n1``, ``n2``, ...; their names resolve to nothing.
        cpus: of each.
    """

    def __init__(self, root: Path, nodes: int = 2, cpus: int = 8) -> None:
        self.root = root
        self.names = [f"n{i + 1}" for i in range(nodes)]
        ports = _free_ports(1 + nodes)
        host = socket.gethostname()
        lines = [
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} RealMemory=4000"
            for name, port in zip(self.names, ports[1:], strict=True)
        ]
        self.conf = root / "slurm.conf"
        first = 1 + ports[0] % 9000  # ports of ranks follow from it, and there may be other clusters
        names = {"host": host, "port": ports[0], "user": getpass.getuser(), "root": root, "first": first}
        text = _CONF.format(**names, nodes="\n".join(lines))
        self.conf.write_text(text)
        for folder in ("state", *(f"spool.{name}" for name in self.names)):
            (root / folder).mkdir()
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "MASTER_"))}
        self.environment = {
            **kept,
            "PATH": f"{os.environ.get('PATH', '')}:{_SBIN}",
            "SLURM_CONF": str(self.conf),
        }

    # ------------------------------------------------------------------ daemons
    def start(self) -> None:
        """Start the daemons, and wait until all nodes are idle."""
        self.root.chmod(0o755)
        key = self.root / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        files = {"socket": "munge.socket", "key-file": "munge.key", "pid-file": "munged.pid"}
        files |= {"log-file": "munged.log", "seed-file": "munge.seed"}
        self._daemon("munged", "--force", *(f"--{name}={self.root / file}" for name, file in files.items()))
        self._daemon("slurmctld", "-f", str(self.conf))
        for name in self.names:
            self._daemon("slurmd", "-f", str(self.conf), "-N", name)
        until = time.monotonic() + 120
        while self.run("sinfo", "-h", "-N", "-o", "%T", check=False).split() != ["idle"] * len(self.names):
            if time.monotonic() > until:
                raise TimeoutError(f"the nodes do not become idle; see the logs in {self.root}")
            time.sleep(0.2)

    def _daemon(self, *command: str) -> None:
        done = subprocess.run(
            command, env=self.environment, timeout=60, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        if done.returncode != 0:
            raise RuntimeError(f"{command[0]}: {done.stderr.decode()}")

    def stop(self) -> None:
        """End all jobs and daemons."""
        with contextlib.suppress(Exception):
            self.run("scancel", "--full", "--signal=KILL", "--state=RUNNING", check=False)
            self.run("scancel", f"--user={getpass.getuser()}", check=False)
            self.wait_until_empty(30)
        files = [*self.root.glob("slurmd.*.pid"), self.root / "slurmctld.pid", self.root / "munged.pid"]
        processes = [int(file.read_text()) for file in files if file.is_file()]
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGTERM)
        until = time.monotonic() + 20
        while any(Path(f"/proc/{process}").exists() for process in processes):
            if time.monotonic() > until:
                for process in processes:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)
                break
            time.sleep(0.1)

    # ------------------------------------------------------------------ jobs
    def run(self, *command: str, check: bool = True, timeout: float = 60, **variables: str) -> str:
        """What a command of SLURM prints."""
        done = subprocess.run(
            command,
            env={**self.environment, **variables},
            timeout=timeout,
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if check and done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}: {done.stdout}")
        return done.stdout

    def submit(self, script: Path, *arguments: str, **variables: str) -> int:
        """Submit a script; the job's number."""
        return int(self.run("sbatch", "--parsable", *arguments, str(script), **variables).split(";")[0])

    def job(self, number: int) -> Job:
        """The state of a job."""
        text = self.run("scontrol", "show", "job", str(number))
        fields = dict(field.split("=", 1) for field in text.split() if "=" in field)
        return Job(number, fields["JobState"], int(fields["Restarts"]), text)

    def wait(self, number: int, timeout: float = 300) -> Job:
        """Wait until a job has ended; one that waits to be started again is started at once."""
        until = time.monotonic() + timeout
        while True:
            job = self.job(number)
            if job.state in ENDED:
                return job
            if job.state == "PENDING" and job.restarts:
                self.run("scontrol", "update", f"jobid={number}", "StartTime=now", check=False)
            if time.monotonic() > until:
                raise TimeoutError(f"job {number} has not ended after {timeout} s: {job.text}")
            time.sleep(0.3)

    def wait_until_empty(self, timeout: float) -> None:
        """Wait until there is no job any more."""
        until = time.monotonic() + timeout
        while self.run("squeue", "-h").strip() and time.monotonic() < until:
            time.sleep(0.2)

    def tell(self, number: int, name: str = "USR1") -> None:
        """Send a signal to the tasks of a job, as ``--signal=USR1@60`` does."""
        self.run("scancel", f"--signal={name}", str(number))


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@contextlib.contextmanager
def a_cluster(nodes: int = 2) -> Iterator[Cluster]:
    """A cluster that is gone in the end, whatever happens."""
    root = Path(tempfile.mkdtemp(prefix="slurm"))
    cluster = Cluster(root, nodes)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(root, ignore_errors=True)
