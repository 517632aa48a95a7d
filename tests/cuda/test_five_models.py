"""Five kinds of model on GPUs that are not there: captured, expanded, arranged, cut into phases on two devices."""

from __future__ import annotations

import functools

import pytest

from tests.cuda.facts import Facts, facts_of_ranks
from tests.cuda.models import MODELS
from tests.cuda.ranks import Wanted
from tests.helpers.fake_cuda.lane import Lane


@functools.cache
def _ranks(lane: Lane, model: str) -> list[Facts]:
    return lane.run(facts_of_ranks, Wanted(model))


@pytest.mark.parametrize("model", MODELS)
def test_ranks_agree_whatever_the_number_of_their_device(lane: Lane, model: str) -> None:
    first, second = _ranks(lane, model)
    assert (first.devices, second.devices) == ({"cuda:0"}, {"cuda:1"})
    assert first.vote == second.vote
    assert first.digests == second.digests
    assert first.operators == second.operators


@pytest.mark.parametrize("model", MODELS)
def test_every_model_is_one_graph_without_a_gathered_activation(lane: Lane, model: str) -> None:
    for rank in _ranks(lane, model):
        assert rank.fallbacks == []
        assert rank.activations == []


@pytest.mark.parametrize("model", MODELS)
def test_fused_updates_walk_lists_that_lie_alike(lane: Lane, model: str) -> None:
    for rank in _ranks(lane, model):
        lists, crossed = rank.walked
        assert lists > 0
        assert crossed == 0


@pytest.mark.parametrize("model", MODELS)
def test_no_phase_holds_more_than_the_iteration_and_what_the_last_one_left(lane: Lane, model: str) -> None:
    first, second = _ranks(lane, model)
    assert first.memory == second.memory
    whole, _ = first.memory["arranged"]
    left = first.memory.get("setup", (0, 0))[1]
    for phase, (peak, _) in first.memory.items():
        assert peak <= 1.1 * whole + left, f"{phase} holds {peak} bytes, the iteration {whole}, {left} are left over"
