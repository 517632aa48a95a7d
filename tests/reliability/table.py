"""Results, run by run, and the table of ``docs/reliability.md``."""

from __future__ import annotations

import json
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from tests.reliability.fault import Account, Fault

_HANGS, _LATE = ("hung",), ("s to end",)
_LOSSES = ("lost", "does not load", "continued run", "ended with another", "was not written")
BEGIN, END = "<!-- faults -->", "<!-- end of faults -->"


@dataclass(frozen=True)
class Entry:
    """One run."""

    fault: str
    index: int
    seconds: float
    codes: tuple[int | None, ...]
    said: str
    problems: tuple[str, ...]

    @property
    def kind(self) -> str:
        """The worst of its problems; empty where there is none."""
        for kind, words in (("hang", _HANGS), ("loss", _LOSSES)):
            if any(word in problem for problem in self.problems for word in words):
                return kind
        if not self.problems:
            return ""
        return "late" if all(word in problem for problem in self.problems for word in _LATE) else "other"


class Results:
    """What was measured.

    Args:
        file: where it is kept; None: nowhere.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._entries: list[Entry] = []
        if file is not None and file.exists():
            self._entries = [Entry(**json.loads(line)) for line in file.read_text().splitlines()]

    def has(self, fault: str, index: int) -> bool:
        """Whether a run has been made."""
        return any(e.fault == fault and e.index == index for e in self._entries)

    def add(self, fault: str, index: int, account: Account) -> None:
        """Keep a run."""
        entry = Entry(fault, index, account.seconds, account.codes, account.said, tuple(account.problems))
        self._entries.append(entry)
        if self._file is not None:
            with self._file.open("a") as file:
                file.write(json.dumps(vars(entry)) + "\n")

    def problems(self, faults: Collection[str]) -> list[str]:
        """Of all runs of some faults."""
        return [problem for e in self._entries if e.fault in faults for problem in e.problems]

    def write(self, document: Path, faults: Sequence[Fault]) -> None:
        """Put the table into a document, between its marks."""
        before, _, rest = document.read_text().partition(BEGIN)
        _, _, after = rest.partition(END)
        document.write_text(f"{before}{BEGIN}\n{self.table(faults)}\n{END}{after}")

    def table(self, faults: Sequence[Fault]) -> str:
        """The table."""
        runs = f"torch {torch.__version__.split('+')[0]}, lightning {version('lightning')}; {len(self._entries)} runs"
        lines = [
            f"Two ranks on the CPU, gloo, {runs}.",
            "",
            "| fault | what should come of it | runs | hangs | losses | late | other misses | seconds | exit codes |",
            "|---|---|---:|---:|---:|---:|---:|---:|---|",
        ]
        rows = [(fault, [e for e in self._entries if e.fault == fault.name]) for fault in faults]
        return "\n".join(lines + [_row(fault, found) for fault, found in rows if found])


def _row(fault: Fault, entries: Sequence[Entry]) -> str:
    kinds = [e.kind for e in entries]
    seconds = [e.seconds for e in entries]
    codes = sorted({" and ".join(sorted(map(str, e.codes))) for e in entries})
    cells = (
        fault.what,
        fault.result,
        len(entries),
        *(kinds.count(kind) for kind in ("hang", "loss", "late", "other")),
        f"{statistics.median(seconds):.1f}, {max(seconds):.1f}",
        "; ".join(codes),
    )
    return f"| {' | '.join(map(str, cells))} |"
