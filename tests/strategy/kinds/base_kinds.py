"""Kinds of Python state that ``training_step`` reads and a hook changes, one class each.

``write`` is called before the third and the fifth of six batches, ``read`` gives what the loss is multiplied by.
"""

from typing import Any, ClassVar

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F

VALUES = {0: 1.0, 2: 0.5, 4: 1.5}
"""What is written before which step."""


class Kind(L.LightningModule):
    """One layer and a factor.

    Attributes:
        mode: ``"split"`` where the optimizer's own step runs each time, else ``"compiled"``.
        tolerance: how far two ranks may be from one device, relative.
    """

    mode: ClassVar[str] = "compiled"
    tolerance: ClassVar[float] = 1e-5

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.start()

    def start(self) -> None:
        """Make the state."""
        self.write(VALUES[0])

    def read(self) -> Any:
        """The factor."""
        raise NotImplementedError

    def write(self, value: float) -> None:
        """Change the state."""
        raise NotImplementedError

    def on_train_start(self) -> None:
        self.write(VALUES[0])  # what is not the module's own is as another run left it

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx in VALUES and batch_idx:
            self.write(VALUES[batch_idx])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.layer(batch[0]), batch[1]) * self.read()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Config:
    """A plain object."""

    level: ClassVar[float] = 1.0

    def __init__(self, value: Any = 1.0) -> None:
        self.value = value


class Changed(Kind):
    """The step itself changes what it reads."""

    def start(self) -> None:
        pass

    def write(self, value: float) -> None:
        pass
