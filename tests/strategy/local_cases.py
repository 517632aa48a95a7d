"""Modules that train on local batches, and the same by hand."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_spmd import SPMDStrategy
from tests.helpers.molecules import FEATURES, MoleculeNet, collate, molecules

DATA = molecules(17)
KINDS = ([[0, 1, 2], [3, 4], [5, 6, 7, 8, 9]], [[10, 11], [12], [13, 14, 15, 16]])
"""By rank, the molecules of each kind of batch."""


def indices(rank: int, step: int) -> list[int]:
    """The molecules of a batch: the ranks meet all pairs of kinds."""
    return KINDS[rank][step % 3 if rank == 0 else (step // 3 + step) % 3]


def sampler(rank: int, steps: int) -> list[list[int]]:
    """Of all steps of a rank."""
    return [indices(rank, step) for step in range(steps)]


class Chemist(L.LightningModule):
    """Trains a net for molecules; counts molecules, not atoms."""

    def __init__(self, net: Callable[[], nn.Module] = MoleculeNet, steps: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = net()
        self.steps = steps
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss = self.net.loss(batch)  # type: ignore[operator]
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=batch["y"].shape[0])
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> DataLoader[Any]:
        batches: Any = sampler(self.trainer.global_rank, self.steps)
        return DataLoader(DATA, batch_sampler=batches, collate_fn=collate)  # type: ignore[arg-type]


def fit(module: L.LightningModule, options: dict[str, Any] | None = None, **flags: Any) -> tuple[L.Trainer, list[str]]:
    """Train on this rank of several; also gives what was said."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = L.Trainer(
            strategy=SPMDStrategy(**(options or {})),
            devices=flags.pop("devices", 2),
            accelerator="cpu",
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            **flags,
        )
        trainer.fit(module)
    return trainer, [str(w.message) for w in caught]


def weights(module: nn.Module) -> list[Tensor]:
    """Whole parameters."""
    found = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in module.parameters()]
    return [w.detach().clone() for w in found]


def by_hand(
    net: Callable[[], nn.Module] = MoleculeNet, steps: int = 4, accumulate: int = 1, clip: float | None = None
) -> tuple[list[float], list[Tensor]]:
    """Losses and weights of one device that weighs the two ranks' gradients by molecules."""
    module: Any = Chemist(net).net
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    losses: list[float] = []
    for step in range(steps):
        if step % accumulate == 0:
            optimizer.zero_grad()
        both = [indices(rank, step) for rank in range(2)]
        losses.append(add_weighted(module, both, accumulate))
        if (step + 1) % accumulate == 0:
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
            optimizer.step()
    return losses, weights(module)


def add_weighted(module: Any, both: Sequence[Sequence[int]], accumulate: int = 1) -> float:
    """Add the weighted gradients of a step; gives the mean loss."""
    rows, total = sum(map(len, both)), 0.0
    for own in both:
        loss = module.loss(collate([DATA[i] for i in own]))
        (loss * (len(own) / rows) / accumulate).backward()
        total += float(loss.detach()) * len(own) / rows
    return total


class Sometimes(MoleculeNet):
    """A layer that only batches of more than three molecules reach."""

    def __init__(self) -> None:
        super().__init__()
        self.rare = nn.Linear(FEATURES, FEATURES)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        if batch["y"].shape[0] > 3:
            batch = {**batch, "x": batch["x"] + self.rare(batch["x"])}
        return super().forward(batch)


class Turned(MoleculeNet):
    """Layers in an order that the batch decides."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.second = nn.Linear(FEATURES, FEATURES)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        pair = [self.first, self.second]
        for layer in pair if batch["y"].shape[0] > 2 else reversed(pair):
            batch = {**batch, "x": torch.tanh(layer(batch["x"]))}
        return super().forward(batch)


class Normalized(MoleculeNet):
    """With batch norm, of each rank's own atoms."""

    def __init__(self) -> None:
        super().__init__(normalized=True)
