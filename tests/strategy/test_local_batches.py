"""Batches that are no parts of one: each rank's is a graph of its own, and the ranks take the weighted mean."""

from __future__ import annotations

import warnings
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_spmd import SPMDStrategy
from tests.helpers.molecules import MoleculeNet, collate, molecules
from tests.helpers.ranks import RankPool

STEPS = 50
PER_BATCH = 3


class Ragged(torch.utils.data.Sampler[list[int]]):
    """Batches of other sizes on each rank and in each step."""

    def __init__(self, rank: int, steps: int) -> None:
        self.rank, self.steps = rank, steps

    def __iter__(self) -> Any:
        return iter(sizes_of(self.rank, self.steps))

    def __len__(self) -> int:
        return self.steps


def sizes_of(rank: int, steps: int) -> list[list[int]]:
    """Indices of the molecules in each batch of a rank; a few shapes, so that graphs are used again."""
    kinds = [[0, 1, 2], [3, 4], [5, 6, 7, 8, 9]] if rank == 0 else [[10, 11], [12], [13, 14, 15, 16]]
    return [kinds[(step * (rank + 1)) % 3] for step in range(steps)]


class Chemist(L.LightningModule):
    """Trains a net for molecules; counts molecules, not atoms."""

    steps = 4

    def __init__(self, explicit: bool = True, normalized: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = MoleculeNet(normalized=normalized)
        self.explicit = explicit
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.net.loss(batch)
        count = {"batch_size": batch["y"].shape[0]} if self.explicit else {}
        self.log("loss", loss, on_step=True, on_epoch=True, **count)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> DataLoader[Any]:
        rank = self.trainer.global_rank
        return DataLoader(molecules(17), batch_sampler=Ragged(rank, self.steps), collate_fn=collate)  # type: ignore[arg-type]


def _fit(steps: int, **options: Any) -> Any:
    module = Chemist()
    module.steps = steps
    strategy = SPMDStrategy(**options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = L.Trainer(
            strategy=strategy, devices=2, accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
        )  # fmt: skip
        trainer.fit(module)
    weights = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in module.parameters()]
    said = [str(w.message) for w in caught]
    return module.losses, [w.detach() for w in weights], dict(trainer.callback_metrics), strategy.mode, said


def _by_hand(steps: int) -> tuple[list[float], list[Tensor], float]:
    module, data = Chemist().net, molecules(17)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    losses, seen, total = [], 0, 0.0
    for indices in zip(sizes_of(0, steps), sizes_of(1, steps), strict=True):
        rows, loss = sum(map(len, indices)), 0.0
        optimizer.zero_grad()
        for own in indices:
            mine = module.loss(collate([data[i] for i in own]))
            (mine * (len(own) / rows)).backward()
            loss += float(mine.detach()) * len(own) / rows
        optimizer.step()
        losses.append(loss)
        seen, total = seen + rows, total + loss * rows
    return losses, [p.detach() for p in module.parameters()], total / seen


@pytest.mark.parametrize("options", [{}, {"batch": "local"}, {"data_parallel": "zero2"}, {"data_parallel": "zero3"}])
def test_molecules_train_as_by_the_weighted_mean(two_ranks: RankPool, options: dict[str, Any]) -> None:
    steps = STEPS if not options else 12
    losses, weights, epoch = _by_hand(steps)
    for ours, trained, metrics, mode, _ in two_ranks.run(_fit, steps, **options):
        assert str(mode) == "compiled"
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(losses), rtol=1e-5, atol=1e-6)
        assert float(metrics["loss_epoch"]) == pytest.approx(epoch, rel=1e-5)
        for mine, theirs in zip(trained, weights, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
