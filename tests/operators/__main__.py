"""``python -m tests.operators``: check every operator, print the table, fail if one is wrong, crashes or is slow."""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from pathlib import Path

from tests.operators.check import CRASHED, SECONDS, SLOW, WRONG
from tests.operators.sweep import SIDES, run_task, sweep, tasks
from tests.operators.table import table


def main() -> int:
    """Run the sweep."""
    parser = argparse.ArgumentParser(prog="python -m tests.operators", description=__doc__)
    parser.add_argument("--only", default=".*", metavar="REGEX", help="operators whose whole name matches")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES, help="what is split")
    parser.add_argument("--samples", type=int, default=4, help="samples an operator; 0: all")
    parser.add_argument("--every", action="store_true", help="every way of splitting every sample")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--here", action="store_true", help="in this process")
    parser.add_argument("--log", type=Path, metavar="FILE", help="write every result into this file")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the table into this file")
    options = parser.parse_args()
    todo = tasks(options.only, options.sides, options.samples or None, every=options.every)
    results, bad = [], 0
    found = (r for task in todo for r in run_task(task)) if options.here else sweep(todo, options.processes)
    with open(options.log or os.devnull, "w") as log:
        for result in found:
            results.append(result)
            print(result, file=log, flush=True)
            if result.outcome.kind in (WRONG, CRASHED, SLOW):
                bad += 1
                print(result, flush=True)
    text = table(results, {t.operator for t in todo}, options.samples or None, SECONDS)
    if options.write is None:
        print(text)
    else:
        options.write.write_text(text)
    print(f"{len(results)} checks:", dict(Counter(r.outcome.kind for r in results)), file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
