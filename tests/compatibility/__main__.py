"""``python -m tests.compatibility``: train every model of the table on one process and on two, print what came of it.

Fails if one is not what was promised. Models of packages that are not installed are left out, and named.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import torch

from tests.compatibility.all_rows import all_rows
from tests.compatibility.result import keep, read
from tests.compatibility.running import results
from tests.compatibility.table import line, page, read_lines, write_lines
from tests.helpers.ranks import RankPool


def main() -> int:
    """Make the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.compatibility", description=__doc__)
    parser.add_argument(
        "--only",
        default="",
        metavar="REGEX",
        help="models in whose name this is found; the others stay as they were measured",
    )
    parser.add_argument(
        "--results",
        type=Path,
        metavar="FILE",
        help="keep what was measured here; models that are there already are "
        "not trained again, and packages may be installed in different environments",
    )
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the page, and what it is made of")
    options = parser.parse_args()
    torch.set_num_threads(1)
    asked = [row for row in all_rows() if re.search(options.only, row.name)]
    missing = sorted({row.needs for row in asked if not row.can_be_made})
    known = read(options.results) if options.results is not None and options.results.exists() else {}
    pool = RankPool(2)
    try:
        for result in results([row for row in asked if row.can_be_made and row.name not in known], pool):
            known[result.row.name] = result
            print(f"{result.row.name}: {'; '.join(result.faults()) or 'ok'}", file=sys.stderr, flush=True)
            if options.results is not None:
                keep(options.results, result)
    finally:
        pool.close()
    found = [known[row.name] for row in all_rows() if row.name in known]
    bad = any(result.faults() for result in found)
    measured = {result.row.name: line(result) for result in found}
    if options.write is None:
        print(page(list(measured.values())))
    else:
        lines = (read_lines() if options.only else {}) | measured
        write_lines(lines)
        options.write.write_text(page(list(lines.values())))
    if missing:
        print(f"not installed: {', '.join(missing)}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
