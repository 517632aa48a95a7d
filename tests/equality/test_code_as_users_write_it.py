"""What users write, over fifty steps: values read in five ways, a GAN, WGAN-GP, and batches of molecules.

One rank is bitwise the eager Trainer; two ranks are one device, and with batches of their own DDP weighed by their
sizes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.helpers import by_hand
from tests.helpers.molecules import collate, molecules
from tests.helpers.ranks import RankPool
from tests.helpers.training import Result, assert_bitwise, assert_compiled, assert_equals_one_device, fit
from tests.strategy import local_cases
from tests.strategy.reads_and_sizes.test_reads import WAYS, _in_order
from tests.strategy.small import ROWS, Net, assert_as_eager, rows, run

STEPS = 50
GANS = ["Gan", "Penalized"]
"""Two networks in turn, and WGAN-GP with its gradient of a gradient."""


class Molecules(local_cases.Chemist):
    """Batches of four molecules, each with other numbers of atoms and bonds."""

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(molecules(4 * STEPS, seed=5), batch_size=4, collate_fn=collate)  # type: ignore[arg-type]


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_values_that_are_read_on_one_rank(way: type[Net]) -> None:
    ours = assert_as_eager(way, max_epochs=100, max_steps=STEPS)
    assert len(ours.losses) == STEPS


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_values_that_are_read_on_two_ranks(way: type[Net], two_ranks: RankPool) -> None:
    ours: list[Result] = two_ranks.run(run, way, "spmd", 2, max_epochs=100, max_steps=STEPS)
    assert_compiled(*ours)
    assert_equals_one_device(ours, run(way, "auto", data=_in_order, max_epochs=100, max_steps=STEPS))
    assert len(ours[0].losses) == STEPS > len(rows()) // ROWS  # it goes through the data several times


@pytest.mark.long
@pytest.mark.parametrize("name", GANS)
def test_gans_on_one_rank(name: str) -> None:
    theirs = by_hand.fit(by_hand.MODULES[name], "auto", batches=STEPS)
    ours = by_hand.fit(by_hand.MODULES[name], "spmd", batches=STEPS)
    assert ours[1].strategy.mode == "compiled"
    by_hand.assert_bitwise(by_hand.state_of(*ours), by_hand.state_of(*theirs))


@pytest.mark.long
@pytest.mark.parametrize("name", GANS)
def test_gans_on_two_ranks(name: str, two_ranks: RankPool) -> None:
    make = by_hand.MODULES[name]
    theirs = by_hand.state_of(*by_hand.fit(make, "auto", batches=STEPS, precision="64-true"))
    for state, mode, _ in two_ranks.run(by_hand.fit_on_ranks, make, {}, 2, batches=STEPS):
        assert mode == "compiled"
        by_hand.assert_close(state, theirs)


def test_molecules_on_one_rank() -> None:
    theirs, _ = fit(Molecules(), None, "auto", max_epochs=1)
    ours, _ = fit(Molecules(), None, "spmd", max_epochs=1)
    assert len(ours.losses) == STEPS
    assert_compiled(ours)
    assert_bitwise(ours, theirs)


def _molecules(steps: int) -> tuple[list[float], list[Tensor], str]:
    module = local_cases.Chemist(steps=steps)
    trainer, _ = local_cases.fit(module)
    return module.losses, local_cases.weights(module), str(trainer.strategy.mode)  # type: ignore[attr-defined]


@pytest.mark.long
def test_molecules_on_two_ranks(two_ranks: RankPool) -> None:
    losses, weights = local_cases.by_hand(steps=STEPS)
    for ours, mine, mode in two_ranks.run(_molecules, STEPS):
        assert mode == "compiled"
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(losses), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(mine, weights, rtol=1e-4, atol=1e-5)
