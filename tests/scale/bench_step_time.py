"""Step time of the main job on one device, this strategy against the eager Trainer, alternating in one process.

    python tests/scale/bench_step_time.py [--steps 60] [--rounds 4] [--threads 1]

Prints medians and their ratio. The first steps of every round (capture, allocator warm-up) are left out.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch

import lightning_spmd  # noqa: F401 - registers "spmd"
from lightning_spmd.examples.gpt_bytes import GPTBytes
from lightning_spmd.examples.text_bytes import TextBytes

WARM_UP = 15


class StepTimes(L.Callback):
    """Time from batch start to batch end, in seconds.

    Args:
        clock: the wall's, or this process's own, which a busy machine disturbs least.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: list[float] = []
        self._clock = clock
        self._start = 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        self._start = self._clock()

    def on_train_batch_end(self, *_: Any) -> None:
        self.seconds.append(self._clock() - self._start)


def one_round(strategy: str, steps: int, folder: str) -> list[float]:
    """Train ``steps`` steps; the step times after warm-up."""
    L.seed_everything(1, verbose=False)
    times = StepTimes()
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="auto",
        devices=1,
        max_steps=steps,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[times],
    )
    trainer.fit(GPTBytes(), TextBytes(path=folder))
    return times.seconds[WARM_UP:]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    seconds: dict[str, list[float]] = {"auto": [], "spmd": []}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "text.txt").write_bytes(bytes(range(32, 127)) * 40_000)
        for _ in range(options.rounds):
            for strategy, collected in seconds.items():
                collected += one_round(strategy, options.steps, folder)
    medians = {strategy: statistics.median(values) for strategy, values in seconds.items()}
    for strategy, values in seconds.items():
        spread = statistics.quantiles(values, n=10)
        middle, low, high = (1e3 * seconds for seconds in (medians[strategy], spread[0], spread[-1]))
        print(f"{strategy:6} median {middle:8.2f} ms   p10 {low:8.2f}   p90 {high:8.2f}")
    ratio = medians["spmd"] / medians["auto"]
    print(f"ratio spmd / auto: {ratio:.3f}   (torch {torch.__version__}, {options.threads} threads)")


if __name__ == "__main__":
    main()
