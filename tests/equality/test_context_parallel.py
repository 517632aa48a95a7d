"""Sequences shared by ranks: real ranks give what one device gives on the global batch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

from lightning_spmd import SPMDStrategy
from tests.equality.test_plans import LAYERS
from tests.helpers.modules import GPT, VOCABULARY, samples
from tests.helpers.ranks import RankError, RankPool
from tests.helpers.training import (
    QUIET,
    InOrder,
    Result,
    TrainingCase,
    assert_bitwise,
    assert_compiled,
    assert_equals_one_device,
    fit,
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
_SHORT = {("cp2", "gpt_llama", "plain"), ("cp2 zero3", "gpt_ignore_index", "plain")}
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
    case = case if request.node.get_closest_marker("long") is None else case.longer()
    results = train_on(ranks, case, {**_options(plan, model), "overlap_iterations": True})
    assert_compiled(*results)
    assert_equals_one_device(results, one_device(case))


def test_dropout_is_reproducible(two_ranks: RankPool) -> None:
    case = TrainingCase("gpt", batches=3, dropout=0.3)
    options = _options("cp2", case.model)
    first, second = train_on(two_ranks, case, options), train_on(two_ranks, case, options)
    for ours, again in zip(first, second, strict=True):
        assert_bitwise(ours, again)


class Measured(GPT):
    """A language model that also counts right tokens with a metric."""

    def __init__(self) -> None:
        super().__init__(optimizer="adamw", dropout=0.0)
        self.accuracy = MulticlassAccuracy(VOCABULARY, average="micro")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        logits = self(batch[0])
        self.accuracy.update(logits.flatten(0, 1), batch[1].flatten())
        self.log("accuracy", self.accuracy)

    test_step = validation_step


def _evaluated(options: dict[str, Any] | None, devices: int) -> tuple[dict[str, float], list[Tensor], int]:
    """Metrics of a validation, and what predict_step returned."""
    L.seed_everything(3)
    strategy = "auto" if options is None else SPMDStrategy(**options)
    trainer = L.Trainer(strategy=strategy, devices=devices, use_distributed_sampler=False, **QUIET)
    module, data = Measured(), InOrder(samples("gpt", 40), 8)
    trainer.validate(module, data, verbose=False)
    found = {name: float(value) for name, value in trainer.callback_metrics.items()}
    predictions = trainer.predict(module, data)
    assert predictions is not None
    return found, predictions, getattr(trainer.strategy, "evaluation_captures", 0)


def test_evaluation_is_shared_and_counts_each_batch_once(two_ranks: RankPool) -> None:
    metrics, predictions, _ = _evaluated(None, 1)
    for found, predicted, captures in two_ranks.run(_evaluated, {"context_parallel_size": 2}, 2):
        assert found == pytest.approx(metrics, rel=1e-5)
        assert captures == 1  # graphs of the last method: predict_step
        assert all(torch.equal(a, b) for a, b in zip(predicted, predictions, strict=True))


def _resumed(folder: str, options: dict[str, Any], resume: str | None, devices: int) -> Result:
    case = TrainingCase("gpt", "adamw", count=16 * 2, dropout=0.0, eps=1e-5)
    saver = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    data = InOrder(samples(case.model, case.count), case.rows)
    flags = {"max_epochs": 2, "enable_checkpointing": True}
    return fit(case.module(), data, SPMDStrategy(**options), devices, [saver], resume, **flags)[0]


def test_a_checkpoint_goes_on_beside_other_plans(two_ranks: RankPool, tmp_path: Path) -> None:
    """Written where sequences are shared, read where state is, and the other way round."""
    plans = {"shared": {"context_parallel_size": 2}, "zero3": {"data_parallel": "zero3"}}
    whole = {n: two_ranks.run(_resumed, str(tmp_path / n), o, None, 2)[0] for n, o in plans.items()}
    for name, other in (("shared", "zero3"), ("zero3", "shared")):
        path = str(tmp_path / other / "epoch=0.ckpt")
        (resumed, _) = two_ranks.run(_resumed, str(tmp_path / f"{name} again"), plans[name], path, 2)
        assert resumed.losses == pytest.approx(whole[other].losses[2:], rel=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context_parallel_size": 3}, "context_parallel_size=3 does not divide the 2 devices"),
        (
            {"context_parallel_size": 2, "data_parallel_size": 2},
            "data_parallel_size=2 times context_parallel_size=2 is 4",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_named(two_ranks: RankPool, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RankError, match=message):
        two_ranks.run(_resumed, "", options, None, 2)


def _other_batches(devices: int) -> None:
    rank = int(os.environ["RANK"])
    data = DataLoader(samples("gpt", 16, seed=rank), batch_size=16)
    case = TrainingCase("gpt", batches=1)
    fit(case.module(), data, SPMDStrategy(context_parallel_size=2), devices, max_steps=1)


def test_other_batches_for_one_sequence_are_refused(two_ranks: RankPool) -> None:
    with pytest.raises(RankError, match="work on parts of the same sequences but hold different batches"):
        two_ranks.run(_other_batches, 2)
