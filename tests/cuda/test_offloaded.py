"""Activations of GPUs that wait in the host's memory: which graphs there are of it."""

from __future__ import annotations

import pytest

from tests.cuda.facts import facts_of_ranks
from tests.cuda.models import MODELS
from tests.cuda.ranks import Wanted
from tests.helpers.fake_cuda.lane import Lane

SHORT = ("gpt", "replicate", 2)
LONG = [(m, p, n) for m in MODELS for p, n in (("replicate", 1), ("replicate", 2), ("zero3", 2)) if (m, p, n) != SHORT]


@pytest.mark.parametrize(
    ("model", "plan", "count"), [SHORT, *[pytest.param(*case, marks=pytest.mark.long) for case in LONG]]
)
def test_every_rank_moves_the_same_and_holds_less(lane: Lane, model: str, plan: str, count: int) -> None:
    settings = {"dropout": 0.0, "width": 32} if model != "conv" else {"dropout": 0.0}
    wanted = Wanted(model, plan=plan, count=count, rows=8, settings=settings)
    plain = lane.run(facts_of_ranks, wanted)
    ours = lane.run(facts_of_ranks, Wanted(**{**vars(wanted), "offload": 0.5}))
    for rank, (mine, theirs) in enumerate(zip(ours, plain, strict=True)):
        assert mine.devices == {f"cuda:{rank}"}
        assert mine.digests == ours[0].digests
        counts = [mine.operators[f"lightning_spmd.{name}"] for name in ("offload", "fetch", "arrive_")]
        assert counts[0] == counts[1] == counts[2] > 0
        assert mine.nodes >= theirs.nodes + sum(counts)
        assert mine.memory["arranged"][0] < theirs.memory["arranged"][0]
