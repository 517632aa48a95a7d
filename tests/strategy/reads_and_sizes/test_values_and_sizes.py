"""What a step puts in Python's state, reads from tensors and computes from sizes, all three in one step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.strategy.reads_and_sizes.test_varying_sizes import Model, compare
from tests.strategy.small import Quiet, assert_as_eager


class Notes(Quiet):
    """Puts a number, a text and a pair somewhere, which follow from what another batch decides otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.halvings, self.kind, self.pair = 1, "small", (0, "even")
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, halvings = self.loss(batch), 0
        while loss > 0.7:
            loss, halvings = loss * 0.7, halvings + 1
        self.halvings = halvings
        self.kind = "large" if batch[0].sum() > 0 else "small"
        self.pair = (batch_idx // 2, "even" if batch_idx % 2 == 0 else "odd")
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append((self.halvings, self.kind, self.pair))


class Fills(Quiet):
    """Fills a number in once, and never again what a hook changes then."""

    def __init__(self) -> None:
        super().__init__()
        self.scale: float | None = None
        self.ready, self.other = False, 0
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.scale is None:
            self.scale = 0.5
        if not self.ready:
            self.ready, self.other = True, 3
        return self.loss(batch) * self.scale

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append((self.scale, self.ready, self.other))
        if batch_idx == 2:
            self.other = 7


@pytest.mark.parametrize("kind", [Notes, Fills])
def test_what_a_step_assigns_is_there_whichever_graph_runs(kind: type[Notes | Fills]) -> None:
    made: list[Any] = []

    def make() -> Any:
        made.append(kind())
        return made[-1]

    assert_as_eager(make)
    theirs, ours = made
    assert ours.seen == theirs.seen
    assert len(set(ours.seen)) > 1


class Counts(Model):
    """Counts batches, which have many sizes."""

    calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls += 1
        return super().training_step(batch, batch_idx)


class PerRow(Model):
    """Whole numbers of a tensor that multiply: every trace must know them."""

    def body(self, x: Tensor) -> Tensor:
        counts = (x.detach().mean((1, 2)) > 0).long().tolist()
        return self.linear(torch.stack([x[i] * (1 + count) for i, count in enumerate(counts)]))


@pytest.mark.parametrize("kind", [Counts, PerRow])
def test_counters_and_values_where_sizes_vary(kind: type[Model]) -> None:
    assert compare(kind, [(3, n) for n in (9, 12, 7, 10, 15, 11, 8)]) == 2


class Best(Quiet):
    """Compares the loss with the best one so far."""

    def __init__(self) -> None:
        super().__init__()
        self.best = 9.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        value = loss.item()
        self.best = min(self.best, value)
        self.log("best", self.best)
        return loss


def test_values_are_compared_with_what_earlier_steps_left() -> None:
    assert_as_eager(Best)
