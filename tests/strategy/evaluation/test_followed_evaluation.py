"""Validation, test and predict steps that are followed: their Python runs in each, once, and keeps the rank's rows."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_spmd import SPMDStrategy
from tests.helpers.ranks import RankPool
from tests.helpers.training import QUIET
from tests.strategy.evaluations import ROWS, Everything, Loaders, assert_same_metrics, evaluate, joined, made, predict
from tests.strategy.small import Quiet


class Untidy(Quiet):
    """Counts, keeps lists, reads, decides, prints and draws."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0
        self.kept: dict[int, list[Any]] = collections.defaultdict(list)
        self.texts: list[str] = []

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.steps += 1
        losses = F.cross_entropy(self(batch[0]), batch[1], reduction="none")
        loss = losses.mean()
        if loss > 1.1:
            loss = loss * (1 + 0.5 * self.steps)
        self.texts.append(f"{loss.item():.4f}")
        self.kept[dataloader_idx].append((losses, batch[1]))
        self.log("loss", loss)
        self.log("steps", self.steps)
        return {"loss": loss, "rows": losses}

    def on_validation_epoch_end(self) -> None:
        mine = torch.cat([losses for kept in self.kept.values() for losses, _ in kept])
        self.log("rows", len(mine), reduce_fx="sum", sync_dist=True)
        self.log("mean of rows", mine.mean(), sync_dist=True)


class Same(Loaders):
    """Ranks that share layers have the same batches."""

    def _loader(self, count: int, seed: int) -> DataLoader[Any]:
        return DataLoader(made(count, seed), batch_size=ROWS)  # type: ignore[arg-type]


def _validate(make: Callable[[], Any], strategy: Any, devices: int, data: Any) -> tuple[Any, Any, Any]:
    L.seed_everything(11)
    module = make()
    trainer = L.Trainer(strategy=strategy, devices=devices, use_distributed_sampler=False, **QUIET)
    found = trainer.validate(module, data, verbose=False)
    return [dict(f) for f in found], module, trainer.strategy


def _untidy(settings: dict[str, Any], sizes: tuple[int, ...]) -> Any:
    data = Same(sizes) if "tensor_parallel_size" in settings else Loaders(sizes)
    found, module, strategy = _validate(Untidy, SPMDStrategy(**settings), 2, data)
    rows = [[len(losses) == len(y) for losses, y in kept] for kept in module.kept.values()]
    return found, module.steps, module.texts, rows, strategy.evaluation_captures


PLANS = [
    {"data_parallel": "zero3"},
    {"tensor_parallel_size": 2, "tensor_parallel_plan": {"first": "colwise", "last": "rowwise"}},
]


@pytest.mark.parametrize("settings", PLANS, ids=["zero3", "tensor parallel"])
def test_python_runs_once_in_each_step(two_ranks: RankPool, settings: dict[str, Any]) -> None:
    theirs, module, _ = _validate(Untidy, "auto", 1, Loaders((24, 16)))
    for found, steps, texts, rows, captures in two_ranks.run(_untidy, settings, (24, 16)):
        assert captures > 0
        assert (steps, texts) == (module.steps, module.texts)
        assert rows == [[True] * 3, [True] * 2]
        for mine, reference in zip(found, theirs, strict=True):
            assert mine == pytest.approx(reference, rel=1e-5)


