"""Prints how far DDP and this strategy are from one device on the global batch: ``python -m tests.equality.table``.

Two ranks, batches of 16 rows, the last batch of each epoch ragged. Deviations of the loss are relative, of weights
absolute. DDP takes means of per-rank means, so a loss with ``ignore_index`` or class weights differs, and its batch
norm sees one rank's rows.
"""

from __future__ import annotations

import dataclasses
import sys

from tests.helpers.ranks import RankPool
from tests.helpers.training import Deviation, Result, TrainingCase, deviation, one_device, train_on

RAGGED = 16 * 6 + 10
CASES = {
    "gpt, every target counts": TrainingCase("gpt", "adamw"),
    "gpt, ignore_index": TrainingCase("gpt_ignore_index", "adamw"),
    "gpt, label smoothing": TrainingCase("gpt_smoothing", "adamw"),
    "gpt, class weights": TrainingCase("gpt_weights", "adamw"),
    "gpt, all three": TrainingCase("gpt_everything", "adamw"),
    "conv net, batch norm": TrainingCase("conv", "sgd"),
    "mlp, torchmetrics": TrainingCase("mlp", "adamw"),
}


def global_losses(results: list[Result]) -> Result:
    """Rank 0's result with the mean of the ranks' losses, which is what DDP minimises."""
    losses = [sum(step) / len(step) for step in zip(*[r.losses for r in results], strict=True)]
    return dataclasses.replace(results[0], losses=losses)


def measure(pool: RankPool, case: TrainingCase, strategy: str) -> Deviation:
    """The deviation of ``strategy`` on ``pool`` from one device."""
    return deviation(global_losses(train_on(pool, case, strategy)), one_device(case))


def rows(
    pool: RankPool, names: tuple[str, ...] = tuple(CASES), batches: int = 20
) -> list[tuple[str, Deviation, Deviation]]:
    """(case, ours, DDP's)."""
    found = []
    for name in names:
        case = dataclasses.replace(CASES[name], batches=batches, count=RAGGED, dropout=0.0, eps=1e-5)
        found.append((name, measure(pool, case, "spmd"), measure(pool, case, "ddp")))
    return found


def main() -> None:
    """Print the table."""
    pool = RankPool(2)
    sys.stdout.write(
        f"{'two ranks against one device':28} {'spmd loss':>10} {'weights':>10} {'ddp loss':>10} {'weights':>10}\n"
    )
    for name, ours, theirs in rows(pool):
        numbers = (ours.loss, ours.weights, theirs.loss, theirs.weights)
        sys.stdout.write(f"{name:28} " + " ".join(f"{n:10.1e}" for n in numbers) + "\n")
    pool.close()


if __name__ == "__main__":
    main()
