"""Activations made again inside of regions that Inductor compiles: training stays training, memory stays given back."""

from __future__ import annotations

import shutil
from pathlib import Path

import lightning as L
import pytest

from lightning_spmd import SPMDStrategy
from lightning_spmd.cost.memory import liveness
from tests.helpers.modules import samples
from tests.helpers.training import InOrder, TrainingCase, deviation, fit, one_device

CASE = TrainingCase("gpt", "adamw", batches=12, dropout=0.0, eps=1e-5)


class CountPeak(L.Callback):
    """The most bytes alive in the graph that regions are made of."""

    counted = 0

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        executable = trainer.strategy._training.iteration.table.executables[-1]  # type: ignore[attr-defined]
        main = executable.graphs.main
        self.counted = liveness(main.graph_module.graph, main.signature).peak


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler: g++")
def test_compiled_regions_train_with_activations_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config

    monkeypatch.setenv("LIGHTNING_SPMD_CACHE", str(tmp_path / "cache"))
    peaks = []
    with config.patch({"cpp.vec_isa_ok": True}):
        for share in (None, 0.5):
            count = CountPeak()
            strategy = SPMDStrategy(lowering="inductor", rematerialize=share)
            data = InOrder(samples(CASE.model, CASE.count, CASE.seed), CASE.rows)
            result, _ = fit(CASE.module(), data, strategy, callbacks=[count], **CASE.flags())
            found = deviation(result, one_device(CASE))
            assert max(found.loss, found.weights, found.logged, found.final) <= 1e-4, found
            peaks.append(count.counted)
    assert peaks[1] < peaks[0]
