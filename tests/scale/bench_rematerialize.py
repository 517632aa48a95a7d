"""Memory and step time of a GPT of eight layers by ``rematerialize``, on one device, alternating in one process.

    python tests/scale/bench_rematerialize.py [--steps 10] [--rounds 3] [--width 256] [--batch 8] [--dropout 0.0]

Prints medians, their ratio to a step that keeps all activations, what a step takes at its highest above what is there
before it (counted, and by the resident set), and whether the losses are the same bits. The first steps of every round
(capture, the second trace, allocator warm-up) are left out.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch

from lightning_spmd import SPMDStrategy
from lightning_spmd.cost.memory import liveness
from lightning_spmd.examples.gpt_bytes import GPTBytes
from lightning_spmd.examples.text_bytes import TextBytes
from lightning_spmd.report.peak_memory import PeakMemory

WARM_UP = 4
M_MMAP_THRESHOLD = -3  # of malloc.h
SHARES = (None, 0.25, 0.5, 0.75)
MIB = 2**20


class Watch(L.Callback):
    """Seconds of each step, losses, and the highest memory of the steps after warm-up."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.memory: PeakMemory | None = None
        self._start = 0.0

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == WARM_UP:
            self.memory = PeakMemory()  # parameters and state are there, activations are not
            self.memory.begin(trainer.strategy.root_device)
        self._start = time.perf_counter()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.seconds.append(time.perf_counter() - self._start)
        self.losses.append(float(outputs["loss"]))


def one_round(share: float | None, options: argparse.Namespace, folder: str) -> tuple[Watch, int]:
    """Train some steps; also gives the bytes counted on paper."""
    L.seed_everything(1, verbose=False)
    watch, strategy = Watch(), SPMDStrategy(rematerialize=share)
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="auto",
        devices=1,
        max_steps=WARM_UP + options.steps,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[watch],
    )
    module = GPTBytes(layers=8, width=options.width, heads=8, dropout=options.dropout, sequence_length=options.length)
    trainer.fit(module, TextBytes(path=folder, batch_size=options.batch, sequence_length=options.length))
    assert strategy._training.iteration is not None
    (executable,) = strategy._training.iteration.table.executables[-1:]
    main = executable.graphs.main
    return watch, liveness(main.graph_module.graph, main.signature).peak


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 17)  # what is freed goes back at once
    seconds: dict[float | None, list[float]] = {share: [] for share in SHARES}
    memory: dict[float | None, list[int]] = {share: [] for share in SHARES}
    counted: dict[float | None, int] = {}
    losses: dict[float | None, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "text.txt").write_bytes(bytes(range(32, 127)) * 40_000)
        for _ in range(options.rounds):
            for share in SHARES:
                watch, counted[share] = one_round(share, options, folder)
                seconds[share] += watch.seconds[WARM_UP:]
                memory[share].append((watch.memory.peak() if watch.memory else None) or 0)
                losses[share] = watch.losses
    whole = statistics.median(seconds[None])
    print(f"torch {torch.__version__}, {options.threads} threads, {vars(options)}")
    for share in SHARES:
        median = statistics.median(seconds[share])
        print(
            f"rematerialize={share!s:5} median {1e3 * median:8.1f} ms   ratio {median / whole:.3f}   counted "
            f"{counted[share] / MIB:7.1f} MiB   measured {statistics.median(memory[share]) / MIB:7.1f} MiB   "
            f"{'the same losses' if losses[share] == losses[None] else 'OTHER LOSSES'}"
        )


if __name__ == "__main__":
    main()
