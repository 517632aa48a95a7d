"""What it costs a step that Python reads a value, tells one, or draws a random number: a tiny module, on one device.

    python -m tests.scale.bench_reads

Fits of the kinds of step alternate in one process. Prints the median and the 10th percentile of steps from batch start
to batch end, and how much longer each kind takes than the plain step.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable

import lightning as L
from torch import Tensor

from tests.scale.bench_tiny import Tiny, one_fit, only_numbers, quantile


class Decides(Tiny):
    """One ``if`` on the loss, which goes the same way each time."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """As Tiny, with a decision."""
        loss = super().training_step(batch, batch_idx)
        return loss if loss > -1 else -loss


class Alternates(Tiny):
    """An ``if`` that goes one way and the other."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """As Tiny, with a decision by the batch."""
        loss = super().training_step(batch, batch_idx)
        return loss if batch.sum() > 0 else loss * 0.5


class Keeps(Tiny):
    """A number that the module keeps."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """As Tiny, with ``float(loss)``."""
        loss = super().training_step(batch, batch_idx)
        self.kept = float(loss)
        return loss


class Draws(Tiny):
    """A number of Python's."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """As Tiny, times a random number."""
        return super().training_step(batch, batch_idx) * random.random()


KINDS: dict[str, Callable[[], L.LightningModule]] = {
    "plain": Tiny,
    "if loss": Decides,
    "if, both ways": Alternates,
    "float(loss)": Keeps,
    "random()": Draws,
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    only_numbers()
    seconds: dict[str, list[float]] = {name: [] for name in KINDS}
    for _ in range(options.rounds):
        for name, make in KINDS.items():
            seconds[name] += one_fit(make, options.steps)
    for name, found in seconds.items():
        told = [f"{word} {quantile(found, share):.3f} ms" for word, share in (("median", 0.5), ("p10", 0.1))]
        more = [quantile(found, share) - quantile(seconds["plain"], share) for share in (0.5, 0.1)]
        print(f"{name:14} {'  '.join(told)}  more than plain: {more[0]:+.3f} ms, {more[1]:+.3f} ms")


if __name__ == "__main__":
    main()
