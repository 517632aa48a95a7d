"""What one rank reads or computes alone leaves the step a graph on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.helpers.ranks import RankPool
from tests.helpers.training import InOrder, Result, assert_compiled, assert_equals_one_device
from tests.strategy.small import ROWS, Quiet, rows, run

SEEN: list[Any] = []
"""What the run before has read in this process, and how often its step ran."""


class Alone(Quiet):
    def __init__(self) -> None:
        super().__init__()
        self.runs, self.seen = 0, list[Any]()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.runs += 1
        h = torch.tanh(self.first(batch[0]))
        if self.reads(0, batch_idx):
            self.looks(h)
        loss = F.cross_entropy(self.last(h), batch[1])
        self.log("loss", loss)
        if self.reads(1, batch_idx):
            self.looks(loss)
        return loss

    def reads(self, place: int, batch_idx: int) -> bool:
        return place == 1 and self.global_rank == 0

    def looks(self, value: Tensor) -> None:
        self.seen.append(value.item())

    def on_train_end(self) -> None:
        SEEN[:] = [self.runs, *self.seen]


class OnTheSecond(Alone):
    """In every other step, on the rank that is not the first."""

    def reads(self, place: int, batch_idx: int) -> bool:
        return place == 1 and batch_idx % 2 == 1 and (self.trainer.world_size == 1 or self.global_rank == 1)


class Computes(Alone):
    """Calls of its own, from which it reads more than once."""

    def looks(self, value: Tensor) -> None:
        mine = value.detach().square()
        self.seen.append(mine.mean().item())
        self.seen += mine.flatten()[:2].tolist()
        self.seen.append(float(value.detach().cpu().numpy().sum()))


class EachItsOwn(Computes):
    """Each rank in another place."""

    def reads(self, place: int, batch_idx: int) -> bool:
        return place == self.global_rank or self.trainer.world_size == 1


class BesideOthers(Alone):
    """Behind what all ranks read, and in front of it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        factor = 1.0 if loss.item() > 1.0 else 0.5
        if self.reads(1, batch_idx):
            self.looks(loss + 1)
        return loss * factor


class LooksAtWeights(Alone):
    """A parameter that the step uses, and one that it uses later."""

    def reads(self, place: int, batch_idx: int) -> bool:
        return self.global_rank == 0

    def looks(self, value: Tensor) -> None:
        self.seen.append((value.detach().mean() * self.last.weight.detach().sum()).item())


def read(make: Any, *args: Any, **flags: Any) -> tuple[Result, list[Any]]:
    return run(make, *args, **flags), list(SEEN)


PLANS: dict[str, tuple[type[Alone], dict[str, Any], dict[str, Any]]] = {
    "replicate": (Alone, {}, {}),
    "second": (OnTheSecond, {}, {}),
    "computes": (Computes, {}, {}),
    "each its own": (EachItsOwn, {}, {}),
    "beside others": (BesideOthers, {}, {}),
    "weights": (LooksAtWeights, {}, {}),
    "zero2": (EachItsOwn, {"data_parallel": "zero2"}, {"accumulate_grad_batches": 2}),
    "zero3": (BesideOthers, {"data_parallel": "zero3"}, {}),
    "zero3 computes": (Computes, {"data_parallel": "zero3"}, {"gradient_clip_val": 0.1}),
}


@pytest.mark.parametrize("case", PLANS)
def test_what_a_rank_reads_alone_leaves_the_graph_to_all(case: str, two_ranks: RankPool) -> None:
    make, options, flags = PLANS[case]
    flags = {"max_epochs": 1, **flags}
    expected, kept = read(make, "auto", data=lambda: InOrder(rows(), ROWS, shuffle=False), **flags)
    found = two_ranks.run(read, make, options or "spmd", 2, **flags)
    assert_compiled(*[result for result, _ in found])
    assert_equals_one_device([result for result, _ in found], expected)
    assert [seen[0] for _, seen in found] == [kept[0]] * 2
    theirs = [value for _, seen in found for value in seen[1:]]
    assert len(theirs) == len(kept) - 1
    assert sorted(theirs) == pytest.approx(sorted(kept[1:]), rel=1e-5)


class Writes(Alone):
    """Changes what the step has on one rank alone."""

    def looks(self, value: Tensor) -> None:
        value.detach().mul_(2)
        self.seen.append(value.item())


def test_a_rank_that_changes_the_step_alone_is_named_with_both_lines(two_ranks: RankPool) -> None:
    found = two_ranks.run(read, Writes, "spmd", 2, max_epochs=1)
    assert {result.mode for result, _ in found} == {"eager"}
    assert any(
        "the ranks call different things" in text and "test_read_alone.py" in text for text in found[0][0].warnings
    )
