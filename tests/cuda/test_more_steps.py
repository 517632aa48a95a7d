"""Steps that read values, optimize by hand, pause or have batches of their own, on GPUs that are not there."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.cuda.facts import Facts, facts_of_ranks
from tests.cuda.ranks import Wanted
from tests.cuda.recordings import recordings
from tests.cuda.steps import STEPS
from tests.helpers.fake_cuda.lane import Lane

FEW = [
    ("reads Branches", {"plan": "zero3"}),
    ("sizes of data Transcribes", {}),
    ("by hand Gan", {"plan": "zero3", "rematerialize": 0.5}),
    ("local", {}),
    ("pauses", {}),
    ("open sizes", {"bf16": True}),
    ("small layers", {"plan": "zero3"}),
]


def _goes_together(name: str, way: dict[str, Any]) -> bool:
    """By hand users clip themselves; with clipping, and under ZeRO 2, iterations do not pause."""
    if name == "pauses" and way.get("plan") == "zero2":
        return False
    return "clip" not in way or not (name.startswith("by hand") or name == "pauses")


WAYS: list[dict[str, Any]] = [
    {},
    {"plan": "zero2"},
    {"plan": "zero3"},
    {"bf16": True},
    {"clip": 0.5},
    {"plan": "zero3", "rematerialize": 0.5},
]
DECIDING = {n for n, step in STEPS.items() if step.decides}
MANY = [(n, w) for n in STEPS for w in WAYS if (n, w) not in FEW and _goes_together(n, w)]


@functools.cache
def _ranks(lane: Lane, name: str, way: tuple[tuple[str, Any], ...]) -> list[Facts]:
    return lane.run(facts_of_ranks, Wanted(name, **dict(way)))


@pytest.mark.parametrize(("name", "way"), [*FEW, *[pytest.param(*case, marks=pytest.mark.long) for case in MANY]])
def test_ranks_agree_on_every_graph_of_a_step(lane: Lane, name: str, way: dict[str, Any]) -> None:
    first, second = _ranks(lane, name, tuple(way.items()))
    assert (first.devices, second.devices) == ({"cuda:0"}, {"cuda:1"})
    assert first.exchanges == second.exchanges
    assert first.prefixes == second.prefixes
    assert bool(first.prefixes) == (name in DECIDING)
    assert first.general == (name == "open sizes")
    assert first.walked[1] == second.walked[1] == 0
    if not STEPS[name].variant.own_batch:  # those have graphs of their own
        assert first.vote == second.vote
        assert first.digests == second.digests
        assert first.operators == second.operators
    if not name.startswith("sizes of data"):  # what is chosen from is gathered
        assert first.fallbacks == second.fallbacks == []


@pytest.mark.parametrize("name", ["reads Branches", "sizes of data Masks"])
def test_values_are_read_between_recordings(lane: Lane, name: str) -> None:
    left_out = lane.run(recordings, Wanted(name, count=1)).left_out
    assert sum(number for (target, _), number in left_out.items() if target.startswith("hand_over")) == 3, left_out
