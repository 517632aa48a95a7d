"""The ranks of a run as processes of their own: forked from one that has imported everything, ended as scripts end.

A fresh interpreter needs many seconds to import torch and Lightning; 10 runs of each fault, each with its
continuation, would take hours. What is forked here is a process like any other: it has its own number, is waited for
by the kernel, prints its traceback, joins its threads and takes its interpreter down.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.ranks import environment, free_port


class BecomeRank(BaseException):
    """Raised in a forked process; its ``job`` is all that is left to do there."""

    def __init__(self, job: Callable[[], None]) -> None:
        super().__init__()
        self.job = job


@dataclass
class Ended:
    """How a rank's process ended.

    Args:
        rank: which.
        code: its exit status; negative: the signal that ended it; None: it had to be killed.
        output: all that it wrote.
        at: when, in seconds of ``time.time``.
    """

    rank: int
    code: int | None
    output: str
    at: float


@dataclass
class _Running:
    rank: int
    pid: int
    output: Path
    ended: Ended | None = None


class Run:
    """Ranks that were started together.

    Args:
        jobs: by rank.
        variables: environment variables of all ranks.
        port: at which they meet; None: a free one.
    """

    def __init__(
        self, jobs: list[Callable[[], None]], variables: Mapping[str, str] | None = None, port: int | None = None
    ) -> None:
        self.port = free_port() if port is None else port
        self.begun = time.time()
        self._running: list[_Running] = []
        self._group = 0
        for rank, job in enumerate(jobs):
            self._start(rank, job, {**environment(rank, len(jobs), self.port), **(variables or {})})

    def _start(self, rank: int, job: Callable[[], None], variables: Mapping[str, str]) -> None:
        handle, name = tempfile.mkstemp(prefix="rank")
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, self._group)
            os.dup2(handle, 1)
            os.dup2(handle, 2)
            faulthandler.enable()
            os.environ.update(variables)
            raise BecomeRank(job)
        os.close(handle)
        self._group = self._group or pid
        with contextlib.suppress(OSError):  # the child may have done it, or be gone
            os.setpgid(pid, self._group)
        self._running.append(_Running(rank, pid, Path(name)))

    def pid(self, rank: int) -> int:
        """The process of a rank."""
        return self._running[rank].pid

    def signal_all(self, number: signal.Signals) -> None:
        """A signal to the group of processes, as a terminal sends it."""
        os.killpg(self._group, number)

    def wait(self, seconds: float) -> list[Ended]:
        """How the processes ended; those that have not after so long say where they are, and are killed."""
        deadline = time.time() + seconds
        while any(r.ended is None for r in self._running) and time.time() < deadline:
            self._look()
            time.sleep(0.02)
        hung = [r for r in self._running if r.ended is None]
        for each in hung:
            os.kill(each.pid, signal.SIGABRT)  # faulthandler writes the stacks
        time.sleep(2.0 if hung else 0.0)
        for each in hung:
            with contextlib.suppress(OSError):
                os.kill(each.pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(each.pid, 0)
            each.ended = Ended(each.rank, None, each.output.read_text(errors="replace"), time.time())
        for each in self._running:
            each.output.unlink(missing_ok=True)
        return [each.ended for each in self._running if each.ended is not None]

    def _look(self) -> None:
        for each in self._running:
            if each.ended is not None:
                continue
            pid, status = os.waitpid(each.pid, os.WNOHANG)
            if pid:
                output = each.output.read_text(errors="replace")
                each.ended = Ended(each.rank, os.waitstatus_to_exitcode(status), output, time.time())
