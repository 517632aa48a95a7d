"""Peak memory and time of a step on one long sequence, on one device and shared by several.

    python -m tests.scale.bench_context_memory [--length 8192] [--ranks 4] [--steps 3]

Memory is growth of the resident set inside of a step, above what the process holds between steps.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_spmd import SPMDStrategy
from lightning_spmd.report.peak_memory import PeakMemory
from tests.helpers.models import GPT
from tests.helpers.ranks import RankPool
from tests.helpers.training import QUIET


class LongSequence(L.LightningModule):
    """A language model whose activations are far larger than its weights."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.model = GPT(layers=3, width=128, heads=2)
        self.model.positions = nn.Embedding(length, 128)
        self.peaks: list[int] = []
        self.seconds: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._memory = PeakMemory()
        self._memory.begin(torch.device("cpu"))
        self._began = time.perf_counter()

    def on_train_batch_end(self, *_: Any) -> None:
        self.seconds.append(time.perf_counter() - self._began)
        self.peaks.append(self._memory.peak() or 0)


def measured(options: dict[str, Any], devices: int, length: int, steps: int) -> tuple[float, int]:
    """Median seconds of a step, and its peak in bytes; the first step, which builds the graph, does not count."""
    torch.set_num_threads(1)
    L.seed_everything(1)
    module = LongSequence(length)
    data = DataLoader(torch.randint(0, 255, (steps + 1, length + 1)), batch_size=1)
    trainer = L.Trainer(
        strategy=SPMDStrategy(**options), devices=devices, max_steps=steps + 1, use_distributed_sampler=False, **QUIET
    )
    trainer.fit(module, data)
    return statistics.median(module.seconds[1:]), int(statistics.median(module.peaks[1:]))


def main() -> None:
    """Print a line a side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3)
    arguments = parser.parse_args()
    one, several = RankPool(1, timeout=600), RankPool(arguments.ranks, timeout=600)
    try:
        ((seconds, whole),) = one.run(measured, {}, 1, arguments.length, arguments.steps)
        print(f"one device: {whole / 2**20:.0f} MiB, {seconds:.2f} s")
        options = {"context_parallel_size": arguments.ranks}
        parts = several.run(measured, options, arguments.ranks, arguments.length, arguments.steps)
    finally:
        one.close()
        several.close()
    for rank, (seconds, peak) in enumerate(parts):
        print(f"rank {rank} of {len(parts)}: {peak / 2**20:.0f} MiB ({peak / whole:.3f}), {seconds:.2f} s")


if __name__ == "__main__":
    main()
