"""A row of the table: a LightningModule that somebody else wrote, and its data."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import lightning as L
import torch
from torch import nn

FOLDER_OF_EXAMPLES = "LIGHTNING_EXAMPLES"
STEPS, ROWS = 5, 4
"""Optimizer steps of a run, and rows of the global batch."""
M = TypeVar("M", bound=nn.Module)
Made = tuple[L.LightningModule, Sequence[Any], Callable[[list[Any]], Any] | None]
"""A module, its samples, and what makes a batch of some; None: torch's."""


@dataclass(frozen=True)
class Row:
    """A model of the table.

    Args:
        name: by which it is asked for.
        kind: the part of the table: of models, or of a field.
        make: gives the module, always with the same weights, and ``STEPS * ROWS`` samples; no dropout.
        needs: the package that it comes from, as it is imported.
        couples: why one device's loss couples the rows of a batch; empty where it does not.
        fast: one of those that the default tests run.
        flags: of the Trainer.
        note: what else is to be said of it.
        eager: why it runs eagerly; empty where it must not.
        draws: what it draws at random, so that several ranks get other numbers than one device.
    """

    name: str
    kind: str
    make: Callable[[], Made]
    needs: str = "transformers"
    couples: str = ""
    fast: bool = False
    flags: tuple[tuple[str, Any], ...] = ()
    note: str = ""
    eager: str = ""
    draws: str = ""

    @property
    def can_be_made(self) -> bool:
        """Whether its package is installed."""
        if self.needs == "lightning":  # for its examples, which are in no package
            return FOLDER_OF_EXAMPLES in os.environ
        return importlib.util.find_spec(self.needs) is not None


def without_dropout(model: M) -> M:
    """The model in training mode, its dropout layers and what functional dropout reads at zero."""
    for part in model.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.p = 0.0
        for name, value in list(vars(part).items()):
            if "drop" in name and isinstance(value, float):
                setattr(part, name, 0.0)
    return model.train()


def generator(seed: int = 1) -> torch.Generator:
    """Random numbers of the data."""
    return torch.Generator().manual_seed(seed)
