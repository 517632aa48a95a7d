"""What a step costs where batches have a hundred different lengths, against a graph of that one length.

    python -m tests.scale.bench_shapes              # one device
    python -m tests.scale.bench_shapes --rounds 5

A GPT of four blocks and 0.9 million parameters. Three fits alternate in one process: all batches of one length; every
other batch of it and the others of a hundred lengths; the same eagerly. Only steps on the one length are measured.
Prints medians, their ratios, and how many graphs were built.
"""

from __future__ import annotations

import argparse
import logging
import random
import statistics
import warnings
from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_spmd  # noqa: F401 - registers "spmd"
from tests.helpers.modules import Block
from tests.scale.bench_step_time import StepTimes

VOCABULARY, WIDTH, LONGEST, ROWS, MEASURED = 512, 128, 192, 8, 96
SKIPPED = 8
"""Steps at the beginning of a fit, in which graphs are built."""


class GPT(L.LightningModule):
    """Tokens, positions, blocks, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.blocks = nn.Sequential(*(Block(WIDTH, 4, 0.0) for _ in range(4)))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """The next token's cross-entropy."""
        positions = torch.arange(batch.shape[1], device=batch.device)
        scores = self.head(self.blocks(self.tokens(batch) + self.positions(positions)))
        return F.cross_entropy(scores[:, :-1].flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        """AdamW, fused."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)


def one_fit(strategy: str, lengths: Sequence[int]) -> tuple[list[float], int]:
    """Times of the steps on the one length, and the number of graphs."""
    L.seed_everything(1, verbose=False)
    batches = [torch.randint(0, VOCABULARY, (ROWS, length)) for length in lengths]
    times = StepTimes()
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[times],
    )
    trainer.fit(GPT(), DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    pairs = list(zip(times.seconds, lengths, strict=True))[SKIPPED:]
    training = getattr(trainer.strategy, "_training", None)
    return [s for s, length in pairs if length == MEASURED], training.iteration.captures if training else 0


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="fits of each kind")
    rounds = parser.parse_args().rounds
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    others = random.Random(0).sample([n for n in range(16, LONGEST) if n != MEASURED], 100)
    mixed = [n for other in others for n in (other, MEASURED)]
    sides = {"one length": ("spmd", [MEASURED] * len(mixed)), "100 lengths": ("spmd", mixed), "eager": ("auto", mixed)}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    graphs: dict[str, int] = {}
    for _ in range(rounds):
        for name, (strategy, lengths) in sides.items():
            found, graphs[name] = one_fit(strategy, lengths)
            seconds[name] += found
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    for name, median in medians.items():
        print(f"{name:12} {1e3 * median:7.2f} ms a step of length {MEASURED}   graphs built: {graphs[name]}")
    print(f"100 lengths / one length: {medians['100 lengths'] / medians['one length']:.3f}")
    print(f"100 lengths / eager:      {medians['100 lengths'] / medians['eager']:.3f}")


if __name__ == "__main__":
    main()
