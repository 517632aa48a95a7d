"""What a step costs where it is nearly nothing but overhead: 10,000 parameters, AdamW, 8 rows.

    python -m tests.scale.bench_tiny                # one device: Lightning's own strategy, then this one
    python -m tests.scale.bench_tiny --devices 2    # two processes: DDP, then this one

Fits of both sides alternate in one process, or in one group of processes. Prints the median and the 10th percentile of
steps from batch start to batch end, and their ratios.
"""

from __future__ import annotations

import argparse
import logging
import os
import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_spmd  # noqa: F401 - registers "spmd"
from tests.scale.bench_step_time import StepTimes

WARM_UP = 50


class Tiny(L.LightningModule):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """The mean of squares."""
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def one_fit(make: Callable[[], L.LightningModule], steps: int, strategy: str = "spmd", devices: int = 1) -> list[float]:
    """Step times of one training of a module that takes 64 numbers a row."""
    L.seed_everything(1, verbose=False)
    times = StepTimes()
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=devices,
        max_steps=steps + WARM_UP,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[times],
    )
    trainer.fit(make(), DataLoader(torch.randn(2400 * devices, 64), batch_size=8))  # type: ignore[arg-type]
    return times.seconds[WARM_UP:]


def quantile(seconds: list[float], share: float) -> float:
    """In milliseconds."""
    return 1e3 * sorted(seconds)[int(share * len(seconds))]


def only_numbers() -> None:
    """Nothing else is printed, and a process has one thread."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    only_numbers()
    baseline = "auto" if options.devices == 1 else "ddp"
    seconds: dict[str, list[float]] = {baseline: [], "spmd": []}
    for _ in range(options.rounds):
        for strategy, found in seconds.items():
            found += one_fit(Tiny, options.steps, strategy, options.devices)
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return
    for name, share in (("median", 0.5), ("p10", 0.1)):
        theirs, ours = (quantile(found, share) for found in seconds.values())
        print(f"{name:6}  {baseline} {theirs:.3f} ms  spmd {ours:.3f} ms  ratio {ours / theirs:.3f}")


if __name__ == "__main__":
    main()
