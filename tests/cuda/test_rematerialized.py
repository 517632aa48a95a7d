"""Rematerialization in graphs for GPUs: what runs again there, and what must not."""

from __future__ import annotations

import pytest

from tests.cuda.models import MODELS
from tests.cuda.ranks import Wanted
from tests.cuda.rematerialized import again
from tests.helpers.fake_cuda.lane import Lane

# Of the activations, at most this part is left. cuDNN's LSTM draws, whatever its dropout is, and is not made again.
LEFT = {"gpt": 0.5, "llama": 0.55, "conv": 0.7, "lstm": 0.8, "experts": 0.5}
SHORT = [("gpt", 2, "replicate"), ("conv", 1, "replicate")]
LONG = [(m, n, p) for m in MODELS for n, p in ((1, "replicate"), (2, "zero3")) if (m, n, p) not in SHORT]


@pytest.mark.parametrize(
    ("model", "count", "plan"), [*SHORT, *[pytest.param(*case, marks=pytest.mark.long) for case in LONG]]
)
def test_on_gpus_bytes_are_given_back_and_nothing_is_drawn_or_moved_again(
    lane: Lane, model: str, count: int, plan: str
) -> None:
    ranks = lane.run(again, Wanted(model, count=count, plan=plan, settings={"dropout": 0.1}), 1.0)
    assert len({rank.digest for rank in ranks}) == 1
    for rank in ranks:
        before, after = rank.bytes
        assert after <= LEFT[model] * before
        assert rank.draws[0] == rank.draws[1]
        more = rank.collectives[1] - rank.collectives[0]
        assert all("all_gather" in name for name in more)
        assert not more or plan == "zero3"
        if model == "conv" and count == 1:
            assert rank.operators["aten.cudnn_batch_norm"] == 1
        if model in ("gpt", "llama"):
            assert rank.operators["aten._scaled_dot_product_flash_attention"] == 1
