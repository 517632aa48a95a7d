"""Runs parts in processes of their own, each with a time limit, within a budget for all of them together.

A part that crashes, hangs or runs out of memory costs itself alone. What it had written until then is kept.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.gpu.parts import Part

ROOT = Path(__file__).parents[2]
SECONDS = "LIGHTNING_SPMD_GPU_SECONDS"
"""Environment variable of a part: the seconds after which it is killed."""
LAST_LINES = 12
"""Of a failing part's output that go into the report."""

PASSED, FAILED, NOT_RUN = "passed", "FAILED", "not run"


@dataclass
class Outcome:
    """What came of a part.

    Args:
        part: which.
        status: ``"passed"``, ``"FAILED"`` or ``"not run"``.
        reason: why not passed.
        exit_code: of its process; negative: the signal that ended it. None if it was not begun.
        seconds: that it took.
        data: what it wrote.
    """

    part: Part
    status: str
    reason: str = ""
    exit_code: int | None = None
    seconds: float = 0.0
    data: dict[str, Any] = field(default_factory=dict)


Command = Callable[[Part, Path], list[str]]
"""(part, file for its result) → what to start."""


def child_command(arguments: Sequence[str]) -> Command:
    """Starts ``tests.gpu.child`` with these arguments."""

    def command(part: Part, result: Path) -> list[str]:
        start = [sys.executable, "-m", "tests.gpu.child", part.function, "--result", str(result)]
        return [*start, "--argument", part.argument, *arguments]

    return command


class _Running:
    """A part under way."""

    def __init__(self, part: Part, command: Command, folder: Path, limit: float) -> None:
        self.part, self.limit = part, limit
        self.result, self.log = folder / f"{part.name}.json", folder / f"{part.name}.log"
        self.result.unlink(missing_ok=True)
        self.began = time.monotonic()
        with self.log.open("w") as log:
            # a session of its own: what it starts (ranks, compilers) ends with it
            self.process = subprocess.Popen(
                command(part, self.result),
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env={**_environment(), SECONDS: str(limit)},
                start_new_session=True,
            )

    def outcome(self) -> Outcome | None:
        """What came of it; None while it runs."""
        code, seconds = self.process.poll(), time.monotonic() - self.began
        if code is None and seconds < self.limit:
            return None
        self.end()
        data: dict[str, Any] = {}
        with contextlib.suppress(FileNotFoundError, ValueError):
            data = json.loads(self.result.read_text())
        if code is None:
            status, reason = FAILED, f"no end after {self.limit:.0f} s"
        elif "not_run" in data:
            status, reason = NOT_RUN, str(data["not_run"])
        elif code == 0 and data.get("passed"):
            status, reason = PASSED, ""
        else:
            status, reason = FAILED, str(data.get("reason") or self._last_words(code))
        return Outcome(self.part, status, reason, self.process.returncode, seconds, data)

    def end(self) -> None:
        """End the process and all that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _last_words(self, code: int) -> str:
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return "\n".join([how, *lines[-LAST_LINES:]])


def _environment() -> dict[str, str]:
    """Of every part: one GPU, no network."""
    found = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).strip(":")}
    found["CUDA_VISIBLE_DEVICES"] = found.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    found.setdefault("HF_HUB_OFFLINE", "1")
    found["PYTHONFAULTHANDLER"] = "1"
    if sys.platform == "linux":  # a machine without a network may not be able to look up its own name
        found.setdefault("GLOO_SOCKET_IFNAME", "lo")
        found.setdefault("NCCL_SOCKET_IFNAME", "lo")
    return found


def run_parts(
    parts: Sequence[Part],
    command: Command,
    folder: Path,
    seconds: float,
    jobs: int,
    on_outcome: Callable[[Outcome], None] = lambda _outcome: None,
) -> list[Outcome]:
    """Run parts in order.

    Args:
        parts: which.
        command: what to start for a part.
        folder: for results and output.
        seconds: of all together. What no longer fits is not run, and says so.
        jobs: how many correctness parts run side by side.
        on_outcome: told of each part as it ends.

    Returns:
        one outcome a part, in their order.
    """
    deadline = time.monotonic() + seconds
    found: dict[str, Outcome] = {}
    running: list[_Running] = []

    def collect(at_most: int) -> None:
        while len(running) > at_most:
            for one in list(running):
                outcome = one.outcome()
                if outcome is not None:
                    running.remove(one)
                    found[one.part.name] = outcome
                    on_outcome(outcome)
            time.sleep(0.05)

    try:
        for part in parts:
            beside = part.kind == "correctness" and all(one.part.kind == "correctness" for one in running)
            collect(jobs - 1 if beside else 0)
            left = deadline - time.monotonic()
            if left < part.least:
                found[part.name] = Outcome(
                    part, NOT_RUN, f"{max(left, 0):.0f} s of the time are left, not {part.least:.0f}"
                )
                on_outcome(found[part.name])
                continue
            running.append(_Running(part, command, folder, min(part.limit, left)))
        collect(0)
    finally:
        for one in running:
            one.end()
    return [found[part.name] for part in parts]
