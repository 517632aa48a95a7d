"""The loss in chunks in graphs for GPUs, with autocast and loss scaling."""

from __future__ import annotations

import pytest

from tests.cuda.chunked import in_chunks
from tests.cuda.ranks import Wanted
from tests.helpers.fake_cuda.lane import Lane


@pytest.mark.parametrize(
    ("count", "plan", "precision"), [(1, "replicate", "half"), (2, "zero3", "bf16"), (2, "replicate", "half")]
)
def test_graphs_for_gpus_have_chunks(lane: Lane, count: int, plan: str, precision: str) -> None:
    ranks = lane.run(in_chunks, Wanted("gpt", count=count, plan=plan, **{precision: True}))
    assert len({digest for _, digest in ranks}) == 1
    assert all("is computed in 4 chunks" in remark for remark, _ in ranks)
