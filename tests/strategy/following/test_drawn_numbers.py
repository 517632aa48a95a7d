"""Random numbers that a step draws from Python and NumPy: drawn anew in each run, as the step itself would."""

from __future__ import annotations

import random
from random import uniform
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from numpy.random import beta
from torch import nn
from torch.nn import functional as F

from tests.helpers.ranks import RankPool
from tests.helpers.training import InOrder, Result, assert_compiled, assert_equals_one_device
from tests.strategy.small import ROWS, Quiet, assert_as_eager, rows, run


class Numbers(Quiet):
    """Numbers that multiply, and one that is logged."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch) * random.random() + 0.1 * uniform(0.5, 1.5) * self.last.bias.square().sum()
        self.log("drawn", random.gauss(0.0, 1.0))
        self.log("even", float(np.random.rand() < 0.5))
        return loss * np.random.randint(1, 4) * random.choice([1.0, 2.0])


class Mixup(Quiet):
    """Mixup, in the words of its authors."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        (x, y), share = batch, np.random.beta(0.4, 0.4)
        order = torch.from_numpy(np.random.permutation(len(x)))
        scores = self(share * x + (1 - share) * x[order])
        return share * F.cross_entropy(scores, y) + (1 - share) * F.cross_entropy(scores, y[order])


class Decides(Quiet):
    """What is drawn depends on what was drawn before, and on the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        if random.random() < 0.5:
            x = x + float(np.random.normal()) * 0.1
        loss = F.cross_entropy(self(x), y)
        if loss > 1.1:
            loss = loss * random.uniform(0.5, 1.0)
        return loss


class Chooses(Quiet):
    """A layer that is chosen, and a crop."""

    def __init__(self) -> None:
        super().__init__()
        self.others = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, begin = random.choice(list(self.others))(batch[0]), np.random.randint(0, 2)
        return F.cross_entropy(self(x), batch[1]) + x[:, begin : begin + 2].square().mean()


class Arrays(Quiet):
    """Arrays of noise, computed with and handed to torch in three ways."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        noise = torch.from_numpy((0.1 * np.random.randn(*x.shape) + 1).astype(np.float32))
        scale = torch.as_tensor(np.random.uniform(0.5, 1.5, size=6), dtype=torch.float32)
        kept = np.random.permutation(len(x))[:4]
        shares = np.random.dirichlet([1.0, 1.0, 1.0])
        loss = F.cross_entropy(self(x * noise * scale), y, weight=torch.tensor(shares).float() + 0.1)
        return loss + x[kept].mean() * self.first.weight.sum() * float(shares[0])


class Generators(Quiet):
    """Generators of the module's own, one of which is replaced in mid-run."""

    def __init__(self) -> None:
        super().__init__()
        self.of_numpy, self.old = np.random.default_rng(3), np.random.RandomState(5)
        self.of_python = random.Random(4)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch) * self.of_numpy.random() * self.old.rand()
        return loss * self.of_python.choice([0.5, 2.0]) * beta(1.0, 2.0)

    def on_train_epoch_end(self) -> None:
        self.of_numpy = np.random.default_rng(self.current_epoch)


KINDS = [Numbers, Mixup, Decides, Chooses, Arrays, Generators]


class Left(L.Callback):
    """Keeps where a run leaves the generators."""

    def __init__(self, states: list[Any]) -> None:
        self.states = states

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        _, numbers, *rest = np.random.get_state()
        self.states.append((random.getstate(), numbers.tolist(), rest))


@pytest.mark.parametrize("kind", KINDS)
def test_draws_are_eagers(kind: type[Quiet]) -> None:
    """Bitwise, and the generators end where eager training leaves them."""
    states: list[Any] = []
    assert_as_eager(kind, callbacks=lambda: [Left(states)], max_epochs=4)
    assert states[0] == states[1]


class Seeds(L.Callback):
    """Lets the generators of each rank begin as no other rank's do."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        random.seed(trainer.global_rank)
        np.random.seed(trainer.global_rank)


def on_ranks(kind: type[Quiet], strategy: str, devices: int) -> Result:
    begins = range(0, len(rows()), ROWS)
    as_on_ranks = [rows()[begin + row] for begin in begins for row in (*range(0, ROWS, 2), *range(1, ROWS, 2))]
    data = None if devices > 1 else lambda: InOrder(as_on_ranks, ROWS, shuffle=False)
    return run(kind, strategy, devices, data=data, callbacks=lambda: [Seeds()], max_epochs=2)


@pytest.mark.parametrize("kind", [Decides, Arrays])
def test_all_ranks_draw_what_rank_0_draws(kind: type[Quiet], two_ranks: RankPool) -> None:
    ours = two_ranks.run(on_ranks, kind, "spmd", 2)
    assert_compiled(*ours)
    assert_equals_one_device(ours, on_ranks(kind, "auto", 1))
    (told,) = [w for w in ours[0].warnings if "differ between the ranks" in w]
    assert "rank 0's" in told


class Shuffles(Quiet):
    """What is drawn is no number."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        factor, order = random.random(), np.array([1.0, 2.0])
        np.random.shuffle(order)
        return self.loss(batch) * float(order[0]) * factor


def test_an_array_may_be_shuffled() -> None:
    states: list[Any] = []
    assert_as_eager(Shuffles, callbacks=lambda: [Left(states)])
    assert states[0] == states[1]
