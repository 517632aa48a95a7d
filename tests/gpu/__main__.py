"""Is this package right on a GPU, and how fast is it? One command, one GPU, no network, minutes.

    python -m tests.gpu --out gpu_results                       everything, within 8 minutes
    python -m tests.gpu --parts correctness --out gpu_results   or some of it: names of parts, or of their kinds
    python -m tests.gpu --toy                                   everything at toy size on the CPU

Each part is a process of its own with a time limit; one that fails costs itself alone. Tables are printed, and
``--out`` receives ``results.json``, Chrome traces of every side of the benchmark, and what each part printed. The exit
status is 1 if a correctness part failed. It needs torch, lightning, torchmetrics and rich; what else it could use and
does not find is reported as not run.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from tests.gpu import table
from tests.gpu.parts import chosen
from tests.gpu.running import FAILED, Outcome, child_command, run_parts

TOY_MINUTES = 20.0


def gpu_name() -> str | None:
    """The first GPU's name, with its driver where that is told, or None.

    torch is asked in a process of its own, for it would keep a piece of the GPU.
    """
    by_driver = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    by_torch = [sys.executable, "-c", "import torch; print(torch.cuda.get_device_name(0))"]
    for query in (by_driver, by_torch):
        try:
            found = subprocess.run(query, check=True, capture_output=True, text=True, timeout=60).stdout.strip()
        except (OSError, subprocess.SubprocessError):
            continue
        if found:
            return found.splitlines()[0]
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; gives the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="folder for results.json, traces and logs; a temporary one by default")
    parser.add_argument("--minutes", type=float, help="for everything; what no longer fits is not run (8, or 20 --toy)")
    parser.add_argument("--parts", help="comma-separated names of parts, or 'correctness', 'benchmark'")
    parser.add_argument("--sides", help="of benchmarks: names of sides, separated by semicolons; all by default")
    parser.add_argument("--jobs", type=int, default=4, help="correctness parts side by side")
    parser.add_argument("--toy", action="store_true", help="toy sizes, on the CPU")
    options = parser.parse_args(arguments)
    try:
        parts = chosen(options.parts)
    except ValueError as error:
        parser.error(str(error))
    gpu = None if options.toy else gpu_name()
    if gpu is None and not options.toy:
        parser.error("there is no GPU here; --toy runs everything at toy size on the CPU")
    minutes = options.minutes or (TOY_MINUTES if options.toy else 8.0)
    if options.toy:  # on a busy machine compilers take minutes; only the whole has an end
        parts = [dataclasses.replace(part, limit=60 * minutes) for part in parts]
    out = options.out or Path(tempfile.mkdtemp(prefix="lightning_spmd_gpu_"))
    out.mkdir(parents=True, exist_ok=True)
    out = out.resolve()

    def tell(outcome: Outcome) -> None:
        print(f"{outcome.part.name}: {outcome.status} {outcome.seconds:.0f} s {outcome.reason}", flush=True)

    began = datetime.datetime.now(datetime.UTC)
    told = ["--traces", str(out), *(["--toy"] if options.toy else [])]
    told += ["--sides", options.sides] if options.sides else []
    outcomes = run_parts(parts, child_command(told), out, 60 * minutes, options.jobs, tell)
    table.with_shares(outcomes)
    facts = {
        "gpu": gpu,
        "toy": options.toy,
        "began": began.isoformat(timespec="seconds"),
        "seconds": (datetime.datetime.now(datetime.UTC) - began).total_seconds(),
        "python": platform.python_version(),
    }
    table.write(out / "results.json", table.document(outcomes, facts))
    table.print_all(outcomes, Console(width=180))
    print(f"{facts['seconds']:.0f} s; results, traces and logs: {out}")
    return int(any(o.status == FAILED and o.part.kind == "correctness" for o in outcomes))


if __name__ == "__main__":
    sys.exit(main())
