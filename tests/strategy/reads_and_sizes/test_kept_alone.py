"""What one rank keeps or computes alone behind the calls of all leaves the step a graph on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.helpers.ranks import RankPool
from tests.helpers.training import InOrder, Result, assert_compiled, assert_equals_one_device
from tests.strategy.small import ROWS, Net, Quiet, rows, run

KEPT: list[list[float]] = []
"""What the run before has kept in this process."""


class Keeps(Quiet):
    """Keeps the loss on one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = list[Any]()
        self.runs = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.runs += 1
        h = torch.tanh(self.first(batch[0]))
        logits = self.last(h)
        loss = F.cross_entropy(logits, batch[1])
        if self.is_keeper:
            self.keep(loss, logits, batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    @property
    def is_keeper(self) -> bool:
        return self.global_rank == 0

    def keep(self, loss: Tensor, logits: Tensor, batch: Any, batch_idx: int) -> None:
        self.kept.append(loss.detach())

    def on_train_end(self) -> None:
        KEPT[:] = [value.flatten().tolist() for value in self.kept] + [[float(self.runs)]]


class OnTheLast(Keeps):
    """On another rank than the first, in every other step."""

    @property
    def is_keeper(self) -> bool:
        return self.global_rank == self.trainer.world_size - 1

    def keep(self, loss: Tensor, logits: Tensor, batch: Any, batch_idx: int) -> None:
        if batch_idx % 2:
            self.kept.append(loss.detach() * batch_idx)


class Averages(Keeps):
    """A moving average."""

    ema: Tensor | None = None

    def keep(self, loss: Tensor, logits: Tensor, batch: Any, batch_idx: int) -> None:
        now = loss.detach()
        self.ema = now if self.ema is None else 0.9 * self.ema + 0.1 * now
        self.kept.append(self.ema)


class KeepsMore(Keeps):
    """Of results, the batch and parameters; the loss with its history."""

    def keep(self, loss: Tensor, logits: Tensor, batch: Any, batch_idx: int) -> None:
        found = {
            "loss": loss * 2,
            "accuracy": (logits.argmax(-1) == batch[1]).float().mean(),
            "rows": batch[0].sum(1).sort().values,  # ranks' rows are in another order
            "norm": self.last.weight.norm() + loss.detach(),
        }
        self.kept.extend(found.values())


class AlsoReads(KeepsMore):
    """Behind what all ranks read, and what it reads alone."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        factor = 1.0 if loss.item() > 1.0 else 0.5
        loss = loss * factor
        if self.is_keeper:
            self.kept.append(torch.tensor(loss.item()))
            self.kept.append(loss.detach().square())
        return loss


def kept(make: Any, *args: Any, **flags: Any) -> tuple[Result, list[list[float]]]:
    return run(make, *args, **flags), list(KEPT)


PLANS: dict[str, tuple[type[Keeps], dict[str, Any], dict[str, Any]]] = {
    "replicate": (Keeps, {}, {}),
    "last": (OnTheLast, {}, {}),
    "average": (Averages, {}, {}),
    "more": (KeepsMore, {}, {}),
    "reads": (AlsoReads, {}, {}),
    "zero2": (Keeps, {"data_parallel": "zero2"}, {}),
    "zero2 average": (Averages, {"data_parallel": "zero2"}, {"accumulate_grad_batches": 2}),
    "zero2 more": (KeepsMore, {"data_parallel": "zero2"}, {"gradient_clip_val": 0.1}),
    "zero3": (Averages, {"data_parallel": "zero3"}, {}),
}


@pytest.mark.parametrize("case", PLANS)
def test_what_a_rank_keeps_alone_leaves_the_graph_to_all(case: str, two_ranks: RankPool) -> None:
    make, options, flags = PLANS[case]
    flags = {"max_epochs": 2, **flags}
    expected, theirs = kept(make, "auto", data=lambda: InOrder(rows(), ROWS, shuffle=False), **flags)
    found = two_ranks.run(kept, make, options or "spmd", 2, **flags)
    assert_compiled(*[result for result, _ in found])
    assert_equals_one_device([result for result, _ in found], expected)
    keeper, other = (found[1], found[0]) if make is OnTheLast else found
    assert other[1] == [theirs[-1]]
    assert not any("eagerly" in text for result, _ in found for text in result.warnings)
    assert len(keeper[1]) == len(theirs)
    for mine, its in zip(keeper[1], theirs, strict=True):
        assert mine == pytest.approx(its, rel=1e-5)


class Draws(Net):
    """Calls that the others must make as well: random numbers."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.kept = loss.detach() * torch.rand_like(loss) if self.global_rank == 0 else None
        return loss


def test_what_a_rank_draws_alone_is_named_with_both_lines(two_ranks: RankPool) -> None:
    found = two_ranks.run(kept, Draws, "spmd", 2, max_epochs=1)
    assert {result.mode for result, _ in found} == {"eager"}
    told = found[0][0].warnings
    assert any("the ranks call different things" in text and "test_kept_alone.py" in text for text in told)
