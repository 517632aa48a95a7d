"""Sequences shared by ranks: real ranks give what one device gives on the global batch."""

from __future__ import annotations

from typing import Any

import pytest

from tests.equality.test_plans import LAYERS
from tests.helpers.ranks import RankPool
from tests.helpers.training import (
    TrainingCase,
    assert_bitwise,
    assert_compiled,
    assert_equals_one_device,
    one_device,
    train_on,
)

PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "cp2": (2, {}),
    "cp2 dp2": (4, {}),
    "cp2 zero2": (4, {"data_parallel": "zero2"}),
    "cp2 zero3": (4, {"data_parallel": "zero3"}),
    "cp2 tp2": (4, {"tensor_parallel_size": 2}),
    "cp2 tp2 sequence": (4, {"tensor_parallel_size": 2, "sequence_parallel": True}),
}
"""Number of ranks, and options beside ``context_parallel_size=2``."""
_SHORT = {("cp2", "gpt_llama", "accumulate_clip"), ("cp2 zero3", "gpt_ignore_index", "accumulate_clip")}
_MODELS = {"gpt_llama": "adamw", "gpt_ignore_index": "adamw_fused"}


def _options(plan: str, model: str) -> dict[str, Any]:
    _, options = PLANS[plan]
    layers = {"tensor_parallel_plan": LAYERS["gpt_llama" if model == "gpt_llama" else "gpt_tied"]}
    return {"context_parallel_size": 2, **options, **(layers if "tp2" in plan else {})}


@pytest.mark.parametrize(
    ("plan", "model", "option"),
    [
        pytest.param(plan, model, option, marks=() if (plan, model, option) in _SHORT else pytest.mark.long)
        for plan in PLANS
        for model in _MODELS
        for option in ("plain", "accumulate_clip")
    ],
)
def test_training_equals_one_device(request: pytest.FixtureRequest, plan: str, model: str, option: str) -> None:
    ranks = request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[PLANS[plan][0]])
    case = TrainingCase(model, _MODELS[model], option, dropout=0.0, eps=1e-5)
    results = train_on(ranks, case, {**_options(plan, model), "overlap_iterations": True})
    assert_compiled(*results)
    assert_equals_one_device(results, one_device(case))


def test_dropout_is_reproducible(two_ranks: RankPool) -> None:
    case = TrainingCase("gpt", batches=10, dropout=0.3)
    options = _options("cp2", case.model)
    first, second = train_on(two_ranks, case, options), train_on(two_ranks, case, options)
    for ours, again in zip(first, second, strict=True):
        assert_bitwise(ours, again)
