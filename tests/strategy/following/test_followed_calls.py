"""What tells one call from another: constants, signs, switches, memory that tensors share; and what somebody keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.helpers.training import assert_compiled
from tests.strategy.small import Net, Quiet, assert_as_eager

RUNS: list[int] = []


class Counting(Quiet):
    """Counts its steps; every third one is another one."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        RUNS.append(self.trainer.global_step)
        return self.step(batch[0], batch[1], self.trainer.global_step % 3 == 2)

    def step(self, x: Tensor, y: Tensor, other: bool) -> Tensor:
        raise NotImplementedError


class Words(Counting):
    """A word among the arguments."""

    def step(self, x: Tensor, y: Tensor, other: bool) -> Tensor:
        return F.cross_entropy(self.last(F.gelu(self.first(x), approximate="tanh" if other else "none")), y)


class Numbers(Counting):
    """A whole number that says which dimension, and one that is computed with."""

    def step(self, x: Tensor, y: Tensor, other: bool) -> Tensor:
        h = torch.roll(self.first(x), 1, 0 if other else 1) * (1 + self.trainer.global_step)
        return F.cross_entropy(self.last(torch.tanh(h)), y)


class Signs(Counting):
    """The arctangent of nothing is nothing or pi, by the sign of nothing."""

    def step(self, x: Tensor, y: Tensor, other: bool) -> Tensor:
        h = self.first(x)
        angle = torch.atan2(torch.zeros_like(h), torch.full_like(h, -0.0 if other else 0.0))
        return F.cross_entropy(self.last(torch.tanh(h) * (1 + angle)), y)


class Switches(Counting):
    """The same calls without gradients."""

    def step(self, x: Tensor, y: Tensor, other: bool) -> Tensor:
        with torch.set_grad_enabled(not other):
            h = torch.tanh(self.first(x))
        return F.cross_entropy(self.last(h), y)


class Casts(Counting):
    """The same calls under autocast."""

    def step(self, x: Tensor, y: Tensor, other: bool) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=other):
            h = torch.tanh(self.first(x))
        return F.cross_entropy(self.last(h.float()), y)


class Precise(Counting):
    """The same calls where the default is double precision."""

    def step(self, x: Tensor, y: Tensor, other: bool) -> Tensor:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64 if other else before)
        try:
            weights = torch.rand(10)
        finally:
            torch.set_default_dtype(before)
        return F.cross_entropy(self.last(torch.tanh(self.first(x)) * weights.float()), y)


class ReadsPrecise(Counting):
    """A value is read where the default is double precision: what came before was not."""

    def step(self, x: Tensor, y: Tensor, other: bool) -> Tensor:
        weights, before = torch.rand(10), torch.get_default_dtype()
        torch.set_default_dtype(torch.float64 if other else before)
        try:
            scale = weights.sum().item() + torch.rand(()).item()
        finally:
            torch.set_default_dtype(before)
        return F.cross_entropy(self.last(torch.tanh(self.first(x)) * weights * scale), y)


class Layers(Counting):
    """Another layer of the same size."""

    def __init__(self) -> None:
        super().__init__()
        self.second = torch.nn.Linear(6, 10)

    def step(self, x: Tensor, y: Tensor, other: bool) -> Tensor:
        layer = self.second if other else self.first
        return F.cross_entropy(self.last(torch.tanh(F.linear(x, layer.weight, layer.bias))), y)


class Slices(Counting):
    """A whole number that says how large the result is."""

    def step(self, x: Tensor, y: Tensor, other: bool) -> Tensor:
        h = torch.tanh(self.first(x))[:, : 5 if other else 7]
        return F.cross_entropy(self.last(F.pad(h, (0, 10 - h.shape[1]))), y)


class Memory(Counting):
    """Two tensors from outside are one memory, or are not."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.own = torch.ones(10), torch.ones(10)
        self.same = self.one.view(10)

    def step(self, x: Tensor, y: Tensor, other: bool) -> Tensor:
        self.one.mul_(0.9)
        loss = F.cross_entropy(self.last(torch.tanh(self.first(x)) * (self.same if other else self.own)), y)
        return loss * (1 + loss.item())  # what was written before it is read is written apart


class Keeps(Counting):
    """What a step made is looked at many steps later."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def step(self, x: Tensor, y: Tensor, other: bool) -> Tensor:
        h = torch.tanh(self.first(x))
        self.kept = [*self.kept[-4:], h.detach()]
        loss = F.cross_entropy(self.last(h), y)
        return loss + (loss.new_tensor([t.mean().item() for t in self.kept]).sum() if other else 0)


class Reads(Counting):
    """What is read is that of the step, and so is what Python makes of it."""

    def step(self, x: Tensor, y: Tensor, other: bool) -> Tensor:
        loss = F.cross_entropy(self.last(torch.tanh(self.first(x))), y)
        value = loss.item()
        scaled = loss * (value + 1) if value > 1 else loss * 2
        return scaled * (1 + scaled.item())


@pytest.mark.parametrize(
    "make", [Words, Numbers, Signs, Switches, Casts, Precise, ReadsPrecise, Layers, Slices, Memory, Keeps, Reads]
)
def test_every_step_is_a_graph_with_the_bits_of_eager(make: type[Net]) -> None:
    RUNS.clear()
    ours = assert_as_eager(make)
    assert_compiled(ours)
    steps = len(RUNS) // 2  # eager training's, then ours
    assert RUNS[:steps] == RUNS[steps:] == list(range(steps))
