"""``torch.equal``, ``torch.allclose``, ``torch.cov``: Python reads whether tensors are alike, and steps stay graphs."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from tests.helpers.ranks import RankPool
from tests.helpers.training import InOrder, Result, assert_bitwise, assert_compiled, assert_equals_one_device, fit
from tests.strategy.small import assert_as_eager


class WithNothing(L.LightningModule):
    """``tensor == None``, as much published code asks; torch leaves the answer to Python."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        scores = self.net(batch[0])
        if scores == None or scores == "auto" or (batch[0] != None) is False:  # noqa: E711
            scores = scores.exp()
        return (scores.square() * (1 + (scores == scores.abs()).float())).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_comparison_with_nothing_is_no_call() -> None:
    assert_as_eager(WithNothing)


class Compares(L.LightningModule):
    """Each kind of comparison decides what the loss is; so do the batches, in turns."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.net, self.kind = nn.Linear(6, 3), kind

    def is_alike(self, scores: Tensor, x: Tensor) -> bool:
        if self.kind == "equal":
            return torch.equal(x[:, 0], x[:, 1])
        if self.kind == "shapes":
            return torch.equal(scores, x)
        if self.kind == "allclose":
            return torch.allclose(x[:, 0], x[:, 1] + 1e-3, atol=1e-2)
        return bool(torch.allclose(scores, scores))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        scores = self.net(batch[0])
        if self.kind == "cov":
            loss = torch.cov(scores.T).diagonal().mean() + torch.corrcoef(scores.T).square().mean()
        else:
            loss = scores.square().mean() if self.is_alike(scores, batch[0]) else scores.exp().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def compared(kind: str, strategy: Any, devices: int) -> Result:
    L.seed_everything(3, verbose=False)
    rows = torch.randn(8 * 6, 6, generator=torch.Generator().manual_seed(2))
    for batch in (1, 2, 4):
        rows[8 * batch : 8 * (batch + 1), 1] = rows[8 * batch : 8 * (batch + 1), 0]
    return fit(Compares(kind), InOrder([(row, 0) for row in rows], 8), strategy, devices, max_epochs=2)[0]


@pytest.mark.parametrize("kind", ["equal", "allclose", "shapes", "itself", "cov"])
def test_one_device_keeps_its_bits(kind: str) -> None:
    ours = compared(kind, "spmd", 1)
    assert_compiled(ours)
    assert_bitwise(ours, compared(kind, "auto", 1))


@pytest.mark.parametrize(("kind", "plan"), [("equal", "replicate"), ("cov", "zero3")])
def test_ranks_compare_the_global_batch(two_ranks: RankPool, kind: str, plan: str) -> None:
    results = two_ranks.run(compared, kind, {"data_parallel": plan}, 2)
    assert_compiled(*results)
    assert_equals_one_device(results, compared(kind, "auto", 1))
