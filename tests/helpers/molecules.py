"""Batches of molecules as a collate function makes them: no common first dimension, another shape in every batch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

FEATURES = 5


def molecule(generator: torch.Generator) -> dict[str, Tensor]:
    """Atoms ``(N, FEATURES)``, bonds ``(2, E)``, and one number to predict."""
    atoms = int(torch.randint(2, 5, (), generator=generator))
    x = torch.randn(atoms, FEATURES, generator=generator)
    bonds = torch.randint(0, atoms, (2, atoms + 1), generator=generator)
    return {"x": x, "edge_index": bonds, "y": x.square().mean().reshape(1)}


def collate(molecules: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """One disconnected graph of several molecules."""
    sizes = [len(m["x"]) for m in molecules]
    starts = torch.tensor([0, *sizes]).cumsum(0)[:-1]
    return {
        "x": torch.cat([m["x"] for m in molecules]),
        "edge_index": torch.cat([m["edge_index"] + s for m, s in zip(molecules, starts, strict=True)], 1),
        "batch": torch.arange(len(molecules)).repeat_interleave(torch.tensor(sizes)),
        "y": torch.cat([m["y"] for m in molecules]),
    }


def molecules(count: int, seed: int = 0) -> list[dict[str, Tensor]]:
    """Some of them."""
    generator = torch.Generator().manual_seed(seed)
    return [molecule(generator) for _ in range(count)]


def batches(sizes: list[int], seed: int = 0) -> Iterator[dict[str, Tensor]]:
    """Batches of so many molecules each."""
    generator = torch.Generator().manual_seed(seed)
    for size in sizes:
        yield collate([molecule(generator) for _ in range(size)])


class MoleculeNet(nn.Module):
    """Two rounds of messages along bonds, a sum over each molecule, a head."""

    def __init__(self, width: int = 8, normalized: bool = False) -> None:
        super().__init__()
        self.embed = nn.Linear(FEATURES, width)
        self.messages = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(2))
        self.norm = nn.BatchNorm1d(width) if normalized else nn.Identity()
        self.head = nn.Linear(width, 1)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        source, target = batch["edge_index"]
        hidden = self.embed(batch["x"])
        for layer in self.messages:
            sent = torch.zeros_like(hidden).index_add(0, target, hidden[source])
            hidden = hidden + torch.tanh(layer(torch.cat([hidden, sent], 1)))
        hidden = self.norm(hidden)
        pooled = hidden.new_zeros(batch["y"].shape[0], hidden.shape[1]).index_add(0, batch["batch"], hidden)
        return self.head(pooled).squeeze(1)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """The mean over molecules."""
        return F.mse_loss(self(batch), batch["y"])
