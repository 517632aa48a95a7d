"""The promise of the project: N devices give what one device gives on the global batch."""

from __future__ import annotations

import pytest

from tests.helpers.modules import OPTIMIZERS
from tests.helpers.ranks import RankPool
from tests.helpers.training import (
    OPTIONS,
    TrainingCase,
    assert_bitwise,
    assert_compiled,
    assert_equals_one_device,
    one_device,
    train,
    train_on,
)

ACCEPTANCE_OPTIONS = ("plain", "accumulate", "clip_norm", "clip_value")
ACCEPTANCE_OPTIMIZERS = ("sgd", "adamw", "adamw_fused", "rmsprop")


@pytest.mark.parametrize("optimizer", ACCEPTANCE_OPTIMIZERS)
@pytest.mark.parametrize("option", ACCEPTANCE_OPTIONS)
@pytest.mark.parametrize("model", ["gpt", "conv", "mlp"])
def test_world_size_one_is_bitwise_the_eager_trainer(model: str, option: str, optimizer: str) -> None:
    case = TrainingCase(model, optimizer, option, shuffle=True)
    ours = train(case, "spmd")
    assert_compiled(ours)
    assert_bitwise(ours, one_device(case))


# Each of the other optimizers on the model where it does most: conv has parameters of 1, 2 and 4 dimensions.
@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name not in ACCEPTANCE_OPTIMIZERS])
@pytest.mark.parametrize("groups", [False, True], ids=["one_group", "two_groups"])
def test_every_optimizer_is_bitwise_the_eager_one(optimizer: str, groups: bool) -> None:
    # torch itself has no tensor lr beside a second group with a number: both groups take the tensor
    case = TrainingCase("conv", optimizer, batches=20, count=16 * 9, groups=groups)
    ours = train(case, "spmd")
    assert_compiled(ours)
    assert_bitwise(ours, one_device(case))


# Two ranks take every combination of a model with an option, four ranks every optimizer; the whole product is `long`.
_OPTIMIZER_FOR = dict(zip(ACCEPTANCE_OPTIONS, ACCEPTANCE_OPTIMIZERS, strict=True))
_CHOSEN_FOR_TWO = {(m, o, _OPTIMIZER_FOR[o]) for m in ("gpt", "conv", "mlp") for o in ACCEPTANCE_OPTIONS}
_CHOSEN_FOR_FOUR = {
    ("gpt", "clip_norm", "adamw"), ("gpt", "plain", "rmsprop"), ("conv", "accumulate", "sgd"),
    ("conv", "clip_value", "adamw_fused"), ("mlp", "plain", "adamw"),
}  # fmt: skip
_LOSSES = ("gpt_ignore_index", "gpt_smoothing", "gpt_weights", "gpt_everything")


def _product() -> list[object]:
    """(ranks, model, option, optimizer) of the acceptance list; what is not chosen is marked ``long``."""
    found: list[object] = []
    for ranks, chosen in ((2, _CHOSEN_FOR_TWO), (4, _CHOSEN_FOR_FOUR)):
        for model in ("gpt", "conv", "mlp", *_LOSSES):
            for option in ACCEPTANCE_OPTIONS:
                for optimizer in ACCEPTANCE_OPTIMIZERS:
                    short = (model, option, optimizer) in chosen or (ranks == 2 and model in _LOSSES and option == "plain" and optimizer == "sgd")
                    if model in _LOSSES and optimizer not in ("sgd", "adamw"):
                        continue
                    found.append(pytest.param(ranks, model, option, optimizer, marks=() if short else pytest.mark.long))
    return found


@pytest.mark.parametrize(("ranks", "model", "option", "optimizer"), _product())
def test_several_ranks_equal_one_device(
    request: pytest.FixtureRequest, ranks: int, model: str, option: str, optimizer: str
) -> None:
    pool: RankPool = request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[ranks])
    case = TrainingCase(model, optimizer, option, dropout=0.0, eps=1e-5)
    results = train_on(pool, case)
    assert_compiled(*results)
    assert_equals_one_device(results, one_device(case))
