"""A step's own ``torch.autocast`` casts a weight once in a block: its gradients are added in half precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.helpers.ranks import RankPool
from tests.helpers.training import InOrder, assert_compiled
from tests.strategy.small import ROWS, Quiet, assert_as_eager, rows, run


def _half(*, keep: bool = True) -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=keep)


class TwoViews(Quiet):
    """One network on two views of the batch."""

    keep = True

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        with _half(keep=self.keep):
            return F.cross_entropy(self(x), y) + F.cross_entropy(self(x + 1), y)


class CastsEachTime(TwoViews):
    keep = False


class TwoBlocks(Quiet):
    """Each block, and what is behind ``clear_autocast_cache``, has casts of its own."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        with _half():
            loss = F.cross_entropy(self(x), y) + F.cross_entropy(self(x + 1), y)
            torch.clear_autocast_cache()
            loss = loss + F.cross_entropy(self(x + 2), y)
        with _half():
            return loss + F.cross_entropy(self(2 * x), y) + F.cross_entropy(self(x - 1), y)


class OneBlockOrTwo(Quiet):
    """The same calls, in one block or two."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        with _half():
            loss = F.cross_entropy(self(x), y)
            if batch_idx % 2:
                return loss + F.cross_entropy(self(x + 1), y)
        with _half():
            return loss + F.cross_entropy(self(x + 1), y)


class TeacherFirst(Quiet):
    """Casts of the first call, without gradients, serve the second: no gradient comes through."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        with _half():
            with torch.no_grad():
                targets = self(x).softmax(-1)
            loss = F.cross_entropy(self(x + 1), targets.float())
        return loss + F.cross_entropy(self(x), y)


class Reads(Quiet):
    """A value is read between the two."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        with _half():
            loss = F.cross_entropy(self(x), y)
            if loss.item() > 1.0:
                loss = 1.5 * loss
            return loss + F.cross_entropy(self(x + 1), y)


class EagerBetween(Quiet):
    """The step goes on eagerly within a block, or behind one."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        with _half():
            loss = F.cross_entropy(self(x), y)
            if batch_idx == 1:
                loss = loss * y.to_sparse().to_dense().float().mean()
            loss = loss + F.cross_entropy(self(x + 1), y)
        if batch_idx == 3:
            loss = loss * y.to_sparse().to_dense().float().mean()
        with _half():
            return loss + F.cross_entropy(self(2 * x), y)


class Checkpointed(Quiet):
    """Parts are computed again."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        with _half():
            one, two = (checkpoint(self.first, view, use_reentrant=False) for view in (x, x + 1))
            return F.cross_entropy(self.last(one), y) + F.cross_entropy(self.last(two), y)


class ByHand(Quiet):
    """Weights are updated within the block, behind their casts, and a gradient is read."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        (x, y), optimizer = batch, self.optimizers()
        with _half():
            for shift in (0, 1):
                loss = F.cross_entropy(self(x), y) + F.cross_entropy(self(x + shift), y)
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
        self.log("gradient", self.last.weight.grad.sum().item())


MODULES = [
    TwoViews, CastsEachTime, TwoBlocks, OneBlockOrTwo, TeacherFirst, Reads, EagerBetween, Checkpointed, ByHand,
]  # fmt: skip


@pytest.mark.parametrize("make", MODULES)
def test_casts_last_as_long_as_in_eager_training(make: type[Quiet]) -> None:
    assert_as_eager(make, max_epochs=1)


def test_two_views_on_two_ranks(two_ranks: RankPool) -> None:
    ours = two_ranks.run(run, TwoViews, "spmd", 2, max_epochs=1)
    assert_compiled(*ours)
    theirs = run(TwoViews, "auto", data=lambda: InOrder(rows(), ROWS), max_epochs=1)
    for name, weight in theirs.weights.items():
        torch.testing.assert_close(ours[0].weights[name], weight, rtol=1e-2, atol=1e-2)
