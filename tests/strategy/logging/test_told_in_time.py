"""What a step tells is told as it was then; memory, errors, keys and generators that have two names."""

from __future__ import annotations

import collections
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.strategy.small import Quiet, assert_as_eager


class Keeps(Quiet):
    """Has places to keep things in."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = []
        self.counts: Any = None
        self.register_buffer("seen", torch.zeros(()))


class ToldThenWritten(Keeps):
    """Weights, a buffer and the batch are told, and written into afterwards."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.kept.append(float(self.first.weight.detach().numpy().mean()))
        self.log("seen", self.seen)
        print(self.seen, batch[1])
        self.seen.add_(1)
        batch[1][0] = 0
        print(self.seen, batch[1])
        return self.loss(batch)


class ArrayThenWritten(Keeps):
    """An array has a tensor's memory."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        array = self.seen.numpy()
        before = array.copy()
        self.seen.add_(1)
        self.kept.append((float(before), float(array.sum())))
        return self.loss(batch)


class WritesArray(Keeps):
    """An array that is written into is a tensor that is."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        weight = self.first.weight.detach().numpy()
        weight *= 0.99
        return self.loss(batch)


class KeepsArray(Keeps):
    """An array that is kept changes with its buffer."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.kept.append(self.seen.numpy())
        self.seen.add_(1)
        return self.loss(batch)


class Catches(Keeps):
    """An ``except`` that would also take what capture raises."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        try:
            if loss > 1.1:
                raise RuntimeError(f"big: {loss.item():.4f}")
        except RuntimeError as error:
            self.kept.append(str(error))
            loss = loss * 0.5
        return loss


class Counts(Keeps):
    """A dictionary of another class, under numbers that are others in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = collections.Counter[Any]()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.counts[int(batch[1].sum())] += 1
        self.counts["steps"] += 1
        return self.loss(batch)


class Noise(nn.Module):
    """Draws from its own generator."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = np.random.default_rng(seed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.generator.uniform(0.5, 1.5)


class Generators(Keeps):
    """One generator under two names; two generators of two modules of one class."""

    def __init__(self) -> None:
        super().__init__()
        self.chance = random.Random(3)
        self.first.chance = self.chance  # type: ignore[assignment]
        self.dropout = nn.Sequential(Noise(1), Noise(2))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * self.chance.random() * self.first.chance.random()  # type: ignore[operator, union-attr]


class TellsDraws(Keeps):
    """An array of random numbers that is printed."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        print(np.random.rand(2))
        return self.loss(batch)


@pytest.mark.parametrize(
    "kind", [ToldThenWritten, ArrayThenWritten, WritesArray, KeepsArray, Catches, Counts, Generators, TellsDraws]
)
def test_it_is_eagers(kind: type[Keeps], capsys: pytest.CaptureFixture[str]) -> None:
    made: list[Keeps] = []
    told: list[str] = []

    def make() -> Keeps:
        told.append(capsys.readouterr().out)
        made.append(kind())
        return made[-1]

    has_memory = kind in (ArrayThenWritten, WritesArray, KeepsArray)
    assert_as_eager(make, "eager" if has_memory else "compiled", max_epochs=2)
    told.append(capsys.readouterr().out)
    theirs, ours = made
    assert told[2] == told[1]
    assert repr(ours.kept) == repr(theirs.kept)
    assert repr(ours.counts) == repr(theirs.counts)
