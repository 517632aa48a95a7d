"""What became of a row, and whether that is good enough."""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass
from pathlib import Path

from tests.compatibility.all_rows import all_rows
from tests.compatibility.measure import Run
from tests.compatibility.rows import STEPS, Row

TOLERANCE = 1e-5
"""Relative difference of the loss from one device, in any step."""
GRAPHS = ("compiled", "split")
"""Modes whose steps are graphs."""
_REASON = re.compile(
    r"strategy='spmd' (?:runs this training eagerly|trains eagerly from here on)(?: \([^)]*\))?: (.*?)(?: \(/[^)]*\))?$"
)
"""Without the line, which is in a folder of this machine."""
_EAGER_STEPS = re.compile(r"(\d+) steps? eager")


@dataclass(frozen=True)
class Result:
    """Three runs of a row.

    Args:
        row: of the table.
        eager: one device, with Lightning's own strategy.
        alone: one process with ours.
        ranks: each of several processes with ours.
    """

    row: Row
    eager: Run
    alone: Run
    ranks: list[Run]

    @property
    def is_bitwise(self) -> bool:
        """Whether one process gave the eager losses and weights."""
        return repr(self.alone.losses) == repr(self.eager.losses) and self.alone.weights == self.eager.weights

    @property
    def difference(self) -> float:
        """The largest one of a loss on several processes from one device, relative."""
        pairs = [pair for run in self.ranks for pair in zip(run.losses, self.eager.losses, strict=False)]
        return max((abs(a - b) / max(abs(b), 1e-12) for a, b in pairs), default=float("inf"))

    @property
    def reason(self) -> str:
        """Why it runs eagerly, in the strategy's words; empty where it does not."""
        for run in (*self.ranks, self.alone):
            for text in run.told:
                if found := _REASON.match(text):
                    return found[1]
        return ""

    @property
    def eager_steps(self) -> int:
        """The largest number of steps of a run that were no graphs."""
        told = [text for run in (self.alone, self.ranks[0]) for text in run.told]
        return max((int(found[1]) for text in told if (found := _EAGER_STEPS.search(text))), default=0)

    @property
    def mode(self) -> str:
        """The strategy's, which may have been ready for graphs of a rank's own batches that none came to."""
        return "eager" if self.eager_steps == STEPS else self.ranks[0].mode

    @property
    def error(self) -> str:
        """What ended one of the runs."""
        return next((run.error for run in (self.eager, self.alone, *self.ranks) if run.error), "")

    def faults(self) -> list[str]:
        """Why this is not what was promised; nothing if it is."""
        found = [self.error] if self.error else []
        runs = (self.eager, self.alone, *self.ranks)
        if not self.error and any(len(run.losses) != STEPS for run in runs):
            found.append(f"{[len(run.losses) for run in runs]} steps")
        if not self.is_bitwise:
            found.append("one process is not bitwise eager")
        compiled = all(run.mode in GRAPHS for run in self.ranks)
        if compiled and not self.row.draws and not self.difference <= TOLERANCE:
            found.append(f"loss off by {self.difference:.1e}")
        if any(run.weights != self.ranks[0].weights for run in self.ranks):
            found.append("processes hold different weights")
        if not self.row.couples and any(run.moved for run in self.ranks):
            found.append(f"moves activations: {self.ranks[0].moved}")
        if not compiled and not self.row.eager:
            found.append(f"runs eagerly: {self.reason}")
        elif self.eager_steps and not self.row.eager:
            found.append(f"{self.eager_steps} steps are no graphs")
        return found


def keep(file: Path, result: Result) -> None:
    """Add a result to a file, a line each."""
    runs = {"eager": result.eager, "alone": result.alone}
    entry = {name: dataclasses.asdict(run) for name, run in runs.items()}
    ranks = [dataclasses.asdict(run) for run in result.ranks]
    with file.open("a") as lines:
        lines.write(json.dumps({"name": result.row.name, **entry, "ranks": ranks}) + "\n")


def read(file: Path) -> dict[str, Result]:
    """What :func:`keep` kept, by name; the last one of each."""
    rows = {row.name: row for row in all_rows()}
    found: dict[str, Result] = {}
    for line in file.read_text().splitlines():
        entry = json.loads(line)
        if (row := rows.get(entry["name"])) is not None:
            ranks = [Run(**run) for run in entry["ranks"]]
            found[row.name] = Result(row, Run(**entry["eager"]), Run(**entry["alone"]), ranks)
    return found
