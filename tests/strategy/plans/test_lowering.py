"""``SPMDStrategy(lowering=...)``: training with compiled regions is training, and what is compiled is compiled once."""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lightning_spmd import ConfigurationError, SPMDStrategy
from lightning_spmd.stages.runtime.regions.code import CODES, Counts
from tests.helpers.ranks import RankPool
from tests.helpers.training import TrainingCase, assert_bitwise, assert_compiled, deviation, one_device, train, train_on

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler: g++")
CASE = TrainingCase("mlp", "adamw", batches=20, eps=1e-5)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_SPMD_CACHE", str(tmp_path / "cache"))
    CODES.forget()


@pytest.mark.parametrize("wrong", ["fast", True, None])
def test_what_lowering_may_be(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"lowering=.*give one of \['auto', 'inductor', 'none'\]"):
        SPMDStrategy(lowering=wrong)


def test_without_lowering_nothing_of_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [m for m in sys.modules if m.startswith("lightning_spmd.stages.runtime.regions")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lightning_spmd.stages.runtime.regions", None)  # importing it raises
    case = dataclasses.replace(CASE, batches=3)
    assert_compiled(train(case, SPMDStrategy(lowering="none")))


def close(ours: Any, reference: Any) -> None:
    found = deviation(ours, reference)
    assert max(found.loss, found.weights, found.logged, found.final) <= 1e-4, found


@needs_compiler
def test_lowered_training_is_training_and_a_second_start_compiles_nothing() -> None:
    lowered = train(CASE, SPMDStrategy(lowering="inductor"))
    close(lowered, one_device(CASE))
    compiled = CODES.counts.compiled
    assert compiled > 0
    assert (CODES.counts.loaded, CODES.counts.failed) == (0, 0)

    CODES.forget()
    assert_bitwise(train(CASE, SPMDStrategy(lowering="inductor")), lowered)
    assert CODES.counts == Counts(loaded=compiled)


@needs_compiler
@pytest.mark.matrix
@pytest.mark.parametrize("mode", ["inductor", "auto"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "adamw_fused"])
@pytest.mark.parametrize("model", ["gpt", "conv", "mlp"])
def test_lowered_training_is_within_1e_4(model: str, optimizer: str, mode: Any) -> None:
    case = TrainingCase(model, optimizer, batches=20, eps=None if optimizer == "sgd" else 1e-5)
    close(train(case, SPMDStrategy(lowering=mode)), one_device(case))
    assert CODES.counts.failed == 0


PLANS: dict[str, dict[str, Any]] = {
    "replicate": {},
    "zero3": {"data_parallel": "zero3"},
    "tp2": {"tensor_parallel_size": 2, "tensor_parallel_plan": "auto"},
}


def _start_anew(cache: str) -> None:
    os.environ["LIGHTNING_SPMD_CACHE"] = cache
    CODES.forget()


def _counts() -> Counts:
    return CODES.counts


_SOON = [("gpt", "zero3"), ("mlp", "replicate"), ("mlp", "zero3"), ("mlp", "tp2")]
_LATE = [("gpt", "replicate"), ("gpt", "tp2"), ("conv", "replicate"), ("conv", "zero3")]  # no layers of it are shared


@needs_compiler
@pytest.mark.parametrize(
    ("model", "plan"),
    [pytest.param(*row, marks=pytest.mark.matrix) for row in _SOON]
    + [pytest.param(*row, marks=pytest.mark.long) for row in _LATE],
)
def test_lowered_training_on_two_ranks_is_within_1e_4(
    two_ranks: RankPool, tmp_path: Path, model: str, plan: str
) -> None:
    case = TrainingCase(model, "adamw", batches=20, eps=1e-5)
    two_ranks.run(_start_anew, str(tmp_path / "cache"))
    reference = train_on(two_ranks, case, dict(PLANS[plan]))
    lowered = train_on(two_ranks, case, {**PLANS[plan], "lowering": "inductor"}, timeout=300)
    for ours, theirs in zip(lowered, reference, strict=True):
        close(ours, theirs)
    assert all(torch.equal(lowered[0].weights[k], lowered[1].weights[k]) for k in lowered[0].weights)
    _assert_shared(two_ranks)


def _assert_shared(ranks: RankPool) -> None:
    """Each of two ranks compiled a part of what both run."""
    one, other = ranks.run(_counts)
    assert one.failed == other.failed == 0
    assert min(one.compiled, other.compiled) > 0
    assert one.compiled + one.loaded == other.compiled + other.loaded
    assert one.loaded + other.loaded > 0


class _LooksAlone(L.Callback):
    """Rank 0 looks at a weight after some batches, and so finishes pending work without the others."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == 0 and batch_idx % 3 != 1:
            float(next(pl_module.parameters()).sum())


@needs_compiler
@pytest.mark.matrix
@pytest.mark.parametrize("mode", [pytest.param("inductor", marks=pytest.mark.long), "auto"])
def test_a_rank_that_finishes_alone_waits_for_nobody(two_ranks: RankPool, tmp_path: Path, mode: str) -> None:
    options = {"overlap_iterations": True, "bucket_size_mb": 0.0005}
    case = TrainingCase("mlp", "adamw", batches=20, eps=1e-5)
    two_ranks.run(_start_anew, str(tmp_path / "cache"))
    reference = train_on(two_ranks, case, options)
    lowered = train_on(two_ranks, case, {**options, "lowering": mode}, callbacks=[_LooksAlone()], timeout=120)
    for ours, theirs in zip(lowered, reference, strict=True):
        close(ours, theirs)
    assert all(torch.equal(lowered[0].weights[k], lowered[1].weights[k]) for k in lowered[0].weights)
    if mode == "inductor":  # "auto" compiles what pays
        _assert_shared(two_ranks)


@needs_compiler
@pytest.mark.long
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_lowered_training_in_other_precisions(precision: str) -> None:
    case = dataclasses.replace(CASE, model="gpt", precision=precision, optimizer="sgd")
    lowered = train(case, SPMDStrategy(lowering="inductor"))
    found = deviation(lowered, one_device(case))
    assert found.loss <= (1e-8 if precision == "64-true" else 2e-2), found
    assert CODES.counts.failed == 0


class _Trace(L.Callback):
    """Profiles the last batch."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
            self.profiler.__enter__()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            self.profiler.__exit__(None, None, None)


@needs_compiler
@pytest.mark.matrix
def test_a_trace_names_regions_and_their_modules() -> None:
    from tests.helpers.modules import samples
    from tests.helpers.training import InOrder, fit

    case, trace = dataclasses.replace(CASE, batches=4), _Trace()
    data = InOrder(samples(case.model, case.count, case.seed), case.rows)
    fit(case.module(), data, SPMDStrategy(lowering="inductor"), callbacks=[trace], **case.flags())
    names = [event.name for event in trace.profiler.events() if event.name.startswith("region_")]
    assert names
    assert all(" forward" in name or " backward" in name for name in names)
