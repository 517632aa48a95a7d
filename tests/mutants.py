"""Faults that the tests must notice, planted one at a time: ``python -m tests.mutants``.

Each is a small change of the source that makes training wrong, or takes away what would tell. Every fault is written
into a copy of the package in a temporary folder, where all tests but the long ones run until one fails: those first
that are likely to notice, then the rest. What noticed goes to standard output.

    python -m tests.mutants                       # all of them
    python -m tests.mutants bucket vote           # those whose names contain one of these words
    python -m tests.mutants --likely              # only the tests that are likely to notice: minutes instead of hours

``tests/test_mutants.py`` checks that every fault still fits the source.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.faults.in_following import IN_FOLLOWING
from tests.faults.in_graphs import IN_GRAPHS
from tests.faults.in_runs import IN_RUNS
from tests.faults.mutant import Mutant

ROOT = Path(__file__).parent.parent
PACKAGE = "lightning_spmd"
MUTANTS: tuple[Mutant, ...] = (*IN_FOLLOWING, *IN_GRAPHS, *IN_RUNS)


@dataclass(frozen=True)
class Notice:
    """What became of a fault.

    Args:
        mutant: the fault.
        test: the first test that failed; None if all passed.
        seconds: until then.
    """

    mutant: Mutant
    test: str | None
    seconds: float

    def row(self) -> str:
        """A line of the table."""
        test = "**nobody**" if self.test is None else f"`{self.test.removeprefix('tests/')}`"
        return f"| {self.mutant.stage} | {self.mutant.name} | {test} |"


def plant(mutant: Mutant, folder: Path) -> None:
    """Copy package and tests into a folder, with the fault."""
    for name in (PACKAGE, "tests", "docs", "recipes", ".ci"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    file = folder / PACKAGE / mutant.file
    file.write_text(mutant.applied(file.read_text()))


def first_failure(folder: Path, selection: Sequence[str], *options: str) -> str | None:
    """Run tests until one fails; gives its id."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "not long",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:warnings",
        *options,
    ]
    done = subprocess.run(
        [*command, *selection], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if found is not None:
        return found[1].partition("[")[0]
    if done.returncode not in (0, 5):
        return f"(pytest ended with {done.returncode})"
    return None


def hunt(mutant: Mutant, *, rest: bool) -> Notice:
    """Plant a fault and look for a test that notices."""
    started = time.monotonic()
    # the list of faults and the rules about the source would notice any fault
    blind = ("--ignore=tests/test_mutants.py", "--ignore=tests/architecture")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plant(mutant, folder)
        test = None
        for likely in mutant.likely:
            path, _, function = likely.partition("::")
            only = ("-k", function.replace("[", " and ")) if function else ()
            test = first_failure(folder, [path], *only, *blind)
            if test is not None:
                break
        if test is None and rest:
            test = first_failure(folder, ["tests"], "-n", "2", "--dist", "loadgroup", *blind)
    return Notice(mutant, test, time.monotonic() - started)


def main() -> int:
    """Plant the faults and say what noticed them; 1 if one was not noticed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("words", nargs="*", help="only faults whose names contain one of these")
    parser.add_argument("--likely", action="store_true", help="run only the tests that are likely to notice")
    arguments = parser.parse_args()
    chosen = [m for m in MUTANTS if not arguments.words or any(word in m.name for word in arguments.words)]
    notices = []
    for mutant in chosen:
        notices.append(hunt(mutant, rest=not arguments.likely))
        sys.stdout.write(f"{notices[-1].row()} {notices[-1].seconds:.0f} s\n")
        sys.stdout.flush()
    unnoticed = [notice for notice in notices if notice.test is None]
    sys.stdout.write(f"{len(notices) - len(unnoticed)} of {len(notices)} faults were noticed\n")
    return 1 if unnoticed else 0


if __name__ == "__main__":
    sys.exit(main())
