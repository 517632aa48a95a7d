"""The promise of the project: N devices give what one device gives on the global batch."""

from __future__ import annotations

import itertools
from typing import Any

import lightning as L
import pytest
import torch

from tests.equality import table
from tests.helpers.modules import OPTIMIZERS
from tests.helpers.ranks import RankPool
from tests.helpers.training import (
    TrainingCase,
    assert_bitwise,
    assert_compiled,
    assert_equals_one_device,
    fit,
    one_device,
    train,
    train_on,
)

ACCEPTANCE_OPTIONS = ("plain", "accumulate", "clip_norm", "clip_value")
ACCEPTANCE_OPTIMIZERS = ("sgd", "adamw", "adamw_fused", "rmsprop")


_MODELS = ("gpt", "conv", "mlp")
_LOSSES = ("gpt_ignore_index", "gpt_smoothing", "gpt_weights", "gpt_everything")
_TIMES_TWO = (0, 2, 3, 1)
"""Multiplication by an element of the field of four in which addition is ``^``."""
_ROWS = {
    (_MODELS[(option ^ optimizer) % 3], ACCEPTANCE_OPTIONS[option], ACCEPTANCE_OPTIMIZERS[optimizer]): (
        4 if option == _TIMES_TWO[optimizer] else 2
    )
    for option in range(4)
    for optimizer in range(4)
}
"""16 rows of (model, option, optimizer) with every pair of two values, and on how many ranks they run in the long
matrix: two Latin squares on each other. By default all run on two; four show more of plans (``test_plans.py``)."""
_ON_FOUR = ("conv", "clip_value", "adamw_fused")


def test_the_rows_cover_all_pairs() -> None:
    factors = [_MODELS, ACCEPTANCE_OPTIONS, ACCEPTANCE_OPTIMIZERS, (2, 4)]
    rows = [(*row, ranks) for row, ranks in _ROWS.items()]
    assert len(rows) == 16
    assert _ROWS[_ON_FOUR] == 4
    for one, other in itertools.combinations(range(4), 2):
        found = {(row[one], row[other]) for row in rows}
        assert found == set(itertools.product(factors[one], factors[other]))


def _product() -> list[object]:
    return [
        pytest.param(*row, marks=() if row in _ROWS else pytest.mark.long)
        for row in itertools.product(_MODELS, ACCEPTANCE_OPTIONS, ACCEPTANCE_OPTIMIZERS)
    ]


@pytest.mark.parametrize(("model", "option", "optimizer"), _product())
def test_world_size_one_is_bitwise_the_eager_trainer(
    request: pytest.FixtureRequest, model: str, option: str, optimizer: str
) -> None:
    case = _case(request, TrainingCase(model, optimizer, option, shuffle=True))
    ours = train(case, "spmd")
    assert_compiled(ours)
    assert_bitwise(ours, one_device(case))


def _case(request: pytest.FixtureRequest, case: TrainingCase) -> TrainingCase:
    """The long matrix trains longer."""
    return case if request.node.get_closest_marker("long") is None else case.longer()


# Each of the other optimizers on the model where it does most: conv has parameters of 1, 2 and 4 dimensions. Of one
# group, which is less than two, one optimizer of each kind of update: lists, a fused kernel, a loop, Python counters.
_IN_ONE_GROUP = ("adam_foreach", "adamw_amsgrad_fused", "adamw_loop", "adamw_tensor_lr", "lion")


@pytest.mark.parametrize(
    ("optimizer", "groups"),
    [
        pytest.param(name, groups, marks=() if groups or name in _IN_ONE_GROUP else pytest.mark.long)
        for groups in (False, True)
        for name in OPTIMIZERS
        if name not in ACCEPTANCE_OPTIMIZERS
    ],
)
def test_every_optimizer_is_bitwise_the_eager_one(optimizer: str, groups: bool) -> None:
    # torch itself has no tensor lr beside a second group with a number: both groups take the tensor
    case = TrainingCase("conv", optimizer, batches=12, groups=groups)
    ours = train(case, "spmd")
    assert ours.mode == ("split" if optimizer == "lion" else "compiled")
    assert ours.captures > 0
    assert_bitwise(ours, one_device(case))


# With data of seed 1 this run passes a kink (ReLU or max-pool) within rounding: one device against itself, with weights
# changed by 6e-8 relative, then differs by the same 1.1e-3 in the loss.
_SEEDS = {("conv", "accumulate", "rmsprop"): 2}


