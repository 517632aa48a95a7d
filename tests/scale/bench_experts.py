"""What a step costs with experts in a loop, as Mixtral has them in its plain form: rows found by ``torch.where``.

    python -m tests.scale.bench_experts

Fits of Lightning's own strategy and of this one alternate in one process, of a model of two blocks with eight experts
each, whose numbers of rows are others in every step. Prints the median and the 10th percentile of steps from batch
start to batch end, their ratios, and how many graphs were built.
"""

from __future__ import annotations

import argparse
import functools
import time
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import lightning_spmd  # noqa: F401 - registers "spmd"
from tests.scale.bench_step_time import StepTimes
from tests.scale.bench_tiny import WARM_UP, only_numbers, quantile


class Expert(nn.Module):
    """A gated layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Experts in a loop, the two of each row that a router finds best."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(Expert(width) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x).flatten(0, 1)
        shares, which = torch.topk(F.softmax(self.router(h), dim=1), 2, dim=1)
        shares = shares / shares.sum(1, keepdim=True)
        mixed = torch.zeros_like(h)
        mask = F.one_hot(which, len(self.experts)).permute(2, 1, 0)
        for e, expert in enumerate(self.experts):
            places, rows = torch.where(mask[e])
            mixed.index_add_(0, rows, expert(h[rows]) * shares[rows, places, None])
        return x + mixed.view(x.shape)


class Mixture(L.LightningModule):
    """Two such blocks over embeddings of tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, width), nn.Linear(width, 256)
        self.blocks = nn.Sequential(Block(width, 8), Block(width, 8))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Which token comes next."""
        logits = self.head(self.blocks(self.embedding(batch[:, :-1])))
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def one_fit(width: int, steps: int, strategy: str) -> tuple[list[float], float, int]:
    """Step times of one training, seconds until its first step was over, and graphs."""
    L.seed_everything(1, verbose=False)
    times = StepTimes()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        max_steps=steps + WARM_UP,
        max_epochs=-1,
        enable_model_summary=False,
        callbacks=[times],
        **quiet,  # type: ignore[arg-type]
    )
    begun = time.perf_counter()
    trainer.fit(Mixture(width), DataLoader(torch.randint(0, 256, (512, 33)), batch_size=8))  # type: ignore[arg-type]
    rest = time.perf_counter() - begun - sum(times.seconds[1:])
    return times.seconds[WARM_UP:], rest, getattr(trainer.strategy, "captures", 0)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--width", type=int, default=64)
    options = parser.parse_args()
    only_numbers()
    fit = functools.partial(one_fit, options.width, options.steps)
    found: dict[str, list[tuple[list[float], float, int]]] = {"auto": [], "spmd": []}
    for _ in range(options.rounds):
        for strategy, fits in found.items():
            fits.append(fit(strategy))
    for name, share in (("median", 0.5), ("p10", 0.1)):
        theirs, ours = (quantile([t for times, _, _ in fits for t in times], share) for fits in found.values())
        print(f"{name:6}  auto {theirs:.3f} ms  spmd {ours:.3f} ms  ratio {ours / theirs:.3f}")
    for strategy, fits in found.items():
        print(f"{strategy}: first step {min(rest for _, rest, _ in fits):.1f} s, {fits[0][2]} graphs")


if __name__ == "__main__":
    main()
