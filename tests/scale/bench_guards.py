"""What guards and the looks below them cost on the main job, as a share of the run; at most 1 % is wanted.

    python -m tests.scale.bench_guards [--rounds 3] [--epochs 5] [--batches 200] [--threads 1]

The main job is ``recipes/gpt_bytes.yaml`` without its loggers and callbacks, on one device and on two ranks. Two
measures: the time inside guards and looks, added up with a stopwatch, and step times of runs with and without them,
alternating. The first is exact to a few microseconds a step; the second has all side effects, and the machine's noise.
"""

from __future__ import annotations

import argparse
import functools
import logging
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
import yaml

from lightning_spmd.examples.gpt_bytes import GPTBytes
from lightning_spmd.examples.text_bytes import TextBytes
from lightning_spmd.ir.guards import Guards
from lightning_spmd.strategy import recheck
from lightning_spmd.strategy.recheck import Rechecks
from tests.helpers.ranks import RankPool

RECIPE = Path(__file__).parents[2] / "recipes" / "gpt_bytes.yaml"
WARM_UP = 15


@dataclass
class Costs:
    """Seconds of one run.

    Args:
        steps: of each step but the first ones.
        guards: inside guards, by step.
        looks: inside looks, all together.
        count: of looks.
        run: from the first step's start to the last one's end.
    """

    steps: list[float]
    guards: list[float]
    looks: float
    count: int
    run: float


class Stopwatch(L.Callback):
    """Step times, and what they contain of guards and looks."""

    __module__ = "lightning_spmd"  # its hooks leave weights alone, so iterations may overlap as they do for the recipe

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.guards: list[float] = []
        self.looks = 0.0
        self.count = 0
        self._inside = 0.0
        self._began = 0.0
        self._started: float | None = None

    def on_train_batch_start(self, *_: Any) -> None:
        self._began, self._inside = time.perf_counter(), 0.0
        self._started = self._started or self._began

    def on_train_batch_end(self, *_: Any) -> None:
        self.steps.append(time.perf_counter() - self._began)
        self.guards.append(self._inside)

    def costs(self) -> Costs:
        run = time.perf_counter() - (self._started or 0.0)
        return Costs(self.steps[WARM_UP:], self.guards[WARM_UP:], self.looks, self.count, run)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Guards and looks are timed inside."""
        failure, look = Guards.failure, Rechecks.look

        def timed_failure(guards: Guards, *args: Any) -> Any:
            began = time.perf_counter()
            answer = failure(guards, *args)
            self._inside += time.perf_counter() - began
            return answer

        def timed_look(rechecks: Rechecks, *args: Any) -> Any:
            began = time.perf_counter()
            answer = look(rechecks, *args)
            self.looks += time.perf_counter() - began
            self.count += 1
            return answer

        with replaced(Guards, "failure", timed_failure), replaced(Rechecks, "look", timed_look):
            yield


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def switched_off() -> Iterator[None]:
    """No guard is asked after a graph's second use, no step is traced again."""
    failure = Guards.failure
    asked: dict[int, int] = {}

    def never(guards: Guards, *args: Any) -> Any:
        asked[id(guards)] = asked.get(id(guards), 0) + 1
        return failure(guards, *args) if asked[id(guards)] < 3 else None

    with replaced(Guards, "failure", never), replaced(Rechecks, "is_due", lambda *_: False):
        yield


def one_run(guarded: bool, devices: int, epochs: int, batches: int, threads: int, folder: str) -> Costs:
    """Train as the recipe says."""
    torch.set_num_threads(threads)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    recheck.ALLOWANCE_SECONDS = 0.4  # tests set it to none
    recipe = yaml.safe_load(RECIPE.read_text())
    L.seed_everything(recipe["seed_everything"], verbose=False)
    watch = Stopwatch()
    flags = {
        **{k: v for k, v in recipe["trainer"].items() if k not in ("logger", "callbacks", "default_root_dir")},
        "accelerator": "cpu",
        "devices": devices,
        "max_epochs": epochs,
        "limit_train_batches": batches,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "callbacks": [watch],
    }
    with watch.running() if guarded else switched_off():
        L.Trainer(**flags).fit(
            GPTBytes(**recipe["model"]["init_args"]), TextBytes(path=folder, **recipe["data"]["init_args"])
        )
    return watch.costs()


def report(name: str, run: Callable[[bool], Costs], rounds: int) -> None:
    """Alternate runs with and without; print medians and ratios."""
    sides: dict[bool, list[Costs]] = {True: [], False: []}
    for _ in range(rounds):
        for guarded, found in sides.items():
            found.append(run(guarded))
    medians = {guarded: statistics.median(sum((c.steps for c in found), [])) for guarded, found in sides.items()}
    watched = sides[True]
    guards = statistics.median(sum((c.guards for c in watched), []))
    shares = [(sum(c.guards) + c.looks) / c.run for c in watched]
    looks, count = statistics.median(c.looks for c in watched), statistics.median(c.count for c in watched)
    print(f"{name}: {len(watched[0].steps) + WARM_UP} steps, torch {torch.__version__}")
    print(
        f"  step        median {1e3 * medians[True]:8.2f} ms, without guards and looks {1e3 * medians[False]:8.2f} ms"
    )
    print(f"  guards      median {1e6 * guards:8.0f} us a step = {guards / medians[True]:.2%}")
    print(f"  looks       median {looks:8.2f} s in {count:.0f} looks = {looks / watched[0].run:.2%} of the run")
    rounds_shares = ", ".join(f"{share:.2%}" for share in shares)
    print(f"  both        {statistics.median(shares):.2%} of the run (each round: {rounds_shares})")
    print(f"  ratio of median steps, with / without: {medians[True] / medians[False]:.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--devices", type=int, nargs="*", default=[1, 2])
    options = parser.parse_args()
    settings = (options.epochs, options.batches, options.threads)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "text.txt").write_bytes(bytes(range(32, 127)) * 40_000)
        if 1 in options.devices:
            report("one device", lambda guarded: one_run(guarded, 1, *settings, folder), options.rounds)
        if 2 in options.devices:
            pool = RankPool(2, timeout=3600.0)
            try:
                both = functools.partial(pool.run, one_run)
                report("two ranks", lambda guarded: both(guarded, 2, *settings, folder)[0], options.rounds)
            finally:
                pool.close()


if __name__ == "__main__":
    main()
