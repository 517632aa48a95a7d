"""A model whose compute is a sleep, as on an accelerator that leaves the processor to the network.

What is left to measure is the schedule: when each collective starts, and who waits for it.
"""

from __future__ import annotations

import time
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torch.utils.data import DataLoader, TensorDataset

LAYERS = 16
WIDTH = 575  # 330,625 parameters a layer
FORWARD_MS = 3.2


@torch.library.custom_op("lightning_spmd_bench::accelerate", mutates_args=())
def accelerate(x: Tensor, milliseconds: float) -> Tensor:
    """A copy of ``x``, after as long as an accelerator would take."""
    time.sleep(milliseconds / 1e3)
    return x.clone()


@accelerate.register_fake
def _(x: Tensor, milliseconds: float) -> Tensor:
    return torch.empty_like(x)


def _keep_time(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
    ctx.milliseconds = inputs[1]


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return accelerate(gradient, 2 * ctx.milliseconds), None


accelerate.register_autograd(_backward, setup_context=_keep_time)


@register_sharding(torch.ops.lightning_spmd_bench.accelerate.default)
def _(x: Any, milliseconds: float) -> list[tuple[list[Any], list[Any]]]:
    return [([Replicate()], [Replicate(), None]), ([Shard(0)], [Shard(0), None])]


class Layer(nn.Module):
    """A square weight, and a time that its use takes.

    The weight is used before the time passes in the forward pass, so its gradient is ready after it in the backward. It
    is used by a matrix product because that gives a gradient without structure: a gradient that repeats one number
    (of ``weight.mean()``, for one) is reduced as that number in a graph, and nothing is measured.
    """

    def __init__(self, width: int, milliseconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.01 * torch.randn(width, width))
        self.milliseconds = milliseconds

    def forward(self, x: Tensor) -> Tensor:
        return accelerate(x + x @ self.weight, self.milliseconds)


class SimulatedAccelerator(L.LightningModule):
    """Sixteen layers, 5.3 M parameters, 154 ms of sleep a step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Layer(WIDTH, FORWARD_MS) for _ in range(LAYERS)))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return (self.layers(x) - y).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)


def batches(rows: int, host: int) -> DataLoader[Any]:
    """Random rows, others on every host."""
    random = torch.Generator().manual_seed(1 + host)
    x, y = (torch.randn(512, WIDTH, generator=random) for _ in range(2))
    return DataLoader(TensorDataset(x, y), batch_size=rows)
