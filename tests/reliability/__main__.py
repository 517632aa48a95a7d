"""``python -m tests.reliability``: every fault on real processes, so many times; the table goes into the document.

Fails if a rank hung, something saved was lost, a message did not say who and why, or a continued run ended otherwise.
"""

from __future__ import annotations

import argparse
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from tests.reliability.all_faults import FAULTS
from tests.reliability.fault import played
from tests.reliability.ranks import BecomeRank
from tests.reliability.table import Results


def main() -> Callable[[], None] | int:
    """Make the table; in a forked rank: what is to be done there."""
    parser = argparse.ArgumentParser(prog="python -m tests.reliability", description=__doc__)
    parser.add_argument("--runs", type=int, default=10, metavar="N", help="runs of each fault (10)")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="number of the first run (0)")
    parser.add_argument("--only", default="", metavar="REGEX", help="faults in whose name this is found")
    parser.add_argument("--results", type=Path, metavar="FILE", help="add what was measured to this file, run by run")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the table into this document")
    parser.add_argument("--show", action="store_true", help="print the outputs of runs that were not as they should be")
    options = parser.parse_args()
    torch.set_num_threads(1)
    # a shell's background jobs ignore it, and so would the ranks
    signal.signal(signal.SIGINT, signal.default_int_handler)
    results = Results(options.results)
    chosen = [fault for fault in FAULTS if re.search(options.only, fault.name)]
    try:
        for index in range(options.first, options.first + options.runs):
            for fault in chosen:
                if results.has(fault.name, index):
                    continue
                account = played(fault, index)
                results.add(fault.name, index, account)
                print(
                    f"{fault.name} {index}: {'; '.join(account.problems) or 'ok'} ({account.seconds:.1f} s)", flush=True
                )
                if options.show and account.problems:
                    print("\n".join(account.outputs), flush=True)
    except BecomeRank as rank:
        return rank.job
    if options.write is not None:
        results.write(options.write, FAULTS)
    return 1 if results.problems([fault.name for fault in chosen]) else 0


if __name__ == "__main__":
    found = main()
    if isinstance(found, int):
        sys.exit(found)
    found()
