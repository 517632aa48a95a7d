"""Step time with compiled regions, against eager training, ``torch.compile`` and graphs without, alternating.

    python -m tests.scale.bench_lowering [--module chains|chains-tanh|chains-written|main] [--steps 40] [--rounds 4]

All sides run in one process. ``chains`` is a module whose time is in pointwise chains: layers of LayerNorm, GELU,
dropout 0 and a residual on tensors of 4 MiB; ``-tanh`` with torch's approximation of GELU, ``-written`` with that
formula written out, as GPT-2's users have it. ``main`` is the main job. Prints medians and their ratio to eager's.
The first steps of every round (capture, compilation, trials) are left out. ``--clock processor`` counts the time of
this process alone: on a machine that does other work it says what a quiet one would. With ``--long`` the run counts
as a long one, in which compiling pays.
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
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_spmd import SPMDStrategy
from lightning_spmd.examples.gpt_bytes import GPTBytes
from lightning_spmd.examples.text_bytes import TextBytes
from lightning_spmd.stages.runtime.regions import choice
from lightning_spmd.stages.runtime.regions.code import CODES
from tests.scale.bench_step_time import StepTimes

WARM_UP = 8
CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}
WIDTH, ROWS, LAYERS = 1024, 1024, 4
SIDES: dict[str, Callable[[], Any]] = {
    "eager": lambda: "auto",
    "torch.compile": lambda: "auto",
    "spmd": lambda: SPMDStrategy(lowering="none"),
    "spmd, inductor": lambda: SPMDStrategy(lowering="inductor"),
    "spmd, auto": lambda: SPMDStrategy(lowering="auto"),
}


def written_gelu(x: Tensor) -> Tensor:
    """GPT-2's GELU."""
    return 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * torch.pow(x, 3.0))))


class Layer(nn.Module):
    """LayerNorm, GELU, dropout 0, residual."""

    def __init__(self, gelu: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.gelu, self.dropout = nn.LayerNorm(WIDTH), gelu, nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.gelu(self.norm(x)))


class Chains(L.LightningModule):
    """Layers without products."""

    def __init__(self, gelu: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Layer(gelu) for _ in range(LAYERS)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


GELUS: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
    "chains": nn.GELU,
    "chains-tanh": lambda: nn.GELU(approximate="tanh"),
    "chains-written": lambda: written_gelu,
}


def one_round(module: str, side: str, steps: int, folder: str, clock: Callable[[], float]) -> list[float]:
    """Train ``steps`` steps; the step times after warm-up."""
    L.seed_everything(1, verbose=False)
    times = StepTimes(clock)
    trainer = L.Trainer(
        strategy=SIDES[side](),
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[times],
    )
    trained: Any = GPTBytes() if module == "main" else Chains(GELUS[module]())
    data: Any = TextBytes(path=folder)
    if module != "main":
        data = DataLoader(TensorDataset(torch.randn(ROWS * steps, WIDTH)), batch_size=ROWS)
    if side == "torch.compile":
        if module == "main":
            trained = torch.compile(trained)
        else:
            trained.layers = torch.compile(trained.layers)
    trainer.fit(trained, data)
    return times.seconds[WARM_UP:]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--module", choices=[*GELUS, "main"], default="chains")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--sides", nargs="*", default=list(SIDES))
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall")
    parser.add_argument("--long", action="store_true")
    options = parser.parse_args()
    if options.long:
        choice.COMPILING = 0.0
    torch.set_num_threads(options.threads)
    seconds: dict[str, list[float]] = {side: [] for side in options.sides}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "text.txt").write_bytes(bytes(range(32, 127)) * 40_000)
        for _ in range(options.rounds):
            for side, collected in seconds.items():
                collected += one_round(options.module, side, options.steps, folder, CLOCKS[options.clock])
    print(CODES.counts)
    first = next(iter(seconds.values()))
    print(f"{options.module}, torch {torch.__version__}, {options.threads} threads, {options.clock} time")
    print("| side | median | p10 | p90 | median's ratio | p10's ratio |")
    for side, values in seconds.items():
        spread, other = statistics.quantiles(values, n=10), statistics.quantiles(first, n=10)
        middle, ratio = statistics.median(values), statistics.median(values) / statistics.median(first)
        times = " | ".join(f"{1e3 * t:.1f} ms" for t in (middle, spread[0], spread[-1]))
        print(f"| {side} | {times} | {ratio:.2f} | {spread[0] / other[0]:.2f} |")


if __name__ == "__main__":
    main()
