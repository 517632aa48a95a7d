"""Results as large as the data say (``x[mask]``, ``unique``): one graph for all sizes, one device's numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tests.helpers.ranks import RankPool
from tests.helpers.training import InOrder, assert_compiled, assert_equals_one_device
from tests.strategy.small import ROWS, Net, Quiet, assert_as_eager, rows, run


class Masks(Quiet):
    """Rows and entries that a mask chooses; the mean is over those that were chosen."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        out = self(x)
        losses = F.cross_entropy(out, y, reduction="none")
        chosen = losses[y > 0]
        rows, columns = torch.where(out > out.detach().mean())
        return chosen.mean() + out[rows, columns].square().mean() + x.masked_select(x > 1.4).sum() * out.mean()


class Kinds(Quiet):
    """``unique`` with all it gives, ``repeat_interleave``, names of what was found."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        losses = F.cross_entropy(self(x), y, reduction="none")
        kinds, of_row, counts = y.unique(return_inverse=True, return_counts=True)
        weights = {f"kind {kind}": 1.0 + 0.5 * i for i, kind in enumerate(kinds)}
        by_kind = losses.new_zeros(len(kinds)).index_add(0, of_row, losses) / counts
        twice = losses.repeat_interleave(1 + (y == 1).long())
        return sum(w * by_kind[i] for i, w in enumerate(weights.values())) / len(weights) + twice.mean()


class OtherKinds(Quiet):
    """``unique`` of numbers with fractions, of rows, and of neighbours; classes are counted by ``one_hot``."""

    in_order = 1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        out = self(x)
        values, of_row = torch.unique(x[:, 0].round() * 0.5, return_inverse=True)
        pairs, of_pair = torch.unique((x[:, :2] > 0).long(), dim=0, return_inverse=True)
        columns = torch.unique((x > 0).float(), dim=1)
        runs, of_run, lengths = torch.unique_consecutive(y, return_inverse=True, return_counts=True)
        weights = values[of_row] + pairs[of_pair].sum(1) + self.in_order * runs[of_run] * lengths[of_run]
        weights = weights + (self.in_order * columns.sum(1) if self.in_order else columns.shape[1])
        return (F.cross_entropy(out, y, reduction="none") * weights).mean() + out.mean() / F.one_hot(y).shape[1]


class OfAnyOrder(OtherKinds):
    """Without what depends on the order of rows, which is another one on ranks."""

    in_order = 0


class Transcribes(Quiet):
    """CTC over flat targets, whose lengths are tensors; a recurrent layer's states have time outermost in memory."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        states = torch.tanh(self.first(torch.stack([x, -x, 2 * x]))).transpose(0, 1)
        scores = self.last(states).log_softmax(-1).transpose(0, 1)
        mask = torch.stack([y > 0, y > 1], dim=1)
        targets = torch.ones_like(mask, dtype=torch.long).masked_select(mask)
        lengths = torch.full_like(y, 3)
        return F.ctc_loss(scores, targets, lengths, mask.sum(1), zero_infinity=True)


class TranscribesLists(Transcribes):
    """Padded targets, and lengths that are lists of Python's, others in each step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        scores = self.last(torch.tanh(self.first(torch.stack([x, -x, 2 * x])))).log_softmax(-1)
        targets = torch.stack([y, 1 + y % 2], dim=1).clamp(min=1)
        lengths = [3 - (batch_idx + i) % 2 for i in range(len(x))]
        return F.ctc_loss(scores, targets, lengths, tuple([1 + (batch_idx + i) % 2 for i in range(len(x))]))


class Overwrites(Quiet):
    """Rows are written to as many places: two numbers that nothing but their values says are one."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        h = torch.tanh(self.first(x))
        written = h.clone()
        written[torch.where(y > 0)] = 2 * h[torch.where(2 * y > 1)]
        return F.cross_entropy(self.last(written), y)


class Codes(Quiet):
    """Masks of as many rows as are known (codes of a quantizer that are replaced): with a gradient, and without."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        out = self(x)
        mask = torch.arange(2 * len(x)) % 2 == 0
        placed, codes = torch.zeros(2 * len(x), 3), torch.ones(2 * len(x), 3)
        placed[mask] = out
        with torch.no_grad():
            codes[mask] = out
        return F.cross_entropy(placed[mask], y) + (placed * codes).mean()


WAYS = [Masks, Kinds, OtherKinds, Transcribes]


def _few() -> Any:
    return InOrder(rows(16), ROWS, shuffle=False)


@pytest.mark.parametrize("make", [*WAYS, TranscribesLists, Overwrites, Codes])
def test_sizes_that_the_data_say_stay_in_graphs(make: type[Net]) -> None:
    """Two batches, each three times: bitwise."""
    assert_compiled(assert_as_eager(make, data=_few))


@pytest.mark.parametrize(
    "make", [Masks, Kinds, OfAnyOrder, Transcribes, pytest.param(Overwrites, marks=pytest.mark.long)]
)
def test_they_are_those_of_the_global_batch(make: type[Net], two_ranks: RankPool) -> None:
    ours = two_ranks.run(run, make, "spmd", 2, data=_few)
    assert_compiled(ours[0])
    assert_equals_one_device(ours, run(make, "auto", data=_few))
