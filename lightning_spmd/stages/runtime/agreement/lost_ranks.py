"""The other processes of a run: which of them is gone, and the notes that failed ones left.

When a process ends, its peers' collectives fail with a line about a socket. Who it was is known elsewhere: a rank that
raises leaves a note in the store through which the process groups met, and of a process on this machine the kernel
knows whether it runs.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import re
import signal
import socket
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

from lightning_spmd.errors import RankLostError, SPMDError, own_line
from lightning_spmd.stages.runtime.agreement.whereabouts import Whereabouts

# Processes that end leave their notes and their sockets at about the same time, in any order.
PATIENCE = 5.0
_WAITED = re.compile(r"Timed out waiting (\d+)ms")
GO_ON = (
    "Once its cause is mended, trainer.fit(..., ckpt_path='last') goes on from the last checkpoint, where a "
    "ModelCheckpoint has save_last=True and a dirpath=, else ckpt_path='FOLDER/NAME.ckpt'."
)
_SOCKETS = re.compile(
    r"gloo|nccl|connection (closed|reset|refused|was)|broken pipe|socket|timed out waiting|operation timed out", re.I
)


@dataclass(frozen=True)
class Process:
    """A rank's process.

    Args:
        machine: its host's name and its namespace of processes.
        pid: its number there.
    """

    machine: str
    pid: int

    @classmethod
    def this(cls) -> Process:
        """The process that asks."""
        with contextlib.suppress(OSError):
            return cls(f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}", os.getpid())
        return cls(socket.gethostname(), os.getpid())

    @property
    def host(self) -> str:
        """Its machine, for messages."""
        return self.machine.partition(" ")[0]

    def ended(self) -> str | None:
        """How it ended, if it did; None as long as it runs, or runs on another machine."""
        if self.machine != Process.this().machine:
            return None
        with contextlib.suppress(ChildProcessError, AttributeError):  # no child of ours; macOS
            found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is not None:
                return _how(found.si_code, found.si_status)
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return "has ended"
        except OSError:
            return None
        with contextlib.suppress(OSError):  # macOS has no /proc
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
            return "has ended" if state in "ZX" else None
        return None


def _how(code: int, status: int) -> str:
    if code == os.CLD_EXITED:
        return f"has ended with code {status}"
    name = signal.Signals(status).name if status in set(signal.Signals) else str(status)
    hint = ", as the kernel does when memory runs out" if name == "SIGKILL" else ""
    return f"was ended by signal {name}{hint}"


class Peers:
    """What one rank knows about the others.

    Args:
        store: a key-value store that all ranks reach, as ``torch.distributed`` makes one.
        run: number of the run; notes of other runs are ignored.
        rank: this rank.
        processes: of all ranks.
    """

    def __init__(self, store: Any, run: int, rank: int, processes: Sequence[Process]) -> None:
        self._store = store
        self._run = run
        self._rank = rank
        self._processes = processes
        self._noted = False

    def note(self, error: BaseException) -> None:
        """Tell the others that this rank fails, and why. The end of another rank is not reported again."""
        if not self._noted:
            self._noted = True
            lost = isinstance(error, RankLostError) or is_communication_failure(error)
            self._set("lost" if lost else "failed", _summary(error) + _raised_at(error))

    def wait_at(self, place: str) -> None:
        """Tell the others where this rank has been waiting; an empty place: it does no longer."""
        self._set("waits", place)

    def stay_at(self, here: Whereabouts | None) -> None:
        """Tell the others where this rank has been for a while; None: it is there no more."""
        self._set("stays", "" if here is None else here.as_text())

    def news(self) -> str | None:
        """What is known of failed or lost ranks; None if nothing is."""
        for rank in self._others():
            if (text := self._get("failed", rank)) is not None:
                return f"rank {rank} failed with {text}"
        for rank in self._others():
            process = self._processes[rank]
            if self._get("lost", rank) is None and (how := process.ended()) is not None:
                return f"rank {rank} is gone: its process {process.pid} {how}"
        return None

    def waiting(self) -> dict[int, str]:
        """Ranks that have been waiting, and where."""
        return {rank: text for rank in self._others() if (text := self._get("waits", rank))}

    def staying(self) -> dict[int, Whereabouts]:
        """Ranks that have been somewhere for a while without waiting for an exchange, and where."""
        waiting = self.waiting()
        texts = {rank: self._get("stays", rank) for rank in self._others() if rank not in waiting}
        return {rank: Whereabouts.from_text(text) for rank, text in texts.items() if text}

    def explain(self, error: BaseException, place: str = "") -> RankLostError:
        """The error that names the rank whose end broke a collective, if it can be known.

        Args:
            error: what the collective raised.
            place: this rank's place in the run.
        """
        self._set("lost", str(error))
        deadline, known = time.monotonic() + PATIENCE, self.news()
        while known is None and time.monotonic() < deadline:
            time.sleep(0.1)
            known = self.news()
        self._noted = True
        if known is not None:
            return lost(known, f"This rank was at {place}" if place else "")
        reason = _too_slow(error) or f"torch says: {str(error).splitlines()[0]}"
        return lost(self._suspects(), f"This rank was at {place}; {reason}" if place else reason)

    def _suspects(self) -> str:
        silent = [r for r in self._others() if self._get("lost", r) is None]
        waiting = [f"rank {rank} waits at {text}" for rank, text in self.waiting().items()]
        named = ", ".join(map(self._name, silent))
        staying = [f"{self._name(rank)} has been {here}" for rank, here in self.staying().items()]
        unknown = f"no sign of life of {named}" if named else "the connection to another rank broke"
        parts = [*staying, *waiting] if staying else [unknown, *waiting]
        return "; ".join(parts)

    def _name(self, rank: int) -> str:
        process = self._processes[rank]
        return f"rank {rank} (process {process.pid} on {process.host})"

    def _others(self) -> list[int]:
        return [rank for rank in range(len(self._processes)) if rank != self._rank]

    def _key(self, kind: str, rank: int) -> str:
        return f"lightning_spmd/run {self._run}/{kind}/{rank}"

    def _set(self, kind: str, text: str) -> None:
        with contextlib.suppress(RuntimeError):  # the store lives in rank 0's process, which may be the one that ended
            self._store.set(self._key(kind, self._rank), text)

    def _get(self, kind: str, rank: int) -> str | None:
        key = self._key(kind, rank)
        try:
            return self._store.get(key).decode() if self._store.check([key]) else None
        except RuntimeError:
            return None


def _too_slow(error: BaseException) -> str | None:
    """What to do where a collective ended because its time was over."""
    found = _WAITED.search(str(error))
    if found is None:
        return None
    return (
        f"it waited {int(found[1]) / 1000:.0f} s for it, which is the timeout. A rank that may be busy for longer "
        "needs SPMDStrategy(timeout=timedelta(seconds=...))"
    )


def lost(what: str, where: str = "") -> RankLostError:
    """The error of a rank that cannot continue because another one is gone.

    Args:
        what: what is known of the other rank.
        where: this rank's place in the run.
    """
    place = f"{where}. " if where else ""
    return RankLostError(f"{what}. {place}{GO_ON}")


def is_communication_failure(error: BaseException) -> bool:
    """Whether a collective failed because of another rank or of the network.

    torch raises most such errors as plain RuntimeErrors, from C++. An error from a ``raise`` in Python is not one,
    whatever its text: a data set whose storage closed a connection, a worker's traceback through ``socket.py``.
    """
    if isinstance(error, SPMDError):
        return isinstance(error, RankLostError)
    if isinstance(error, dist.DistBackendError | dist.DistNetworkError | dist.DistStoreError):
        return True
    return isinstance(error, RuntimeError) and _SOCKETS.search(str(error)) is not None and not _raised_in_python(error)


def _innermost(error: BaseException) -> TracebackType | None:
    """Where it came up first."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace


def _raised_in_python(error: BaseException) -> bool:
    """Whether a ``raise`` statement made it; an error from C++ comes up at a call."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return False
    line = linecache.getline(frames[-1].filename, frames[-1].lineno or 0)
    return line.encode()[frames[-1].colno or 0 :].startswith(b"raise")


def _summary(error: BaseException) -> str:
    """Its first lines; of one with a DataLoader worker's traceback the first and what it ends with."""
    lines = f"{type(error).__name__}: {error}".strip().removesuffix(":").splitlines()
    return "\n".join([lines[0], lines[-1].strip()] if "Original Traceback" in str(error) else lines[:3])


def _raised_at(error: BaseException) -> str:
    """The line of the user's code that raised it, or called what did; where there is none, the line that raised it."""
    if (line := own_line(error)) is not None:
        return f" (at {line})"
    trace = _innermost(error)
    return "" if trace is None else f" (at {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno})"
