"""A mask that is computed again chooses as many as before: one graph for all sizes, as if it had a name."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.helpers.ranks import RankPool
from tests.helpers.training import InOrder, Result, assert_compiled, assert_equals_one_device
from tests.strategy.reads_and_sizes.watched import MOVED, TOLD, Watched
from tests.strategy.small import ROWS, assert_as_eager, rows, run


class Twice(Watched):
    """Written down twice."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self(x)
        TOLD.append(tuple(logits[y > 0].shape))
        return F.cross_entropy(logits[y > 0], y[y > 0])


class ByName(Watched):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return F.cross_entropy(self(x)[y.gt(0)], y[y.gt(0)])


class Ignored(Watched):
    """Of views, with what is computed from masks and with a buffer that is written in between."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        y = torch.where(x[:, 0] > 1, -100, y)
        wanted = y[y.view(-1) != -100]
        self.log("labelled", (y[y.view(-1) != -100] > 0).float().sum())
        logits = self(self.norm(x))
        kept = logits[(y.view(-1) != -100)]
        right = logits.argmax(1)[~(y == -100)] == y[~(y == -100)]
        self.log("right", right.float().sum())
        return F.cross_entropy(kept, wanted)


class Written(Watched):
    """What a mask is computed from is written into in between: it is another one."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        losses = F.cross_entropy(self(x), y, reduction="none")
        y = y.clone()
        before = losses[y > 0]
        y.view(-1).sub_((x[:, 1] > 0).long())
        after = losses[y > 0]
        TOLD.append((len(before), len(after)))
        return before.sum() + after.mean() if len(after) else before.sum()


class MaskWritten(Watched):
    """A mask itself is written into, before or behind its twin."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        losses = F.cross_entropy(self(x), y, reduction="none")
        first, second = y > 0, y > 0
        second[0] = True
        third = y > 0
        first &= x[:, 0] > 0
        found = [losses[mask] for mask in (first, second, third, y > 0)]
        TOLD.append([len(each) for each in found])
        return torch.stack([each.sum() * (i + 1) for i, each in enumerate(found)]).sum() / ROWS


class Drawn(Watched):
    """Random masks are others each time."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        losses = F.cross_entropy(self(x), y, reduction="none")
        found = [losses[torch.rand(ROWS) > 0.2] for _ in range(2)]
        TOLD.append([len(each) for each in found])
        return torch.cat(found).sum()


class Annealed(Watched):
    """Two thresholds that are the same in the first steps and go their ways."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        losses = F.cross_entropy(self(x), y, reduction="none")
        step = self.global_step
        one, other = 0.1 * max(step - 2, 0), -0.2 * max(step - 4, 0)
        found = losses[x[:, 0] + 1 > 1 + one], losses[x[:, 0] + 1 > 1 + other]
        TOLD.append([len(each) for each in found])
        return torch.cat(found).sum() / ROWS


class Bisected(Watched):
    """A mask that follows from thirty others, computed twice."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        losses = F.cross_entropy(self(x), y, reduction="none")

        def mask() -> Tensor:
            low = x[:, 0]
            for _ in range(30):
                middle = low * 0.9 + 0.1
                low = torch.where(middle * x[:, 1] > 0, middle, low)
            return low > 0.5

        return losses[mask()].sum() + losses[mask()].square().sum()


CAPTURES = {Twice: 2, ByName: 2, Ignored: 2, Written: 4, MaskWritten: 2, Drawn: 3, Annealed: 6, Bisected: 2}


@pytest.mark.parametrize("make", CAPTURES)
def test_as_eager_with_one_graph(make: type[L.LightningModule]) -> None:
    run(make, "auto")
    theirs = list(TOLD)
    ours = assert_as_eager(make)
    assert theirs == TOLD
    assert_compiled(ours)
    assert ours.captures <= CAPTURES[make]  # SGD with momentum has a first step of its own


def test_with_a_last_batch_that_is_smaller() -> None:
    ours = assert_as_eager(Twice, data=lambda: InOrder(rows(45), ROWS, shuffle=True))
    assert_compiled(ours)
    assert ours.captures <= 4


def _labelled(ranks: int) -> list[tuple[Tensor, Tensor]]:
    """Batches in the order of that many ranks."""
    samples = rows()
    batches = [samples[i : i + ROWS] for i in range(0, len(samples), ROWS)]
    return [sample for batch in batches for rank in range(ranks) for sample in batch[rank::ranks]]


def _run(make: Any, strategy: Any, devices: int, ranks: int) -> tuple[Result, list[Any]]:
    return run(make, strategy, devices, data=lambda: InOrder(_labelled(ranks), ROWS)), list(MOVED)


@pytest.mark.parametrize("make", [Twice, ByName, Ignored])
def test_chosen_rows_stay_on_their_rank(make: type[L.LightningModule], two_ranks: RankPool) -> None:
    found = two_ranks.run(_run, make, "spmd", 2, 2)
    ours = [result for result, _ in found]
    one, _ = _run(make, "auto", 1, 2)
    assert_compiled(ours[0])
    assert ours[0].captures <= 2
    assert_equals_one_device(ours, one)
    for _, moved in found:
        assert moved
        if make is not Ignored:
            assert not any(nodes or gathered for nodes, gathered in moved)


@pytest.mark.parametrize("make", [Written, MaskWritten])
def test_nor_are_masks_mixed_up_among_ranks(make: type[L.LightningModule], two_ranks: RankPool) -> None:
    ours = [result for result, _ in two_ranks.run(_run, make, "spmd", 2, 2)]
    one, _ = _run(make, "auto", 1, 2)
    assert_equals_one_device(ours, one)
