"""What ZeRO is there for, counted from each graph: a rank's share of the state, and a few buckets."""

from __future__ import annotations

import ctypes
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_spmd import SPMDStrategy
from lightning_spmd.cost.memory import Liveness, liveness
from lightning_spmd.ir.node_info import Section, info_of, spec_of
from lightning_spmd.ir.placement import ShardAxis
from lightning_spmd.ir.signature import InputRole
from lightning_spmd.ir.steps import ShardedStep, Variant
from lightning_spmd.parallel.parallel_plan import data_parallel_plan
from lightning_spmd.report.peak_memory import PeakMemory
from lightning_spmd.stages import BuildOptions, build
from lightning_spmd.stages.capture.batch.batch import Batch
from tests.helpers.ranks import RankPool
from tests.helpers.simulated_training import SimulatedTraining, Step
from tests.helpers.training import QUIET

M_MMAP_THRESHOLD = -3  # of malloc.h
LAYERS, WIDTH, ROWS = 12, 1024, 2


def _layers(width: int) -> nn.Sequential:
    return nn.Sequential(*(m for _ in range(LAYERS) for m in (nn.Linear(width, width, bias=False), nn.ReLU())))


def _first_rank(plan: str, ranks: int, width: int, bucket_mib: float | str = "auto") -> ShardedStep:
    """The program of the first of so many ranks."""
    module = Step(_layers(width), lambda m, x, y: (m(x) - y).square().mean())
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    training = SimulatedTraining(module, optimizer, (1, 1), plan)
    training.rows = ranks * ROWS
    batch = Batch((torch.zeros(training.rows, width), torch.zeros(training.rows, width)))
    captured = training._captured(Variant(), batch)
    axis = ShardAxis("data_parallel", ranks, 0, "group", (ROWS,) * ranks)
    options = BuildOptions(bucket_size_mb=bucket_mib)
    return build(captured, (axis,), options, data_parallel_plan(plan, reduce_gradients=False)).main


def _count(step: ShardedStep) -> Liveness:
    return liveness(step.graph_module.graph, step.signature)


def _largest_bucket(step: ShardedStep) -> int:
    nodes = step.graph_module.graph.nodes
    moved = [n for n in nodes if "reduce_scatter" in str(n.target) or "all_gather" in str(n.target)]
    return max(max(spec_of(n).bytes, spec_of(n.all_input_nodes[0]).bytes) for n in moved)


def _activations(found: Liveness) -> int:
    """The most of what forward and backward keep, weights' gradients left out: those are in buckets."""
    at = [
        sum(s.bytes for s in found.storages if s.first <= i <= s.last and _is_activation(s.maker))
        for i in range(0, len(found.order), 3)
    ]
    return max(at)


def _is_activation(node: Any) -> bool:
    whole = len(spec_of(node).shape) == 2 and spec_of(node).shape[0] > ROWS
    return info_of(node).section in (Section.FORWARD, Section.BACKWARD) and not whole


@pytest.mark.parametrize("ranks", [2, 8, 1024])
@pytest.mark.parametrize("plan", ["zero2", "zero3"])
def test_a_step_under_zero_has_a_share_of_the_gradients_and_three_buckets(plan: str, ranks: int) -> None:
    step = _first_rank(plan, ranks, WIDTH)
    found = _count(step)
    parameters = LAYERS * WIDTH * WIDTH * 4
    assert found.inputs[InputRole.OPTIMIZER_STATE] <= 2 * parameters // ranks + 1024 * LAYERS
    assert found.inputs[InputRole.PARAMETER] == (parameters if plan == "zero2" else parameters // ranks)
    bound = parameters // ranks + 3 * _largest_bucket(step) + _activations(found)
    assert found.peak <= bound, f"{found.peak} bytes at {found.peak_at}, not {bound}"


@pytest.mark.parametrize("ranks", [2, 8])
def test_buckets_of_several_layers_take_a_fourth_one(ranks: int) -> None:
    """Of a gathered bucket each layer's weights are copied out, and a bucket is packed beside the gradients in it."""
    step = _first_rank("zero3", ranks, 64, 0.05)
    found = _count(step)
    assert len([n for n in step.graph_module.graph.nodes if "reduce_scatter" in str(n.target)]) == 4
    assert found.peak <= LAYERS * 64 * 64 * 4 // ranks + 4 * _largest_bucket(step) + _activations(found)


@pytest.mark.parametrize("plan", ["replicate", "zero3"])
def test_no_value_is_as_large_as_the_batch_of_all_ranks(plan: str) -> None:
    """The gradient of a mean is one number spread over the global batch; a rank makes its piece of it."""
    ranks, width = 1024, 256
    found = _count(_first_rank(plan, ranks, width))
    assert max(s.bytes for s in found.storages) < ranks * ROWS * width * 4


# ---------------------------------------------------------------- measured
class Layers(L.LightningModule):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            self.net = _layers(self.width)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), fused=True)


class Watch(L.Callback):
    """Highest memory of the last steps."""

    def __init__(self) -> None:
        self.memory = PeakMemory()

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 6:
            self.memory.begin(torch.device("cpu"))


def _measure(plan: str, width: int) -> tuple[int | None, int]:
    """(bytes measured, bytes counted) of training, in a process that has trained before."""
    _train(plan, 8)
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 17)  # what is freed goes back at once, else a heap keeps it
    return _train(plan, width)


def _train(plan: str, width: int) -> tuple[int | None, int]:
    watch = Watch()
    strategy = SPMDStrategy(data_parallel=plan, overlap_iterations=False)
    trainer = L.Trainer(**QUIET, devices=2, strategy=strategy, max_steps=10, callbacks=[watch])
    trainer.fit(Layers(width), DataLoader(TensorDataset(torch.randn(80, width)), 4))
    (executable,) = strategy._training.iteration.table.executables[-1:]
    return watch.memory.peak(), _count(executable.graphs.main).total


@pytest.mark.parametrize("width", [512, pytest.param(WIDTH, marks=pytest.mark.long)])
def test_measured_memory_is_what_was_counted(two_ranks: RankPool, width: int) -> None:
    """Twelve layers of 1024 x 1024, two ranks: 208.7 MB of 201.4 replicated, 115.4 of 109.1 under ZeRO 3."""
    found = {plan: two_ranks.run(_measure, plan, width) for plan in ("replicate", "zero3")}
    for plan, ranks in found.items():
        for measured, counted in ranks:
            if measured is not None:
                assert counted < measured + 2**20, f"{plan}: {measured} bytes measured, {counted} counted"
                assert measured < 1.1 * counted + 8 * 2**20, f"{plan}: {measured} bytes measured, {counted} counted"
    for (whole, counted_whole), (part, counted_part) in zip(*found.values(), strict=True):
        assert counted_part < 0.6 * counted_whole
        assert whole is None or part is None or part < 0.75 * whole
