"""What all cases share: a net of two layers, its data, and what a case says of itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import torch
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn
from torch.nn import functional as F

from tests.helpers.training import ListLogger

STEPS, ROWS = 24, 16
COLUMNS, WIDTH, CLASSES = 8, 16, 4


class Untidy(L.LightningModule):
    """Linear, ReLU, linear on ``(x, y)``, cross-entropy, SGD with momentum. A case overrides what it is about.

    What a case keeps outside of itself (globals, attributes of classes, caches) its ``__init__`` sets back, for each
    run begins with a new module.

    Attributes:
        draws: it draws from torch's own generator, of which ranks have others than one device: they are compared with
            one another alone.
    """

    draws: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(COLUMNS, WIDTH), nn.Linear(WIDTH, CLASSES)

    def hidden(self, x: Tensor) -> Tensor:
        """The layer in the middle, WIDTH columns."""
        return torch.relu(self.body(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.hidden(x))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Cross-entropy of one batch."""
        return F.cross_entropy(self(x), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    def kept(self) -> Any:
        """What Python has of the case when the fit is over, as plain data."""
        return None

    def made_loggers(self, folder: Path) -> list[Logger]:
        """The Trainer's loggers.

        Args:
            folder: where they may write.
        """
        return [ListLogger()]


def samples(count: int = STEPS * ROWS) -> list[tuple[Tensor, Tensor]]:
    """``count`` rows and their classes, which can be learned."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(count, COLUMNS, generator=generator)
    y = (x[:, :CLASSES] + 0.5 * torch.randn(count, CLASSES, generator=generator)).argmax(1)
    return list(zip(x, y, strict=True))


def plain(value: Any) -> Any:
    """The same as lists, numbers and texts: tensors and arrays by ``tolist``, containers item by item."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, str | bytes) or not hasattr(value, "__iter__"):
        return value
    return [plain(item) for item in value]
