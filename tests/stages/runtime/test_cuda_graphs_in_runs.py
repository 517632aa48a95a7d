"""CUDA graphs in whole runs: several shapes, hooks, callbacks that change weights, compiled regions, ranks."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_spmd.stages.runtime.cuda_graphs import cuda_graphs
from lightning_spmd.stages.runtime.regions import lowering as regions
from tests.cuda.models import LSTM
from tests.helpers.modules import samples
from tests.helpers.ranks import RankPool
from tests.helpers.training import Result, TrainingCase, assert_bitwise, fit, train
from tests.stages.runtime.test_cuda_graphs import RECORDED, Lane, Spoils, lane

__all__ = ["lane"]


def _both(lane: Lane, case: TrainingCase, callbacks: Any = lambda: [], **flags: Any) -> None:
    reference = train(case, callbacks=callbacks(), **flags)
    assert_bitwise(train(case, RECORDED, callbacks=[*callbacks(), Spoils(lane)], **flags), reference)
    assert not lane.given_up


def test_graphs_of_several_shapes_share_their_memory(lane: Lane) -> None:
    _both(lane, TrainingCase("gpt", "adamw_fused", batches=16, count=16 * 2 + 5))
    used = [program for program in lane.graphs.programs if program.replays]
    assert len(used) == 2
    assert all(program.times_recorded == 1 for program in used)


class Doubles(L.Callback):
    """Looks at gradients and changes them: training is in two graphs."""

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        for parameter in pl_module.parameters():
            parameter.grad *= 2.0


@pytest.mark.parametrize("option", ["plain", "accumulate"])
def test_hooks_on_gradients(lane: Lane, option: str) -> None:
    case = TrainingCase("gpt", "sgd", option, batches=15, count=16 * 30)
    reference = train(case, callbacks=[Doubles()])
    assert_bitwise(train(case, RECORDED, callbacks=[Doubles(), Spoils(lane)]), reference)
    assert lane.replays >= 6
    assert all(reason.startswith("nothing in it can be recorded") for reason in lane.given_up)  # the update alone


class _KeepsGradients(L.Callback):
    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self.seen.append(pl_module.head.weight.grad)


def test_gradients_that_somebody_keeps_stay_as_they_were(lane: Lane) -> None:
    case = TrainingCase("gpt", "sgd", batches=8, count=16 * 30)
    unrecorded, recorded = _KeepsGradients(), _KeepsGradients()
    train(case, callbacks=[unrecorded])
    train(case, RECORDED, callbacks=[recorded, Spoils(lane)])
    assert lane.replays >= 3
    assert all(torch.equal(a, b) for a, b in zip(recorded.seen, unrecorded.seen, strict=True))


@pytest.mark.parametrize(
    "callback",
    [lambda: StochasticWeightAveraging(0.01, swa_epoch_start=1), lambda: EMAWeightAveraging(decay=0.9)],
    ids=["swa", "ema"],
)
def test_callbacks_that_average_weights(lane: Lane, callback: Any) -> None:
    case = TrainingCase("conv", "sgd", batches=24, count=16 * 8)
    _both(lane, case, lambda: [callback()], limit_val_batches=1)
    assert lane.replays >= 3


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "16-mixed"])
def test_other_precisions(lane: Lane, precision: str) -> None:
    case = TrainingCase("gpt", "adamw", "clip_norm", batches=10, count=16 * 30, precision=precision)
    reference = train(case, {})
    assert_bitwise(train(case, RECORDED, callbacks=[Spoils(lane)]), reference)
    assert lane.replays >= 3


def test_a_recurrent_model(lane: Lane) -> None:
    def run(strategy: Any, callbacks: Any) -> Result:
        L.seed_everything(3, verbose=False)
        module = LSTM(optimizer="adamw_fused", dropout=0.1)
        with torch.backends.mkldnn.flags(enabled=False):
            return fit(module, DataLoader(samples("gpt", 160), 16), strategy, callbacks=callbacks, max_steps=10)[0]

    assert_bitwise(run(RECORDED, [Spoils(lane)]), run("auto", []))
    assert lane.replays >= 3


def test_what_lies_between_regions_is_recorded_with_them(lane: Lane, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    class Counted(regions.LoweredRegion):
        def __init__(self, region: Any) -> None:
            super().__init__(region)
            made.append(region.name)

    monkeypatch.setattr(regions, "LoweredRegion", Counted)
    monkeypatch.setattr(regions.CODES, "make", lambda region: True)
    # code that the recorder can see
    monkeypatch.setattr(regions.CODES, "known", lambda region: lambda inputs: region.function(*inputs))
    case = TrainingCase("gpt", "adamw_fused", batches=12, count=16 * 30)
    result = train(case, {"cuda_graphs": True, "lowering": "inductor"}, callbacks=[Spoils(lane)])
    assert_bitwise(result, train(case, {"lowering": "none"}))
    assert len(made) > 2
    assert lane.replays >= 3
    assert not lane.given_up
    assert not [
        why
        for program in lane.graphs.programs
        if program.plan
        for why in program.plan.left_out.values()
        if "host" in why
    ]


def _on_a_rank(case: TrainingCase, options: dict[str, Any], *, record: bool, validate: bool) -> tuple[Result, int]:
    found = Lane()
    flags = {"limit_val_batches": 2} if validate else {}
    with mock.patch.object(cuda_graphs, "of_device", found.of_device):
        callbacks = [Spoils(found)] if record else []
        result = train(case, {**options, "cuda_graphs": record}, 2, callbacks=callbacks, **flags)
    assert not found.given_up
    return result, found.replays


ON_RANKS = {
    "accumulate": (TrainingCase("gpt", "adamw_fused", "accumulate_clip", batches=15), {"overlap_iterations": True}),
    "evaluated": (TrainingCase("gpt", "sgd", batches=10, count=16 * 5), {"data_parallel": "zero3"}),
    "tensor": (
        TrainingCase("gpt", "sgd", "clip_norm", batches=10),
        {"tensor_parallel_size": 2, "tensor_parallel_plan": "auto"},
    ),
    "zero2": (TrainingCase("conv", "adamw", batches=10), {"data_parallel": "zero2"}),
}


@pytest.mark.parametrize("name", ON_RANKS)
def test_ranks(two_ranks: RankPool, name: str) -> None:
    case, options = ON_RANKS[name]
    case = case if name == "evaluated" else dataclasses.replace(case, count=16 * 30)
    plain = two_ranks.run(_on_a_rank, case, options, record=False, validate=name == "evaluated")
    recorded = two_ranks.run(_on_a_rank, case, options, record=True, validate=name == "evaluated")
    for (reference, _), (result, replays) in zip(plain, recorded, strict=True):
        assert_bitwise(result, reference)
        assert replays >= 3
