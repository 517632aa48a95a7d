"""Steps put together at random of statements that read values, draw numbers and keep state, under any plan."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_spmd import SPMDStrategy
from tests.helpers.ranks import RankPool
from tests.helpers.training import InOrder, Result, assert_bitwise, assert_equals_one_device
from tests.strategy.small import ROWS, Quiet, rows, run

Statement = Callable[[Any, Any, int, Tensor], Tensor]


def _if(net: Any, batch: Any, index: int, loss: Tensor) -> Tensor:
    return loss * 0.5 if loss > 1.1 else loss


def _if_float(net: Any, batch: Any, index: int, loss: Tensor) -> Tensor:
    return loss * 0.7 if 2 * float(loss) > 2.1 else loss


def _weighed(net: Any, batch: Any, index: int, loss: Tensor) -> Tensor:
    return loss * (1 / (1 + float(loss)))


def _counted(net: Any, batch: Any, index: int, loss: Tensor) -> Tensor:
    net.count += 1
    return loss * (1 + 0.01 * net.count)


def _best(net: Any, batch: Any, index: int, loss: Tensor) -> Tensor:
    value = loss.item()
    if value < net.best:
        net.best, net.count = value, net.count + 1
    return loss


def _cut(net: Any, batch: Any, index: int, loss: Tensor) -> Tensor:
    size = 2 + int((batch[1] == 0).sum()) % 2
    return loss + 0.01 * net.first.weight[:, :size].square().sum()


def _masked(net: Any, batch: Any, index: int, loss: Tensor) -> Tensor:
    chosen = batch[1] == index % 2
    return loss + 0.1 * net.first(batch[0][chosen]).square().sum() / 8 if chosen.sum() > 2 else loss


def _looped(net: Any, batch: Any, index: int, loss: Tensor) -> Tensor:
    for _ in range(1 + int((batch[0][:, 0] > 0).sum()) % 2):
        loss = loss * 0.9
    return loss


def _listed(net: Any, batch: Any, index: int, loss: Tensor) -> Tensor:
    counts = torch.stack([(batch[1] == k).sum() for k in range(3)]).tolist()
    return loss * (1 + max(counts) * 0.01) if counts[0] > 2 else loss


def _buffered(net: Any, batch: Any, index: int, loss: Tensor) -> Tensor:
    net.mean.mul_(0.9).add_(0.1 * loss.detach())
    return loss * 1.5 if net.mean > 0.5 else loss


def _normed(net: Any, batch: Any, index: int, loss: Tensor) -> Tensor:
    return loss + 0.1 * (net.norm(batch[0]) + 0.3).square().mean()


def _tossed(net: Any, batch: Any, index: int, loss: Tensor) -> Tensor:
    return loss * 2 if random.random() < 0.5 else loss


def _mixed(net: Any, batch: Any, index: int, loss: Tensor) -> Tensor:
    noise = torch.from_numpy(np.random.randn(6).astype(np.float32))
    return loss * np.random.beta(0.4, 0.4) + 0.1 * net.first(batch[0] + noise).square().mean()


def _told(net: Any, batch: Any, index: int, loss: Tensor) -> Tensor:
    net.kept.append(float(loss))
    net.log("right", (net(batch[0]).detach().numpy().argmax(1) == batch[1].numpy()).mean())
    net.log_dict({"loss": float(loss), "zeros": float(int((batch[1] == 0).sum()))})
    return loss


STATEMENTS: list[Statement] = [
    _if, _if_float, _weighed, _counted, _best, _cut, _masked, _looped, _listed, _buffered, _normed, _tossed, _mixed,
    _told,
]  # fmt: skip
PLANS: list[dict[str, Any]] = [
    {"data_parallel": plan, "overlap_iterations": overlap}
    for plan in ("replicate", "zero2", "zero3")
    for overlap in (False, True)
]


class Fuzzed(Quiet):
    """Some statements."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        chance = random.Random(seed)
        self.count, self.best = 0, 9.0
        self.kept: list[float] = []
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("mean", torch.zeros(()))
        self.statements = chance.sample(STATEMENTS, chance.randint(1, 4))
        self.adam = chance.random() < 0.5

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        for statement in self.statements:
            loss = statement(self, batch, batch_idx, loss)
        return loss

    def configure_optimizers(self) -> Any:
        if self.adam:
            return torch.optim.AdamW(self.parameters(), lr=0.01)
        return super().configure_optimizers()


class Ends(L.Callback):
    """Seeds the generators, and keeps what a run leaves in Python."""

    def __init__(self, left: list[Any]) -> None:
        self.left = left

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        random.seed(5)
        np.random.seed(5)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.left.append((pl_module.count, pl_module.best, pl_module.kept, random.random(), np.random.rand()))


def fuzzed(seed: int, strategy: Any, devices: int, left: list[Any]) -> Result:
    chance = random.Random(-seed)
    flags: dict[str, Any] = {"accumulate_grad_batches": chance.choice([1, 1, 2, 3])}
    if chance.random() < 0.5:
        flags["gradient_clip_val"] = chance.choice([0.05, 0.5])
    data = None if devices > 1 else lambda: InOrder(_as_on_ranks(), ROWS, shuffle=False)
    make = functools.partial(Fuzzed, seed)
    return run(make, strategy, devices, callbacks=lambda: [Ends(left)], data=data, **flags)


def _as_on_ranks() -> list[Any]:
    """Rows in the order in which two ranks bring them."""
    begins = range(0, len(rows()), ROWS)
    return [rows()[begin + row] for begin in begins for row in (*range(0, ROWS, 2), *range(1, ROWS, 2))]


def on_ranks(seed: int) -> Result:
    return fuzzed(seed, SPMDStrategy(**PLANS[seed % len(PLANS)]), 2, [])


@pytest.mark.long
@pytest.mark.parametrize("seed", range(40))
def test_on_one_device_it_is_eager_bitwise(seed: int) -> None:
    theirs, ours = list[Any](), list[Any]()
    reference = fuzzed(seed, "auto", 1, theirs)
    assert_bitwise(fuzzed(seed, "spmd", 1, ours), reference)
    assert ours == theirs


@pytest.mark.long
@pytest.mark.parametrize("seed", range(18))
def test_on_two_ranks_it_is_one_device(seed: int, two_ranks: RankPool) -> None:
    assert_equals_one_device(two_ranks.run(on_ranks, seed), fuzzed(seed, "auto", 1, []))
