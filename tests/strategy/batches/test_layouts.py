"""Kernels lay out results otherwise than torch's shape functions say: the graph still runs, and still equals eager."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, default_collate

from lightning_spmd import SPMDStrategy
from lightning_spmd.ir.steps import ShardedStep
from lightning_spmd.stages.passes import GraphPass, PassState
from tests.helpers.activations import activation_collectives
from tests.helpers.ranks import RankPool
from tests.helpers.training import InOrder, Result, assert_compiled, assert_equals_one_device
from tests.strategy.small import ROWS, Net, assert_as_eager, rows, run


class Transposed(Net):
    """Batch norm of a transposed activation, and an MSE loss between a transposed prediction and a plain target."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout, self.norm = nn.Identity(), nn.BatchNorm1d(4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        hidden = torch.tanh(self.first(x)).unsqueeze(-1).expand(-1, -1, 4)
        hidden = self.norm(hidden.transpose(1, 2)).transpose(1, 2).flatten(0, 1)
        predicted = self.last(hidden.view(x.shape[0], 4, 10)).transpose(1, 2)
        loss = F.mse_loss(predicted, torch.ones(x.shape[0], 3, 4))
        self.log("loss", loss)
        return loss


def test_results_in_another_layout_equal_eager() -> None:
    assert_as_eager(Transposed)


def test_results_in_another_layout_on_two_ranks_equal_one_device(two_ranks: RankPool) -> None:
    results = two_ranks.run(_train)
    assert_compiled(*results)
    assert_equals_one_device(results, run(Transposed, "auto", data=lambda: InOrder(rows(), ROWS, shuffle=False)))


def _train() -> Result:
    return run(Transposed, "spmd", 2)


class ChannelsLast(Net):
    """Convolution weights in channels-last order, which gradients and fused optimizers must share."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.conv(x.view(-1, 2, 1, 3).expand(-1, -1, 2, -1)).flatten(1))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, fused=True)


@pytest.mark.parametrize("clip", [None, 0.5])
def test_parameters_in_channels_last_order_equal_eager(clip: float | None) -> None:
    assert_as_eager(ChannelsLast, gradient_clip_val=clip)


class Pooled(Net):
    """Channels-last images pooled to one pixel: the gradient takes autograd's detour through a flat buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout, self.conv = nn.Identity(), nn.Conv2d(2, 10, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        images = x.view(-1, 2, 1, 3).expand(-1, -1, 3, -1).contiguous(memory_format=torch.channels_last)
        return self.last(F.adaptive_avg_pool2d(self.conv(images), 1).flatten(1))


def test_pooling_of_channels_last_images_equals_eager() -> None:
    assert_as_eager(Pooled)


def test_pooling_of_channels_last_images_moves_no_activation(two_ranks: RankPool) -> None:
    results = two_ranks.run(_train_pooled)
    assert_equals_one_device(
        [r for r, _ in results], run(Pooled, "auto", data=lambda: InOrder(rows(), ROWS, shuffle=False))
    )
    assert [moved for _, moved in results] == [[], []]


def _train_pooled() -> tuple[Result, list[str]]:
    moved: list[str] = []

    def look(step: ShardedStep, _: PassState) -> None:
        moved.extend(node.name for node in activation_collectives(step))

    strategy = SPMDStrategy(passes=[GraphPass("look", look)])
    return run(Pooled, strategy, 2), moved


class Cut(InOrder):
    """Batches with gaps in memory: each is cut to a length of its own."""

    def train_dataloader(self) -> DataLoader[Any]:
        made, loader = count(), super().train_dataloader()

        def cut(samples: list[Any]) -> Any:
            x, y = default_collate(samples)
            return x[:, : 3 + next(made) % 4], y.unsqueeze(1).expand(-1, 2)

        return DataLoader(loader.dataset, loader.batch_size, sampler=loader.sampler, collate_fn=cut)


class TakesViews(Net):
    """Takes views of its batch, which plain memory alone allows, and writes into it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.dropout = nn.Linear(1, 10), nn.Identity()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x.add_(1)
        loss = F.cross_entropy(self(x.reshape(-1, 1)).view(*x.shape, 3).mean(1), y.reshape(-1)[::2])
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("mean", batch[0].mean(), sync_dist=True)


def _train_cut(strategy: str = "spmd", devices: int = 2) -> Result:
    return run(TakesViews, strategy, devices, data=lambda: Cut(rows(), ROWS))


def test_batches_with_gaps_in_memory_equal_one_device(two_ranks: RankPool) -> None:
    results = two_ranks.run(_train_cut)
    assert_compiled(*results)
    assert_equals_one_device(results, _train_cut("auto", 1))
