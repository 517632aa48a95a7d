"""Worker processes that stay for the whole test session, set up as ``torchrun`` sets up its own.

``Trainer(devices=N, strategy=...)`` inside a worker finds torchelastic's environment, so it starts no process and many
fits share one set of process groups. A rank that hangs fails its test with the stacks of all ranks, and nobody else's.

A rank that a signal ends is another matter: gloo crashes once in some hundred thousand collectives ("malloc():
unaligned tcache chunk detected" in ``ProcessGroupGloo::runLoop``), as seen with torch 2.13 alone, two processes and
nothing but ``dist.all_reduce(torch.randn(60), async_op=True).wait()`` in a loop. Such a run is made once more, with a
warning.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import multiprocessing
import os
import pickle
import socket
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from importlib.metadata import entry_points
from multiprocessing import connection
from pathlib import Path
from typing import Any
from unittest import mock

# Once a rank failed, the others are given this long to fail or finish too.
GRACE_SECONDS = 20.0
_END = "end of stacks\n"
FEW_THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Set before torch is imported, which takes the number of its threads from there."""
RARE_FULL_COLLECTIONS = (700, 10, 100)
"""Python's defaults but for the last: the collector goes through all objects a tenth as often, which saves 3 %."""


class RankError(AssertionError):
    """At least one rank failed or hung.

    Args:
        message: every rank's traceback or the stacks of a rank that hung.
        type_names: by rank, the name of the exception's type; ``"hung"`` or None.
    """

    def __init__(self, message: str, type_names: list[str | None]) -> None:
        super().__init__(message)
        self.type_names = type_names


class RankPool:
    """``size`` worker processes; started at the first :meth:`run`, started anew where ranks failed differently.

    Args:
        size: number of ranks.
        timeout: seconds that one :meth:`run` may take.
    """

    def __init__(self, size: int, timeout: float = 120.0) -> None:
        self.size = size
        self.timeout = timeout
        self._processes: list[Any] = []
        self._pipes: list[Any] = []
        self._bells: list[Any] = []
        self._folder = tempfile.TemporaryDirectory()

    def run(self, function: Callable[..., Any], *args: Any, timeout: float | None = None, **kwargs: Any) -> list[Any]:
        """Call ``function(*args, **kwargs)`` in every rank.

        Args:
            function: importable by name (a function at the top of a module).
            *args: picklable arguments, the same for all ranks.
            timeout: seconds, instead of the pool's.
            **kwargs: picklable arguments as well.

        Returns:
            what each rank returned, by rank.

        Raises:
            RankError: a rank raised, died or did not answer. Unless all raised the same, which leaves no rank inside a
                collective, the pool is started anew for the next call.
        """
        job = pickle.dumps((function, args, kwargs))
        seconds = self.timeout if timeout is None else timeout
        answers = self._answers(job, seconds)
        if crashed := [f"rank {r}: {c}" for r, (kind, c) in enumerate(answers) if kind == "crashed"]:
            self.close()
            warnings.warn("a signal ended a rank; once more. " + "; ".join(crashed), stacklevel=2)
            answers = self._answers(job, seconds)
        if all(kind == "value" for kind, _ in answers):
            return [value for _, value in answers]
        parts = [f"rank {rank}: {_summary(answer)}" for rank, answer in enumerate(answers)]
        names = [None if kind == "value" else content[0] for kind, content in answers]
        if len(set(names)) > 1 or names[0] in ("died", "hung"):
            self.close()
        raise RankError("\n".join(parts), names)

    def _answers(self, job: bytes, timeout: float) -> list[Any]:
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send_bytes(job)
        return self._collect(timeout)

    def _collect(self, timeout: float) -> list[Any]:
        answers: list[Any] = [None] * self.size
        deadline = time.monotonic() + timeout
        while None in answers:
            waiting = [p for p, a in zip(self._pipes, answers, strict=True) if a is None]
            ready = connection.wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = self._pipes.index(pipe)
                try:
                    answers[rank] = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    self._processes[rank].join(5)
                    code, stacks = self._processes[rank].exitcode, self._stack_file(rank).read_text()
                    signalled = code is not None and code < 0
                    answer = ("died", f"the process ended with code {code}\n{stacks}")
                    answers[rank] = ("crashed" if signalled else "error", answer)
                if answers[rank][0] != "value":
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        hung = [rank for rank, answer in enumerate(answers) if answer is None]
        stacks = self._stacks(hung)
        for rank in hung:
            answers[rank] = ("error", ("hung", f"no answer in time; it was in\n{stacks[rank]}"))
        return answers

    def _stacks(self, ranks: list[int]) -> dict[int, str]:
        for rank in ranks:
            self._bells[rank].send_bytes(b"stacks")
        deadline = time.monotonic() + 5.0
        while not all(_END in self._stack_file(rank).read_text() for rank in ranks) and time.monotonic() < deadline:
            time.sleep(0.2)
        return {rank: self._stack_file(rank).read_text().replace(_END, "") for rank in ranks}

    def _stack_file(self, rank: int) -> Path:
        return Path(self._folder.name) / f"stacks_{rank}"

    def _start(self) -> None:
        # workers are forked from a process that has imported what they need, which takes each of them 4 s otherwise
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.helpers.training"])
        port = free_port()
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            button, bell = context.Pipe()
            self._stack_file(rank).write_text("")
            told = (environment(rank, self.size, port), theirs, bell, str(self._stack_file(rank)))
            process = context.Process(target=_serve, args=told, daemon=True)
            with mock.patch.dict(os.environ, FEW_THREADS):
                process.start()
            theirs.close()
            bell.close()
            self._processes.append(process)
            self._pipes.append(ours)
            self._bells.append(button)

    def close(self) -> None:
        """End the workers."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in (*self._pipes, *self._bells):
            pipe.close()
        self._processes, self._pipes, self._bells = [], [], []


def environment(rank: int, size: int, port: int) -> dict[str, str]:
    """What torchrun sets for one of ``size`` processes on this machine."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "tests",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        **FEW_THREADS,
    }


