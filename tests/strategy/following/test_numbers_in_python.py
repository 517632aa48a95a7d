"""Numbers that a step reads are Python's own, whatever it does with them."""

from __future__ import annotations

import copy
import functools
import math
import numbers
import random
from math import isfinite
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.ranks import RankPool
from tests.helpers.training import InOrder, assert_compiled, assert_equals_one_device
from tests.strategy import asked_by_others
from tests.strategy.small import ROWS, Quiet, assert_as_eager, rows, run


@functools.singledispatch
def factor(_: Any) -> float:
    return 3.0


@factor.register
def _(_: float) -> float:
    return 2.0


class Kinds(Quiet):
    """What a number is, asked in all ways; a list of the answers, and a loss that they decide."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = []
        self.average = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.average = 0.9 * self.average + 0.1 * loss.item()
        answers = [list(map(float, [1, 2])) == [1.0, 2.0]]  # float is used as a value
        for value in (loss.item(), self.average, random.random(), int(batch[1][0]), batch_idx, loss.item() > 1.0):
            answers += [type(value) is float, type(value) is bool, type(value).__name__ == "int"]
            answers += [isinstance(value, float), isinstance(value, (bool, np.floating)), isinstance(value, type)]
            answers += [isinstance(value, numbers.Number), isinstance(value, numbers.Integral), np.isscalar(value)]
            answers += [value.__class__ is float, asked_by_others.is_float(value)]
            match value:
                case float():
                    answers.append("float")
                case _:
                    answers.append("another")
            loss = loss * factor(value) * (1 + sum(a is True for a in answers) % 3)
        self.kept.append(answers)
        return loss


class Identity(Quiet):
    """``is True``, in the method itself and of a comparison."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        large = (batch[0] > 2).any().item()
        loss = loss * 2 if large is True else loss
        if (loss.item() > 1.1) is not False:
            loss = loss * 0.5
        if (random.random() < 0.5) is True:
            loss = loss * 0.7
        return loss * (3 if (batch_idx % 2 == 0) is True else 1)


class Functions(Quiet):
    """What Python's own functions cannot be asked of a number that is not known yet."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        value, drawn = loss.item(), np.random.beta(1.0, 1.0)
        if not isfinite(value) or math.isnan(loss) or np.isnan(value) or not np.isfinite(float(loss)):
            raise ValueError(value)
        if math.isclose(value, 1.0, rel_tol=0.1) or math.isclose(value, 0.5):
            loss = loss * 0.9
        loss = loss * np.sqrt(1.0 - drawn) * np.exp(-value) * float(np.clip(value, 0.2, 0.9)) * math.hypot(value, drawn)
        whole, rest = divmod(int(batch[1].sum()), 3)
        self.log("value", np.log1p(value) + np.maximum(drawn, 0.5) + whole)
        told = copy.deepcopy({"value": value, "large": (value > 1.0) ^ (drawn > 0.5), "not": ~whole})
        loss = loss * told["value"] * (2 if told["large"] else 1) * told["not"]
        return loss * (1 + rest) if value or drawn else loss


class OfNumpy(Quiet):
    """Numbers of NumPy's: the tensors that torch makes of them, what they are, and divisions by zero."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.default_rng(3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        drawn, count, chosen = np.sqrt(random.random()), self.generator.integers(0, 2), np.random.choice([0.3, 0.7])
        values = [drawn, count, chosen, 2 * drawn, float(drawn), int(count), math.sqrt(drawn), np.isnan(drawn)]
        values += [np.mean([loss.item(), 1.0]), np.random.choice([True, False]), drawn > 0.5, count // 1]
        for number, value in enumerate(values):
            made = torch.tensor(value)
            loss = loss * (1 + made * 0.01 * number) * (1 + 0.1 * number * (made.dtype in (torch.float64, torch.bool)))
            loss = loss * (0.9 if isinstance(value, int) else 0.8) * (0.9 if value is True else 1.0)
            loss = loss * (0.99 if type(value) is float else 1.0)
        pair = torch.tensor([drawn, 0.5]) * loss + torch.tensor([0.5, count]) + torch.as_tensor([count, 1])
        with np.errstate(divide="ignore"):
            return pair.sum() * min(1.0 / np.floor(2 * drawn), 5.0)


@pytest.mark.parametrize("kind", [Kinds, Identity, Functions, OfNumpy])
def test_numbers_pass_for_pythons_own(kind: type[Quiet]) -> None:
    made: list[Any] = []

    def make() -> Quiet:
        made.append(kind())
        return made[-1]

    assert_as_eager(make, max_epochs=2)
    theirs, ours = made
    if isinstance(ours, Kinds):
        assert ours.kept == theirs.kept


@pytest.mark.parametrize("kind", [Identity, Functions])
def test_they_are_of_the_global_batch(kind: type[Quiet], two_ranks: RankPool) -> None:
    ours = two_ranks.run(run, kind, "spmd", 2, max_epochs=1)
    assert_compiled(*ours)
    assert_equals_one_device(ours, run(kind, "auto", data=lambda: InOrder(rows(), ROWS), max_epochs=1))


def is_true(value: Any) -> bool:
    """By identity."""
    return value is True


def test_a_yes_or_no_may_be_compared_by_is_in_another_module() -> None:
    assert_as_eager(lambda: asked_by_others.Decides(is_true), max_epochs=1)