class Checked(Everything):
    """Logs a number too; without dropout, for comparison across numbers of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Identity()

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        super().validation_step(batch, batch_idx)
        self.log("rows", float(len(batch[0])))


def _fit_with_sanity_check(strategy: Any, devices: int) -> dict[str, float]:
    L.seed_everything(11)
    flags = {**QUIET, "limit_val_batches": None, "num_sanity_val_steps": 1, "val_check_interval": 0.5, "max_epochs": 1}
    trainer = L.Trainer(strategy=strategy, devices=devices, use_distributed_sampler=False, **flags)
    trainer.fit(Checked(), Same((24,)))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def _fit_with_a_plan_that_is_found() -> dict[str, float]:
    return _fit_with_sanity_check(SPMDStrategy(tensor_parallel_size=2, tensor_parallel_plan="auto"), 2)


def test_a_sanity_check_before_a_plan_is_found_uses_the_same_keys(two_ranks: RankPool) -> None:
    """It runs on whole layers, and so eagerly; the validations behind it are graphs."""
    theirs = _fit_with_sanity_check("auto", 1)
    for ours in two_ranks.run(_fit_with_a_plan_that_is_found):
        assert ours == pytest.approx(theirs, rel=1e-5)


# ---------------------------------------------------------------------- what is a rank's own
class GivesNumbers(Everything):
    """Predictions that are numbers of Python's or NumPy's."""

    how = "tolist"

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        if self.how == "tolist":
            return logits.tolist()
        if self.how == "numpy":
            return logits.cpu().numpy().copy()
        return [[float(value) for value in row] for row in logits]


class GivesArrays(GivesNumbers):
    how = "numpy"


class GivesRowByRow(GivesNumbers):
    how = "row by row"


@pytest.mark.parametrize("make", [GivesNumbers, GivesArrays, GivesRowByRow])
def test_numbers_that_python_takes_of_rows_are_the_ranks_own(two_ranks: RankPool, make: Any) -> None:
    theirs = predict(make, False, sizes=(24,))
    results = two_ranks.run(predict, make, True, 2, sizes=(24,))
    for ours in results:
        assert ours.eager_steps == 3
        ours.predicted = [[torch.as_tensor(p) for p in ours.predicted[0]]]
    theirs.predicted = [[torch.as_tensor(p) for p in theirs.predicted[0]]]
    torch.testing.assert_close(joined(results, None), joined([theirs], None), rtol=1e-5, atol=1e-6)


class LooksLate(Quiet):
    """Keeps something, and then does what cannot be followed."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []
        self.steps = 0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.steps += 1
        loss = self.loss(batch)
        self.kept.append(loss)
        self.log("number", float(self.steps))
        if batch_idx == 1:
            loss.untyped_storage()
        self.log("loss", loss, sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.log("mean", torch.stack(self.kept).mean(), sync_dist=True)


def _late() -> Any:
    found, module, strategy = _validate(LooksLate, SPMDStrategy(data_parallel="zero3"), 2, Loaders((24,)))
    return found, module.steps, len(module.kept), strategy.evaluation_captures


def test_a_step_that_begins_anew_has_left_nothing_behind(two_ranks: RankPool) -> None:
    (theirs,), module, _ = _validate(LooksLate, "auto", 1, Loaders((24,)))
    for (found,), steps, kept, captures in two_ranks.run(_late):
        assert (steps, kept, captures) == (module.steps, len(module.kept), 1)
        assert found == pytest.approx(theirs, rel=1e-5)


class Counts(Everything):
    """Counts its steps, and keeps what it returned."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []
        self.steps = 0

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        logits = self(batch[0])
        self.kept.append(logits)
        return logits


def _counted() -> Any:
    L.seed_everything(11)
    module, strategy = Counts(), SPMDStrategy(data_parallel="zero3")
    trainer = L.Trainer(strategy=strategy, devices=2, use_distributed_sampler=False, **QUIET)
    found = trainer.predict(module, Loaders((25,)))
    return len(found or []), module.steps, len(module.kept), strategy.evaluation_captures


def test_a_step_for_other_ranks_leaves_nothing_behind(two_ranks: RankPool) -> None:
    """Of 25 rows rank 0 has four batches, rank 1 three."""
    assert two_ranks.run(_counted) == [(4, 4, 4, 2), (3, 3, 3, 2)]


# ---------------------------------------------------------------------- torch's switches
class Inferring(Everything):
    """Methods that switch gradients off themselves, and write into the batch."""

    @torch.inference_mode()
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        batch[0].mul_(2)
        loss = F.cross_entropy(self(batch[0] + 1), batch[1])
        loss *= 2
        if loss.item() > 0:
            loss += 1
        self.log("loss", loss)
        return {"loss": loss, "x": batch[0]}

    @torch.no_grad()
    def test_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("loss", F.cross_entropy(self(batch[0]), batch[1]).mul_(2))

    @torch.inference_mode(mode=False)
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.enable_grad():
            x = batch[0].clone().requires_grad_()
            (slope,) = torch.autograd.grad(self(x).square().sum(), x)
        return slope


@pytest.mark.parametrize("inference_mode", [True, False])
def test_switches_of_the_methods_own(two_ranks: RankPool, inference_mode: bool) -> None:
    flags = {"inference_mode": inference_mode}
    theirs = evaluate(Inferring, False, sizes=(24,), **flags)
    results = two_ranks.run(evaluate, Inferring, True, 2, sizes=(24,), **flags)
    for ours in [evaluate(Inferring, True, sizes=(24,), **flags), *results]:
        assert (ours.captures, ours.eager_steps) == (1, 0), ours.warnings
        assert_same_metrics(ours, theirs)
    torch.testing.assert_close(joined(results, None), joined([theirs], None), rtol=1e-5, atol=1e-6)
