"""A module whose parameters lie in memory in every way that training allows, and one number and an empty one."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.helpers.modules import build_optimizer


class OddLayouts(L.LightningModule):
    """Channels-last convolutions with batch norm, a transposed matrix, a turned cube, a scale, an empty parameter.

    Args:
        optimizer: a name of ``modules.OPTIMIZERS``.
        gaps: whether a parameter is every other row and column of a larger tensor.
        scale: whether a parameter has no dimension.
        double: whether everything is float64, so that only mistakes make a difference.
    """

    def __init__(self, optimizer: str = "adamw_fused", *, gaps: bool = False, scale: bool = True, double: bool = True):
        super().__init__()
        torch.manual_seed(0)
        self.kind = optimizer
        self.conv = nn.Conv2d(3, 6, 3, padding=1, bias=False).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.norm = nn.BatchNorm2d(6)
        self.point = nn.Conv2d(6, 4, 1).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        dtype = torch.float64 if double else torch.float32
        self.to(dtype)
        make = {"dtype": dtype}
        self.turned = nn.Parameter(torch.randn(5, 16, **make).mul_(0.3).t())
        self.cube = nn.Parameter(torch.randn(3, 5, 2, **make).mul_(0.3).permute(2, 0, 1))
        self.last = nn.Parameter(torch.randn(10, 6, **make)[::2, ::2] if gaps else torch.randn(5, 3, **make))
        self.scale = nn.Parameter(torch.tensor(0.7, **make)) if scale else None
        self.empty = nn.Parameter(torch.empty(0, 3, **make))

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm(self.conv(x)))
        h = self.point(h).flatten(1) @ self.turned
        h = h if self.scale is None else h * self.scale
        return h @ self.last + torch.einsum("bi,oji->boj", h, self.cube).sum(1) + self.empty.sum()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return build_optimizer(self.kind, self.parameters())


def images(count: int, *, double: bool = True) -> list[tuple[Tensor, Tensor]]:
    """Samples for it."""
    generator = torch.Generator().manual_seed(1)
    dtype = torch.float64 if double else torch.float32
    draw = {"generator": generator, "dtype": dtype}
    return [(torch.randn(3, 2, 2, **draw), torch.randn(3, **draw)) for _ in range(count)]


def batches(count: int, rows: int = 4) -> list[list[Tensor]]:
    """Batches of them, channels-last."""
    samples = images(count * rows)
    columns = [torch.stack(column) for column in zip(*samples, strict=True)]
    columns[0] = columns[0].contiguous(memory_format=torch.channels_last)
    return [[column[i : i + rows] for column in columns] for i in range(0, count * rows, rows)]
