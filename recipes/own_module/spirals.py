"""A module and data of one's own, beside the recipe that names them: two spirals, told apart.

This file is no part of lightning_spmd. It stands for yours: ordinary Lightning code without a word about devices.
"""

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class TwoSpirals(L.LightningDataModule):
    """Points on two intertwined spirals, with noise, and which of the two they are on."""

    def __init__(self, points: int = 2000, noise: float = 0.02, batch_size: int = 50) -> None:
        super().__init__()
        self.points = points
        self.noise = noise
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        """Draw the points, the same ones in every process."""
        generator = torch.Generator().manual_seed(1)
        which = torch.randint(2, (self.points,), generator=generator)
        along = torch.rand(self.points, generator=generator).sqrt()
        angle = 3 * torch.pi * along + torch.pi * which
        points = torch.stack([along * angle.cos(), along * angle.sin()], dim=1)
        points += self.noise * torch.randn(points.shape, generator=generator)
        held_out = self.points // 10
        self.train = TensorDataset(points[held_out:], which[held_out:])
        self.validation = TensorDataset(points[:held_out], which[:held_out])

    def train_dataloader(self) -> DataLoader:
        """Nine tenths of the points."""
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        """The others."""
        return DataLoader(self.validation, self.batch_size)


class SpiralClassifier(L.LightningModule):
    """A small network that says on which spiral a point lies."""

    def __init__(self, width: int = 64, learning_rate: float = 0.01) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.network = nn.Sequential(
            nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2)
        )

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Cross-entropy of a batch."""
        points, which = batch
        loss = F.cross_entropy(self.network(points), which)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Share of the points that are told right."""
        points, which = batch
        right = (self.network(points).argmax(-1) == which).float().mean()
        self.log("val_accuracy", right, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=self.hparams["learning_rate"])
