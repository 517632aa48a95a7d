"""Values that Python reads on several ranks before the step has a graph: all ranks run the beginning of the step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_spmd.errors import CaptureError, SPMDError, portable
from lightning_spmd.ir.steps import CapturedStep
from lightning_spmd.stages import GraphMaker
from lightning_spmd.stages.runtime.executor import Executable
from lightning_spmd.stages.runtime.live_state import LiveState
from lightning_spmd.stages.runtime.trial_runs.trial_runs import FirstRunError
from lightning_spmd.stages.runtime.undo import random_numbers_kept
from lightning_spmd.strategy.graphs.run_context import RunContext, StepRequest


class Beginnings:
    """Graphs of beginnings of steps.

    Args:
        context: what the graphs of the run are made in.
        state_of: the live objects behind the inputs of a graph.
    """

    def __init__(self, context: RunContext, state_of: Callable[[CapturedStep], LiveState]) -> None:
        self._context = context
        self._state_of = state_of

    def built(self, capture: Callable[[], CapturedStep], request: StepRequest, split: tuple[int, ...]) -> Executable:
        """What runs the beginning of a step, for the values that Python reads; all ranks together.

        Args:
            capture: gives that beginning.
            request: the step.
            split: rows of the global batch by data rank.

        Raises:
            SPMDError: on all ranks; it cannot be built.
        """
        context, executable, problem = self._context, None, None
        try:
            prefix = capture()
            maker = GraphMaker(
                () if context.mesh is None else context.mesh.axes(split if request.batch is not None else ()),
                dataclasses.replace(context.options, passes=(), overlap_iterations=False),
                context.settings.ranks.plan(prefix.variant),
                on_fallback=lambda _line: None,
            )
            executable = Executable(prefix, maker.make(prefix), self._state_of(prefix))
        except SPMDError as error:
            problem = error
        control = context.control
        problems = [problem] if control is None else control.gather(None if problem is None else portable(problem))
        worst = next((p for p in problems if p is not None), None)
        if executable is None or worst is not None:
            raise worst or RuntimeError("unreachable: what could not be built has a reason")
        return executable

    def run(self, executable: Executable, request: StepRequest, place: str | None) -> Sequence[Any]:
        """What it gives; random numbers are those that the step itself will draw.

        Args:
            executable: the beginning of the step.
            request: the step.
            place: ``file:line`` that reads.

        Raises:
            CaptureError: it cannot be run.
        """
        context = self._context
        streams = context.streams
        tick = None if streams is None else streams.tick
        try:
            with random_numbers_kept(draws=streams is None, always=True):
                outputs, _ = executable.run(() if request.batch is None else request.batch.tensor_values)
        except FirstRunError as error:
            raise CaptureError(str(error), place) from error
        finally:
            if streams is not None and tick is not None:
                streams.tick = tick
        return outputs


def whole_batch(context: RunContext, request: StepRequest, split: tuple[int, ...]) -> Sequence[Tensor] | None:
    """The tensors of the global batch, the same on every rank; None where there is none.

    All ranks do this together.

    Args:
        context: of the run.
        request: the step.
        split: rows of the global batch by data rank.
    """
    batch, mesh, control = request.batch, context.mesh, context.control
    if batch is None or mesh is None or control is None:
        return None if batch is None else batch.tensor_values
    whole = [batch.is_shared(i) or batch.values[i].shape[0] == sum(split) for i in batch.tensors]
    own = [None if w else t.detach().cpu() for w, t in zip(whole, batch.tensor_values, strict=True)]
    parts = dict(reversed(control.gather((mesh.batch_rank, own))))
    in_order = [parts[rank] for rank in sorted(parts)]
    return [
        tensor if w else torch.cat([part[i] for part in in_order]).to(tensor.device)
        for i, (w, tensor) in enumerate(zip(whole, batch.tensor_values, strict=True))
    ]
