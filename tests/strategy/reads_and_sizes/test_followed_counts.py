"""Results that are as large as the data say: Python runs in every step, and one graph does for all sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.helpers.ranks import RankPool
from tests.helpers.training import InOrder, assert_compiled, assert_equals_one_device
from tests.strategy.small import ROWS, Quiet, assert_as_eager, rows, run

TOLD: list[Any] = []
"""What Python was told in the run before."""


class Telling(Quiet):
    def on_train_start(self) -> None:
        TOLD.clear()


class Experts(Telling):
    """A loop over experts, each with the rows that were routed to it, which may be none."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(6, 4)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        shares, which = self.router(x).softmax(1).topk(2, dim=1)
        mixed = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            where, places = torch.where(which == e)
            mixed.index_add_(0, where, expert(x[where]) * shares[where, places, None])
            TOLD.append(len(where))
        return F.cross_entropy(self(torch.relu(mixed)), y)


class Sizes(Telling):
    """Python looks at sizes and strides, keeps such a result and computes with how large it is."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        chosen = x[y > 0]
        wide = chosen.repeat(1, 2).t()
        TOLD.extend([tuple(chosen.shape), wide.stride(), wide.is_contiguous(), wide.numel(), chosen.detach()])
        flat = wide.reshape(-1)
        return super().training_step(batch, batch_idx) + self(chosen).sum() / max(len(chosen), 1) + flat.mean()


class Writes(Telling):
    """Trained values are written where a mask chooses."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        h = torch.tanh(self.first(x)).clone()
        low = h.mean(1) < 0
        h[low] = h.mean(0) * 0.5
        h[~low, :2] = 0.0
        return F.cross_entropy(self.last(h), y)


class EachFound(Telling):
    """A loop over what was found: another path for each number of them."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = super().training_step(batch, batch_idx)
        for row in (x[:, 0] > 1.5).nonzero():
            TOLD.append(int(row))
            loss = loss + 0.1 * self(x[row]).square().mean()
        return loss


class Repeats(Telling):
    """Sizes that are sums of values, and positions of a matrix."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        losses = F.cross_entropy(self(x), y, reduction="none")
        again = losses.repeat_interleave(y)
        where = torch.argwhere(x > 0.8)
        both = torch.cat([again, x[where[:, 0], where[:, 1]], x.masked_select(x < -1)])
        TOLD.append(both.shape)
        return losses.mean() + both.square().mean() + torch.outer(again, again).mean()


class Bins(Telling):
    """Classes counted, with and without weights, and more than the least number of them."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        losses = F.cross_entropy(self(x), y, reduction="none")
        near = (x[:, 0].abs() * 3).to(torch.uint8)
        sums = torch.bincount(near, x[:, 1].double(), minlength=3)
        TOLD.append((torch.bincount(y, minlength=3).tolist(), sums.shape, torch.bincount(y[:0], minlength=2).tolist()))
        return (losses / torch.bincount(near)[near.long()]).mean()


class Spread(Telling):
    """Variances of what a mask chooses, whose gradients hold numbers of its size."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        h = self(x)
        low, high = h[y < 2], h[x[:, 0] > -1]
        TOLD.append((len(low), len(high)))
        return F.cross_entropy(h, y) + low.var(0, unbiased=False).mean() + high.std() + high.var(0, correction=2).mean()


WAYS = {Bins: 2, Spread: 2, Experts: 2, Sizes: 2, Writes: 2, EachFound: 12, Repeats: 2}


@pytest.mark.parametrize("make", WAYS)
def test_one_graph_for_all_sizes(make: type[Telling]) -> None:
    run(make, "auto")
    theirs = [value.tolist() if isinstance(value, Tensor) else value for value in TOLD]
    ours = assert_as_eager(make)
    assert [value.tolist() if isinstance(value, Tensor) else value for value in TOLD] == theirs
    assert_compiled(ours)
    assert ours.captures <= WAYS[make]  # SGD with momentum has a first step of its own


@pytest.mark.parametrize("make", [Bins, Experts, Sizes, Spread, Writes, Repeats])
def test_they_are_those_of_all_ranks(make: type[Telling], two_ranks: RankPool) -> None:
    ours = two_ranks.run(run, make, "spmd", 2)
    assert_compiled(ours[0])
    assert ours[0].captures <= 3
    assert_equals_one_device(ours, run(make, "auto", data=lambda: InOrder(rows(), ROWS)))


class Squeezes(Telling):
    """One row is a row, and no longer rows."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, _ = batch
        few = torch.arange(len(x), device=x.device) < (3, 1, 2, 1, 4, 1)[batch_idx]
        chosen = self(x[few]).squeeze(0)
        TOLD.append(tuple(chosen.shape))
        return super().training_step(batch, batch_idx) + chosen.square().mean()


class OfNothing(Telling):
    """Variances of as good as nothing are NaN."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        h = self(batch[0])
        with torch.no_grad():
            for least in (0.2, 0.5, 2.0, 99.0):
                TOLD.append(h[h[:, 0] > least].var(0).isnan().sum().item())
        return F.cross_entropy(h, batch[1])


def test_variances_of_nothing(two_ranks: RankPool) -> None:
    results = two_ranks.run(_told, OfNothing)
    run(OfNothing, "auto", data=lambda: InOrder(rows(), ROWS), max_epochs=1)
    assert results == [TOLD, TOLD]
    assert {0, 3} <= set(TOLD)


def _told(make: type[Telling], *_: Any) -> list[Any]:
    run(make, "spmd", 2, max_epochs=1)
    return list(TOLD)


def test_one_row_may_be_treated_otherwise_than_many() -> None:
    run(Squeezes, "auto")
    theirs = list(TOLD)
    assert_as_eager(Squeezes)
    assert theirs == TOLD
    assert {len(shape) for shape in theirs} == {1, 2}


class Moves(Telling):
    """A number is another one for the first time, behind what was read and before what is read next."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        seen = loss.item()
        scaled = loss * (1.0 if self.trainer.global_step < 6 else 1.5)
        TOLD.append((seen, scaled.item()))
        return scaled


def test_a_number_that_moves_for_the_first_time_is_the_one_that_is_read() -> None:
    run(Moves, "auto")
    theirs = list(TOLD)
    assert_as_eager(Moves)
    assert theirs == TOLD