def read_entry_points_once() -> None:
    """Let Trainers of this process share what the first one read: of each installed package, a file."""
    from lightning.fabric.utilities import registry

    if registry.entry_points is entry_points:
        registry.entry_points = functools.cache(entry_points)


def free_port() -> int:
    """A TCP port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _summary(answer: tuple[str, Any]) -> str:
    kind, content = answer
    return "finished" if kind == "value" else f"{content[0]}: {content[1]}"


def _tell_stacks(bell: Any, stacks: Any) -> None:
    """Write the stacks of all threads when asked. Not at a signal: every Trainer puts signals back to their default."""
    while True:
        try:
            bell.recv_bytes()
        except EOFError:
            return
        faulthandler.dump_traceback(file=stacks, all_threads=True)
        print(_END, end="", file=stacks, flush=True)


def _collectives_begun() -> int:
    """Functional collectives that nobody has waited for; c10d keeps them, their tensors and process groups."""
    from torch._C import _distributed_c10d

    return _distributed_c10d._get_work_registry_size()


def _serve(settings: dict[str, str], pipe: Any, bell: Any, stack_file: str) -> None:
    """A worker's life: take a job, answer, until the parent goes."""
    os.environ.update(settings)
    with open(stack_file, "w") as stacks:
        threading.Thread(target=_tell_stacks, args=(bell, stacks), daemon=True).start()
        faulthandler.enable(file=stacks, all_threads=True)
        import torch  # not above: the parent needs none

        torch.set_num_threads(1)
        read_entry_points_once()
        gc.freeze()  # what was imported stays
        gc.set_threshold(*RARE_FULL_COLLECTIONS)
        while True:
            try:
                job = pipe.recv_bytes()
            except EOFError:
                return
            try:
                function, args, kwargs = pickle.loads(job)
                begun = _collectives_begun()
                answer = pickle.dumps(("value", function(*args, **kwargs)))
                if (left := _collectives_begun() - begun) > 0:
                    raise AssertionError(f"nobody waited for {left} functional collectives: they stay for ever")
            except BaseException as error:
                answer = pickle.dumps(("error", (type(error).__name__, traceback.format_exc())))
            pipe.send_bytes(answer)