def _product_on_ranks() -> list[object]:
    """(ranks, model, option, optimizer): the rows that cover all pairs, and the whole product on two ranks (long)."""
    found: list[object] = [
        pytest.param(2, *row, marks=() if row in _ROWS else pytest.mark.long)
        for row in itertools.product(_MODELS, ACCEPTANCE_OPTIONS, ACCEPTANCE_OPTIMIZERS)
    ]
    for row, ranks in _ROWS.items():
        if ranks == 4:
            found.append(pytest.param(4, *row, marks=() if row == _ON_FOUR else pytest.mark.long))
    for model in _LOSSES:
        found.append(pytest.param(2, model, "plain", "sgd", marks=() if model == _LOSSES[-1] else pytest.mark.long))
        found.append(pytest.param(4, model, "accumulate", "adamw", marks=pytest.mark.long))
    return found


@pytest.mark.parametrize(("ranks", "model", "option", "optimizer"), _product_on_ranks())
def test_several_ranks_equal_one_device(
    request: pytest.FixtureRequest, ranks: int, model: str, option: str, optimizer: str
) -> None:
    pool: RankPool = request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[ranks])
    seed = _SEEDS.get((model, option, optimizer), 1)
    # A convolution's bias in front of batch norm has a zero true gradient: rounding, which every optimizer that divides
    # by the gradient's size amplifies. RMSprop does so ten times as much as Adam: its average starts at 0, uncorrected.
    eps = 1e-4 if optimizer == "rmsprop" else 1e-5
    case = _case(request, TrainingCase(model, optimizer, option, dropout=0.0, eps=eps, seed=seed))
    # the recorder of losses runs between batches, and does not look at weights
    results = train_on(pool, case, {"overlap_iterations": True})
    assert_compiled(*results)
    assert_equals_one_device(results, one_device(case))


@pytest.mark.parametrize("model", [pytest.param("gpt", marks=pytest.mark.long), "conv"])
def test_dropout_on_two_ranks_is_reproducible_and_differs_a_shard(two_ranks: RankPool, model: str) -> None:
    """Two runs from one seed are the same bits; without dropout the losses are others."""
    case = TrainingCase(model, batches=4, dropout=0.3)
    first, second = train_on(two_ranks, case), train_on(two_ranks, case)
    assert_compiled(*first)
    for ours, again in zip(first, second, strict=True):
        assert_bitwise(ours, again)
    without = one_device(TrainingCase(model, batches=4, dropout=0.0)).losses
    assert first[0].losses != pytest.approx(without, rel=1e-3)


def test_rows_of_different_ranks_get_different_dropout_masks(two_ranks: RankPool) -> None:
    """Every row is the same, so rows of one mask would give one output."""
    for outputs in two_ranks.run(masks, 2):
        assert len({tuple(row) for row in outputs.tolist()}) == len(outputs) == 8


class ReturnsOutputs(L.LightningModule):
    """Logs the sum over the rows, weighted so that equal masks on two ranks would show."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(64))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        dropped = torch.nn.functional.dropout(batch * self.scale, 0.5)
        self.log("rows", dropped.sum())
        return {"loss": dropped.sum(), "dropped": self.all_gather(dropped).reshape(-1, 64).detach()}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Keeps(L.Callback):
    """The step's outputs."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.outputs = outputs["dropped"]


def masks(devices: int) -> torch.Tensor:
    """Outputs of all ranks' rows of one step on rows of ones, as gathered after it."""
    L.seed_everything(4)
    keeps = Keeps()
    data = torch.utils.data.DataLoader(torch.ones(8, 64), batch_size=8 // devices)  # type: ignore[arg-type]
    _, trainer = fit(ReturnsOutputs(), data, "spmd", devices, [keeps], max_steps=1)
    mine = keeps.outputs
    if len(mine) < 8:  # step outputs stay with their rank
        mine = trainer.strategy.all_gather(mine).reshape(-1, 64)
    return (mine != 0).float()


def test_what_ddp_gives_in_the_same_place(two_ranks: RankPool, capsys: pytest.CaptureFixture[str]) -> None:
    """Where DDP's mean of means is biased we are not; ``python -m tests.equality.table`` prints more rows."""
    for name, ours, theirs in table.rows(two_ranks, ("gpt, ignore_index", "conv net, batch norm"), batches=8):
        with capsys.disabled():
            print(f"\n{name}: spmd {ours}\n{' ' * len(name)}  ddp  {theirs}")
        assert ours.loss <= 1e-5
        assert ours.weights <= 1e-4
        assert theirs.loss > 1e-4
