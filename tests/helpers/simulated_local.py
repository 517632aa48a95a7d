"""Training on local batches on simulated ranks: each rank has a module, an optimizer and a graph of its own."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.ir.placement import Chunk
from lightning_spmd.ir.steps import CapturedStep, ShardedStep, Variant
from lightning_spmd.parallel.parallel_plan import OwnBatchPlan, data_parallel_plan
from lightning_spmd.stages import BuildOptions, build
from lightning_spmd.stages.capture.batch.batch import Batch
from lightning_spmd.stages.capture.once import FollowedOnce
from lightning_spmd.stages.capture.record.packing import parameter_names
from lightning_spmd.stages.capture.request import CaptureRequest, UpdateRequest
from lightning_spmd.stages.runtime.live_state import LiveState
from lightning_spmd.strategy.graphs.first_step import with_state
from tests.helpers.simulate import assembled, laid_out, meshes_for, run_locally


class LocalStep(nn.Module):
    """A module with a ``training_step`` on a batch of any kind."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.inner.loss(batch)  # type: ignore[operator]


class LocalRanks:
    """Ranks with batches of their own.

    Args:
        module: with a ``loss(batch)``; every rank has a copy.
        optimizer: makes one of parameters.
        ranks: their number.
        plan: of the data axis.
        clip: gradient clipping.
        options: of ``build``.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Callable[[Any], torch.optim.Optimizer],
        ranks: int = 2,
        plan: str = "replicate",
        clip: Callable[[Any], None] | None = None,
        options: BuildOptions | None = None,
    ) -> None:
        self.modules = [LocalStep(copy.deepcopy(module)) for _ in range(ranks)]
        self.optimizers = [optimizer(m.parameters()) for m in self.modules]
        self.axes = meshes_for({"data_parallel": (1,) * ranks})
        self.plan, self.clip, self.options = plan, clip, options or BuildOptions()
        self.trainer = SimpleNamespace(callbacks=[], lr_scheduler_configs=[], accumulate_grad_batches=1)
        self.steps: list[ShardedStep] = []
        self.captured: list[CapturedStep] = []

    def train(self, batches: Sequence[Any]) -> float:
        """One step, each rank on its batch; gives the loss, which is the same on all of them."""
        ranks = range(len(self.modules))
        self.captured = [self._capture(r, batches[r]) for r in ranks]
        plan = OwnBatchPlan(data_parallel_plan(self.plan, reduce_gradients=False))
        self.steps = [build(self.captured[r], self.axes[r], self.options, plan).main for r in ranks]
        lives = [self._live(r, batches[r]) for r in ranks]
        handed = [
            [laid_out(v, e, self.axes[r]) if isinstance(v, Tensor) else v for v, e in self._entries(r, lives[r])]
            for r in ranks
        ]
        outputs = run_locally(self.steps, handed)
        for entry in self.steps[0].signature.inputs:
            if not entry.mutated or not isinstance(entry.value, TensorSpec):
                continue
            places = [self._position(r, entry) for r in ranks]
            parts = [handed[r][place] for r, place in zip(ranks, places, strict=True)]
            for r, place in zip(ranks, places, strict=True):
                new = parts[r]
                if any(isinstance(p, Chunk) for p in entry.placements):
                    new = assembled(parts, entry.placements, self.axes[0])
                lives[r][place].detach().copy_(new)
        losses = [float(out[self._loss(r)]) for r, out in enumerate(outputs)]
        assert len(set(losses)) == 1, losses
        return losses[0]

    def _capture(self, rank: int, batch: Any) -> CapturedStep:
        module, optimizer = self.modules[rank], self.optimizers[rank]
        request = CaptureRequest(
            module, UpdateRequest(optimizer, self.clip), self.trainer, Variant(own_batch=True), Batch(batch),
            {"batch_idx": 0}, None, contextlib.nullcontext,
        )  # fmt: skip
        parameters = dict(module.named_parameters())
        step = FollowedOnce(request)
        return with_state(functools.partial(step.captured, request), optimizer, parameters, lambda _, v: v)

    def _live(self, rank: int, batch: Any) -> list[Any]:
        module, optimizer = self.modules[rank], self.optimizers[rank]
        state = LiveState(module, optimizer, parameter_names(module, optimizer), {"batch_idx": lambda: 0}, {}, None)
        tensors = Batch(batch).tensor_values
        captured = self.captured[rank]
        readers = state.readers(self.steps[rank].signature.inputs, captured.constants)
        return [tensors[r] if isinstance(r, int) else None if r is None else r() for r in readers]

    def _entries(self, rank: int, live: list[Any]) -> Any:
        return zip(live, self.steps[rank].signature.inputs, strict=True)

    def _position(self, rank: int, entry: Any) -> int:
        for i, other in enumerate(self.steps[rank].signature.inputs):
            if (other.role, other.key) == (entry.role, entry.key):
                return i
        raise AssertionError(f"rank {rank} has no {entry.name}")

    def _loss(self, rank: int) -> int:
        return next(i for i, e in enumerate(self.captured[rank].signature.outputs) if e.role == "loss")


def weighted_by_hand(
    module: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Any], sizes: Sequence[int], clip: Any = None
) -> float:
    """A step of one device that averages the ranks' gradients by their numbers of rows; gives the mean loss."""
    optimizer.zero_grad()
    total, loss = sum(sizes), 0.0
    for batch, size in zip(batches, sizes, strict=True):
        own = module.loss(batch)  # type: ignore[operator]
        (own * (size / total)).backward()
        loss += float(own.detach()) * size / total
    if clip is not None:
        clip(optimizer)
    optimizer.step()
    return loss
