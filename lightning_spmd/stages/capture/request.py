"""A request to capture a step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_spmd.ir.steps import Variant
from lightning_spmd.stages.capture.batch.batch import Batch
from lightning_spmd.stages.capture.follow.program import Program
from lightning_spmd.stages.capture.optimizer.bf16_updates import Updates
from lightning_spmd.stages.capture.sizes.other_sizes import OtherSizes


@dataclass(frozen=True)
class UpdateRequest:
    """What is captured of gradients and their update.

    Args:
        optimizer: the module's only one; None for a variant that is the step method alone.
        clip: called with the optimizer between backward and step; None for no clipping.
        loss_divisor: ``accumulate_grad_batches``.
        accumulators: names of the parameters that already hold a gradient (of earlier micro-batches, or ``p.grad``).
        scaler: gives the GradScaler, enabled, that loss and gradients go through, or None.
        device: where training is.
        bf16_updates: how weights of bfloat16 are updated.
    """

    optimizer: Optimizer | None
    clip: Callable[[Any], None] | None = None
    loss_divisor: int = 1
    accumulators: frozenset[str] = frozenset()
    scaler: Callable[[], Any] = lambda: None
    device: torch.device = torch.device("cpu")
    bf16_updates: Updates = "plain"


@dataclass
class CaptureRequest:
    """A request to capture a step.

    Args:
        module: the LightningModule.
        update: what is captured of gradients and their update.
        trainer: the Trainer, which the step method sees through a recording view.
        variant: part of the iteration.
        batch: this rank's batch; None for a variant without forward.
        arguments: the other arguments of the step method by name, in order (``batch_idx``, ``dataloader_idx``).
        rows: rows of the global batch; None on one device, where the batch is taken as it is.
        step_context: the precision plugin's ``train_step_context``, or the one of the step that is captured.
        tracing_context: entered while tracing, e.g. to replace ``strategy.all_gather``.
        came_late: says what came since the run began and keeps the step from being this graph, or None.
        sizes: with which sizes the batch is seen, where they are not its own.
        needed: parameters that get a gradient from another rank's own batch, whatever this one's reaches.
        program: the calls of a step that was followed; None: the step method is run to see them.
    """

    module: Any
    update: UpdateRequest
    trainer: Any
    variant: Variant
    batch: Batch | None
    arguments: dict[str, Any]
    rows: int | None
    step_context: Callable[[], contextlib.AbstractContextManager[Any]]
    tracing_context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    came_late: Callable[[], str | None] = lambda: None
    needed: frozenset[str] = frozenset()
    sizes: OtherSizes = OtherSizes({})
    program: Program | None = None

    @contextlib.contextmanager
    def surroundings(self) -> Iterator[None]:
        """A context that is entered while tracing."""
        with self.tracing_context():
            yield
