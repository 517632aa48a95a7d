"""Optimization by hand whose code decides by values behind the backward pass: the norm of gradients, the loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.ranks import RankPool
from tests.helpers.training import InOrder, assert_bitwise, assert_compiled, assert_equals_one_device
from tests.strategy.small import ROWS, Net, rows, run


class ByHand(Net):
    """Counts its decisions."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.register_buffer("taken", torch.zeros(()))

    def note(self, loss: Tensor) -> None:
        assert isinstance(self.taken, Tensor)
        self.log("taken", self.taken)
        self.log("loss", loss)


class SkipsLargeNorms(ByHand):
    """Clips, and leaves out steps whose gradients are too large."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        loss = self.loss(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        norm = nn.utils.clip_grad_norm_(self.parameters(), 0.3)
        if norm < 0.6 and torch.isfinite(norm):
            optimizer.step()
            self.taken += 1
        self.log("norm", norm)
        self.note(loss)


class LooksAtTheLoss(ByHand):
    """Behind ``manual_backward``."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        loss = self.loss(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        if loss.item() < 1.0:
            for parameter in self.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(0.5)
            self.taken += 1
        optimizer.step()
        self.note(loss)


class CollectsUntilLarge(ByHand):
    """Gradients of several batches, until their norm says that it is enough."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        loss = self.loss(batch)
        self.manual_backward(loss / 2)
        norm = sum(p.grad.square().sum() for p in self.parameters() if p.grad is not None)
        if norm > 0.25:
            optimizer.step()
            optimizer.zero_grad()
            self.taken += 1
        self.note(loss)


KINDS = [SkipsLargeNorms, LooksAtTheLoss, CollectsUntilLarge]


@pytest.mark.parametrize("kind", KINDS)
def test_one_device_is_bitwise_eager(kind: type[ByHand]) -> None:
    theirs, ours = run(kind, "auto"), run(kind)
    assert_compiled(ours)
    assert_bitwise(ours, theirs)
    assert 0 < theirs.weights["taken"] < 18  # it went both ways


def quiet(kind: type[ByHand]) -> ByHand:
    """Without dropout."""
    module = kind()
    module.dropout = nn.Identity()  # type: ignore[assignment]
    return module


def train(name: str, strategy: Any, devices: int) -> Any:
    kind = next(kind for kind in KINDS if kind.__name__ == name)
    return run(lambda: quiet(kind), strategy, devices, data=lambda: InOrder(rows(), ROWS, shuffle=False))


@pytest.mark.parametrize("plan", ["replicate", "zero2", "zero3"])
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_equal_one_device(kind: type[ByHand], plan: str, two_ranks: RankPool) -> None:
    ours = two_ranks.run(train, kind.__name__, {"data_parallel": plan}, 2)
    assert_compiled(*ours)
    theirs = train(kind.__name__, "auto", 1)
    assert_equals_one_device(ours, theirs)
    assert 0 < theirs.weights["taken"] < 18


class LooksBehindTheStep(ByHand):
    """The weights are updated already."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        loss = self.loss(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        if self.loss(batch).item() > loss.item():  # HERE
            self.taken += 1
        self.note(loss)


def test_behind_the_step_it_is_a_graph() -> None:
    theirs, ours = run(LooksBehindTheStep, "auto"), run(LooksBehindTheStep)
    assert_compiled(ours)
    assert_bitwise(ours, theirs)
