"""The live tensors and numbers behind a graph's inputs, and the build options that follow from them."""

from __future__ import annotations

import dataclasses
from collections.abc import MutableMapping

from torch import Tensor

from lightning_spmd.errors import CannotShowError, CaptureError
from lightning_spmd.ir.reads import checks_of
from lightning_spmd.ir.steps import CapturedStep
from lightning_spmd.parallel.state import StateMesh
from lightning_spmd.stages import BuildOptions
from lightning_spmd.stages.capture.record.packing import parameter_names
from lightning_spmd.stages.runtime.live_state import LiveState
from lightning_spmd.strategy.graphs.run_context import RunContext
from lightning_spmd.strategy.state.memory import has_shared_writes


def live_state(
    context: RunContext,
    captured: CapturedStep,
    gradients: MutableMapping[str, Tensor],
    mesh: StateMesh | None,
) -> LiveState:
    """The live objects behind the inputs of a captured graph.

    Args:
        context: the context of the run's graphs.
        captured: the graph.
        gradients: accumulated gradients of earlier micro-batches, by name. The dictionary is read in each step.
        mesh: how state is sharded between iterations; None on one device.
    """
    return LiveState(
        context.module,
        context.optimizer,
        parameter_names(context.module, context.optimizer),
        captured.host_values,
        gradients,
        context.streams,
        None if mesh is None else mesh.wrap,
        None if mesh is None else mesh.shard,
        context.scaler.tensor,
        captured.named,
    )


def options_of(context: RunContext, captured: CapturedStep, state: LiveState, in_order: bool) -> BuildOptions:
    """The options to build this step with. Passes assume that inputs share no memory; on one device they may."""
    options = context.options
    decides = bool(checks_of(captured.graph_module.graph))
    if decides and captured.variant.pauses:
        raise CannotShowError("a tensor's value decides something")
    if captured.variant.own_batch:  # ranks measure other graphs, and would decide otherwise
        return dataclasses.replace(options, overlap_iterations=False, in_order=in_order)
    if context.mesh is not None:
        return options
    readers = zip(captured.signature.inputs, state.readers(captured.signature.inputs, captured.constants), strict=True)
    live = [(entry, read()) for entry, read in readers if callable(read)]
    apart = not has_shared_writes([entry for entry, _ in live], [value for _, value in live])
    if not apart and decides:
        raise CaptureError("a tensor's value decides something, and inputs of the step share memory that is written")
    return options if apart else dataclasses.replace(options, passes=())
