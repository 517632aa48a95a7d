"""What ``rematerialize`` frees, counted and measured, on a GPT of eight layers."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_spmd import SPMDStrategy
from lightning_spmd.cost.memory import liveness
from lightning_spmd.ir.steps import CapturedStep, ShardedStep
from lightning_spmd.report.peak_memory import PeakMemory
from lightning_spmd.stages import BuildOptions, build
from lightning_spmd.stages.passes.remat.choice import choose
from lightning_spmd.stages.passes.remat.plan import Planner
from lightning_spmd.stages.passes.remat.values import Values
from tests.cost.test_memory import Allocations, _update
from tests.helpers.models import GPT
from tests.helpers.ranks import RankPool
from tests.helpers.tiny_capture import capture_module
from tests.helpers.training import fit

M_MMAP_THRESHOLD = -3  # of malloc.h


@functools.cache
def _gpt(dropout: float) -> tuple[CapturedStep, list[Tensor]]:
    def loss(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(module(x).flatten(0, -2), y)

    torch.manual_seed(0)
    batch = torch.randint(256, (16, 64)), torch.randint(256, (16 * 64,))
    return capture_module(GPT(8, 64, dropout=dropout), loss, batch, update=_update)


def _step(dropout: float, wanted: Any) -> ShardedStep:
    return build(_gpt(dropout)[0], (), BuildOptions(rematerialize=wanted)).main


def _measured(step: ShardedStep, live: list[Tensor]) -> int:
    run = Allocations(step.graph_module)
    run.run_on(*(t.clone() for t in live))
    return max(run.found.values())


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_a_share_of_the_activations_is_given_back_counted_and_measured(dropout: float, share: float) -> None:
    """0.5: 35.8 MiB at the peak of a step become 17.8, of which 34.8 and 16.8 are activations."""
    before, after = _step(dropout, None), _step(dropout, share)
    activations = Planner(Values(before)).plan(()).peak
    peaks = [liveness(s.graph_module.graph, s.signature).peak for s in (before, after)]
    assert activations > 0.9 * peaks[0]
    assert peaks[0] - peaks[1] >= share * activations - 2**19, "what autograd makes beside them takes half a MiB more"
    assert [_measured(s, _gpt(dropout)[1]) for s in (before, after)] == peaks


def test_what_is_counted_while_choosing_is_what_is_alive_in_the_graph() -> None:
    values = Values(_step(0.1, None))
    planner = Planner(values)
    plan = choose(values, planner, planner.plan(()).peak // 2)
    step = _step(0.1, 0.5)
    old = {node.name for node in _gpt(0.1)[0].graph_module.graph.nodes}
    activations = {root.name for root in values.activations}
    found = liveness(step.graph_module.graph, step.signature)
    ours = [s for s in found.storages if s.maker.name not in old or _names(s.maker) & activations]
    alive = (sum(s.bytes for s in ours if s.first <= i <= s.last) for i in range(len(found.order)))
    assert max(alive) == pytest.approx(plan.peak, rel=1e-3)


def _names(maker: Any) -> set[str]:
    return {maker.name, *(user.name for user in maker.users)}


# ---------------------------------------------------------------- on two ranks
class Measured(L.LightningModule):
    """Eight layers whose activations are much more than their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = GPT(8, 64)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.gpt(batch[0]).flatten(0, 1), batch[1].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), fused=True)


class Watch(L.Callback):
    """Highest memory of the last steps."""

    def __init__(self) -> None:
        self.memory: PeakMemory | None = None

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 6:
            self.memory = PeakMemory()
            self.memory.begin(torch.device("cpu"))


def _grown(plan: str) -> tuple[list[int | None], list[list[float]]]:
    """Bytes by which two trainings grow, without and with the option, and their losses."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 17)  # what is freed goes back at once, else a heap keeps it
    grown, losses = [], []
    data = TensorDataset(
        *(torch.randint(256, (20 * 64, 64), generator=torch.Generator().manual_seed(i)) for i in (0, 1))
    )
    for share in (None, 0.5):
        L.seed_everything(1, verbose=False)
        watch = Watch()
        strategy = SPMDStrategy(data_parallel=plan, overlap_iterations=False, rematerialize=share)  # type: ignore[arg-type]
        result, _ = fit(Measured(), DataLoader(data, 32), strategy, 2, callbacks=[watch], max_steps=10)
        grown.append(None if watch.memory is None else watch.memory.peak())
        losses.append(result.losses)
    return grown, losses


@pytest.mark.long
@pytest.mark.parametrize("plan", ["replicate", "zero3"])
def test_two_ranks_give_half_of_it_back(two_ranks: RankPool, plan: str) -> None:
    """69.5 MiB of activations a rank."""
    activations = 2 * Planner(Values(_step(0.0, None))).plan(()).peak
    for (whole, half), losses in two_ranks.run(_grown, plan):
        assert losses[0] == losses[1]
        if whole is not None and half is not None:
            assert whole > 0.9 * activations
            assert whole - half > 0.45 * activations, f"{whole} bytes became {half}"
