"""Training on simulated ranks: the whole way from ``capture`` to the passes, step after step, in one process.

State is kept whole between steps, so that one object is compared with an eager twin; every rank's graph gets its part.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_spmd.ir.layout import in_layout
from lightning_spmd.ir.steps import CapturedStep, ShardedStep, Variant
from lightning_spmd.parallel.parallel_plan import ParallelPlan, data_parallel_plan
from lightning_spmd.stages import BuildOptions, build
from lightning_spmd.stages.capture.batch.batch import Batch
from lightning_spmd.stages.capture.once import FollowedOnce
from lightning_spmd.stages.capture.record.packing import parameter_names
from lightning_spmd.stages.capture.request import CaptureRequest, UpdateRequest
from lightning_spmd.stages.runtime.live_state import LiveState
from lightning_spmd.strategy.graphs.first_step import with_state
from tests.helpers.simulate import meshes_for, run_ranks

Clip = Callable[[Any], None]


class Step(nn.Module):
    """A module with a ``training_step`` of its own, as far as capture looks at a LightningModule."""

    def __init__(self, inner: nn.Module, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.inner, self.loss = inner, loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(self.inner, *batch)


@dataclass
class SimulatedTraining:
    """A module, its optimizer, and the graphs that train it.

    Args:
        module: with a ``training_step(batch, batch_idx)``.
        optimizer: over its parameters.
        split: rows of each rank, or mesh axis → rows.
        plan: name of a data-parallel plan, or a plan.
        options: of ``build``.
        clip: gradient clipping.
        accumulate: number of batches of a step.
    """

    module: nn.Module
    optimizer: Optimizer
    split: Sequence[int] | dict[str, Sequence[int]] = (2, 2)
    plan: str | ParallelPlan = "replicate"
    options: BuildOptions = BuildOptions()
    clip: Clip | None = None
    accumulate: int = 1
    gradients: dict[str, Tensor] = field(default_factory=dict)
    graphs: list[tuple[Variant, CapturedStep, list[ShardedStep]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.names = parameter_names(self.module, self.optimizer)
        mesh = self.split if isinstance(self.split, dict) else {"data_parallel": self.split}
        self.axes = meshes_for(mesh)
        self.rows = sum(mesh["data_parallel"])
        self.trainer = SimpleNamespace(callbacks=[], lr_scheduler_configs=[], accumulate_grad_batches=self.accumulate)
        self.batches = 0

    def train(self, batch: Sequence[Tensor]) -> float:
        """One micro-batch; gives its loss."""
        self.batches += 1
        variant = Variant(accumulated=bool(self.gradients), apply=self.batches % self.accumulate == 0)
        captured, steps = self._graph(variant, Batch(tuple(batch)))
        state = self._state()
        readers = state.readers(captured.signature.inputs, captured.constants)
        live = [batch[r] if isinstance(r, int) else r() for r in readers if r is not None]
        outputs, after = run_ranks(steps, live)
        for entry, value, new in zip(captured.signature.inputs, live, after, strict=True):
            if entry.mutated:
                value.detach().copy_(new)
        for position, write in state.writers(captured, steps[0]):
            value, spec = outputs[position], captured.signature.outputs[position].value
            write(in_layout(value, spec) if isinstance(value, Tensor) else value)
        if variant.apply:
            self.gradients.clear()
        return float(outputs[0])

    def _state(self) -> LiveState:
        hosts = {"batch_idx": lambda: 0}
        return LiveState(self.module, self.optimizer, self.names, hosts, self.gradients, None)

    def _graph(self, variant: Variant, batch: Batch) -> tuple[CapturedStep, list[ShardedStep]]:
        for known, captured, steps in self.graphs:
            if known == variant and captured.guards.failure(lambda: self._inputs(captured)) is None:  # noqa: B023
                return captured, steps
        captured = self._captured(variant, batch)
        plan = data_parallel_plan(self.plan, reduce_gradients=False) if isinstance(self.plan, str) else self.plan
        steps = [build(captured, axes, self.options, plan).main for axes in self.axes]
        self.graphs.append((variant, captured, steps))
        return captured, steps

    def _inputs(self, captured: CapturedStep) -> list[Any]:
        readers = self._state().readers(captured.signature.inputs, captured.constants)
        return [None if isinstance(r, int) or r is None else r() for r in readers]

    def _captured(self, variant: Variant, batch: Batch) -> CapturedStep:
        parameters = {name: p for p, name in ((p, self.names[id(p)]) for p in self._trained())}
        request = CaptureRequest(
            self.module,
            UpdateRequest(self.optimizer, self.clip, self.accumulate, frozenset(self.gradients)),
            self.trainer,
            variant,
            batch,
            {"batch_idx": 0},
            self.rows,
            contextlib.nullcontext,
        )
        step = FollowedOnce(request)
        capture = functools.partial(step.captured, request)
        return with_state(capture, self.optimizer, parameters, lambda _, v: v)

    def _trained(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]


def train_eagerly(
    module: nn.Module,
    optimizer: Optimizer,
    batches: Sequence[Sequence[Tensor]],
    clip: Clip | None = None,
    accumulate: int = 1,
) -> list[float]:
    """The same by plain PyTorch."""
    losses = []
    for number, batch in enumerate(batches):
        if number % accumulate == 0:
            optimizer.zero_grad()
        loss = module.training_step(tuple(batch), 0)  # type: ignore[operator]
        (loss / accumulate if accumulate > 1 else loss).backward()
        losses.append(float(loss.detach()))
        if (number + 1) % accumulate == 0:
            if clip is not None:
                clip(optimizer)
            optimizer.step()
    return losses


def largest_difference(module: nn.Module, optimizer: Optimizer, other: nn.Module, other_optimizer: Optimizer) -> str:
    """Where weights and optimizer state of two trainings differ most, relative to the largest element: text to sort."""
    pairs = {n: (p, q) for (n, p), q in zip(module.state_dict().items(), other.state_dict().values(), strict=True)}
    states = zip(optimizer.state_dict()["state"].items(), other_optimizer.state_dict()["state"].values(), strict=True)
    for (number, values), others in states:
        pairs |= {f"{number}/{k}": (v, others[k]) for k, v in values.items() if isinstance(v, Tensor)}
    found = {name: relative_difference(a, b) for name, (a, b) in pairs.items()}
    worst = max(found, key=found.__getitem__)
    return f"{found[worst]:.1e} in {worst}"


def relative_difference(tensor: Tensor, other: Tensor) -> float:
    """Largest difference over largest element."""
    if not tensor.numel():
        return 0.0
    scale = max(float(other.detach().abs().max()), 1e-2)
    return float((tensor.detach().double() - other.detach().double()).abs().max()) / scale
