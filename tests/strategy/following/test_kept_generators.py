"""Generators that a module keeps go on where a checkpoint left them."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from lightning_spmd.strategy.state.kept_generators import pack_kept_generators, restore_kept_generators
from tests.helpers.training import InOrder, Result, assert_compiled, fit
from tests.strategy.small import ROWS, Quiet, rows


class Noise(nn.Module):
    """Draws from its own generator."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.default_rng(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.generator.uniform(0.5, 1.5)


class Draws(Quiet):
    """Of its own, of a submodule's, and in a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout, self.chance, self.old, self.factor = Noise(), random.Random(4), np.random.RandomState(5), 1.0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.factor = float(self.old.rand())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * self.chance.random() * self.factor


def _run(folder: Path, resume: Path | None) -> Result:
    L.seed_everything(11)
    saver = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    settings: dict[str, Any] = {"max_epochs": 3, "enable_checkpointing": True}
    return fit(Draws(), InOrder(rows(), ROWS), "spmd", 1, [saver], resume, **settings)[0]


def test_a_run_that_goes_on_draws_what_an_uninterrupted_one_draws(tmp_path: Path) -> None:
    whole = _run(tmp_path / "whole", None)
    resumed = _run(tmp_path / "again", tmp_path / "whole/epoch=0.ckpt")
    assert_compiled(whole, resumed)
    assert resumed.losses == whole.losses[-len(resumed.losses) :]
    assert all(torch.equal(resumed.weights[k], v) for k, v in whole.weights.items())


BITS = (np.random.PCG64, np.random.MT19937, np.random.Philox, np.random.SFC64, np.random.PCG64DXSM)


class Keeps(nn.Module):
    """Every kind of generator."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.child = nn.Linear(1, 1)
        self.child.chance = random.Random(seed)  # type: ignore[assignment]
        self.old, self.of_torch = np.random.RandomState(seed), torch.Generator().manual_seed(seed)
        for bits in BITS:
            setattr(self, bits.__name__, np.random.Generator(bits(seed)))

    def draws(self) -> list[Any]:
        """Two of each, one of which leaves half of a number behind."""
        own = [getattr(self, bits.__name__) for bits in BITS]
        first = [self.old.randn(), self.child.chance.gauss(0, 1), torch.rand((), generator=self.of_torch).item()]  # type: ignore[operator, union-attr]
        return [*first, *(int(g.integers(0, 9, dtype=np.int32)) for g in own), *(float(g.random()) for g in own)]


def test_states_are_plain_and_exact(tmp_path: Path) -> None:
    before, after = Keeps(1), Keeps(2)
    before.draws()
    torch.save(pack_kept_generators(before), tmp_path / "states")
    restore_kept_generators(torch.load(tmp_path / "states", weights_only=True), after)
    assert after.draws() == before.draws()


def test_generators_that_are_gone_or_of_another_kind_are_told() -> None:
    states, other = pack_kept_generators(Keeps(1)), Keeps(2)
    other.old = np.random.default_rng(1)  # type: ignore[assignment]
    del other.child.chance
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        restore_kept_generators(states, other)
    assert ["child.chance, old" in str(w.message) for w in told] == [True]
