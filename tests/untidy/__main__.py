"""``python -m tests.untidy``: train every case eagerly and as graphs, print what differs.

With ``--devices 2`` two ranks are compared with one device. Fails if a case differs.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import re
import sys
import time

import torch

from tests.helpers.ranks import RankPool
from tests.untidy.cases import CASES
from tests.untidy.running import NEAR, Outcome, differences, disagreements, run_case, run_on_ranks
from tests.untidy.untidy import STEPS


def main() -> int:
    """Make the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.untidy", description=__doc__)
    parser.add_argument("--only", default="", metavar="NAME", help="cases in whose name this is found, a pattern")
    parser.add_argument("--devices", type=int, default=1, help="ranks that are compared with one device")
    parser.add_argument("--eager", action="store_true", help="compare two eager runs: is the reference a reference?")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("lightning_spmd").setLevel(logging.ERROR)
    names = [name for name in CASES if re.search(options.only, name)]
    pool = RankPool(options.devices) if options.devices > 1 else None
    good = 0
    print(f"{'case':22} {'outcome':9} {'steps':11} {'runs':>4} {'seconds':>8}")
    with contextlib.closing(pool) if pool is not None else contextlib.nullcontext():
        for name in names:
            begun = time.perf_counter()
            try:
                ours, found = _compared(name, pool, "auto" if options.eager else "spmd")
                how, runs = ours.how, ours.runs
            except Exception as error:
                how, runs, found = "-", 0, [f"{type(error).__name__}: {(str(error).strip() or '-').splitlines()[-1]}"]
            same = ("bitwise" if pool is None else "near") if not found else "DIFFERS"
            good += not found
            seconds = time.perf_counter() - begun
            print(f"{name:22} {same:9} {how:11} {runs:4} {seconds:8.1f}  {'; '.join(found)[:400]}", flush=True)
    print(f"{good} of {len(names)} as eager; training_step is to run {STEPS} times")
    return int(good < len(names))


def _compared(name: str, pool: RankPool | None, strategy: str) -> tuple[Outcome, list[str]]:
    theirs = run_case(name, "auto")
    if pool is None:
        ours = run_case(name, strategy)
        return ours, differences(ours, theirs)
    outcomes = run_on_ranks(name, pool)
    alike = [] if CASES[name].draws else differences(outcomes[0], theirs, NEAR)
    return outcomes[0], [*alike, *disagreements(outcomes)]


if __name__ == "__main__":
    sys.exit(main())
