"""CUDA graphs of steps that optimize by hand: gradients that stay, weights that change in the middle."""

from __future__ import annotations

import pytest

from lightning_spmd import SPMDStrategy
from tests.helpers.by_hand import MODULES, assert_bitwise, fit, state_of
from tests.helpers.by_hand_rare import RARE
from tests.stages.runtime.test_cuda_graphs import RECORDED, Lane, Spoils, lane

__all__ = ["lane"]
ALL = {**MODULES, **RARE}


@pytest.mark.parametrize("name", ["Gan", "Accumulated", "ZeroedInPlace", "Penalized", "InHooks", "ChangesGradients"])
def test_recorded_steps_by_hand_are_bitwise_the_eager_trainer(lane: Lane, name: str) -> None:
    theirs = fit(ALL[name], "auto", batches=16)
    ours = fit(ALL[name], SPMDStrategy(**RECORDED), batches=16, callbacks=[Spoils(lane)])
    assert_bitwise(state_of(*ours), state_of(*theirs))
    assert lane.replays >= 3
    assert not lane.given_up
