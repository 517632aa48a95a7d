"""Clipping and updates on GPUs are a few kernels on lists, whatever the plan."""

from __future__ import annotations

import pytest

from tests.cuda.facts import facts
from tests.cuda.ranks import Wanted
from tests.helpers.fake_cuda.lane import Lane


@pytest.mark.parametrize(("plan", "count"), [("replicate", 1), ("replicate", 2), ("zero3", 2)])
def test_clipping_is_as_many_kernels_as_in_eager_training(lane: Lane, plan: str, count: int) -> None:
    found = lane.run(facts, Wanted("gpt", plan=plan, count=count, clip=0.5))
    captured = found.captured
    assert captured["aten._foreach_norm.Scalar"] == 1
    assert captured["aten.linalg_vector_norm"] == 1  # of the norms
    assert captured["aten._foreach_mul_.Tensor"] == 1
    assert found.operators["aten._foreach_norm.Scalar"] <= 2  # parameters that two ranks do not divide apart
    assert found.operators["aten.linalg_vector_norm"] == 1
    assert found.gathers.count("torch.float32") == len(found.gathers)
    assert not found.fallbacks


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adamw_fused", "rmsprop", "adagrad"])
def test_an_optimizer_that_asks_for_nothing_updates_lists(lane: Lane, optimizer: str) -> None:
    found = lane.run(facts, Wanted("gpt", optimizer=optimizer))
    lists, crossed = found.walked
    assert crossed == 0
    single = sum(count for name, count in found.operators.items() if name in _ONE_BY_ONE)
    assert single == 0, found.operators


_ONE_BY_ONE = {"aten.addcdiv_", "aten.lerp_.Scalar", "aten.addcmul_", "aten.sqrt_"}
