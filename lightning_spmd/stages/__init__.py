"""The arrow as code: capture → expand → (passes → phases → regions) → runtime."""

from __future__ import annotations

from collections.abc import Callable

from lightning_spmd.ir.placement import ShardAxis
from lightning_spmd.ir.steps import CapturedStep, IterationGraphs, ShardedStep
from lightning_spmd.ir.verify import verify_captured, verify_sharded
from lightning_spmd.stages.expand import expand
from lightning_spmd.stages.runtime.random_streams import switch_streams


def build(
    captured: CapturedStep, axes: tuple[ShardAxis, ...], on_stage: Callable[[str], None] = lambda _: None
) -> IterationGraphs:
    """Make each rank's runnable graphs of a captured step.

    Args:
        captured: the global-view graph.
        axes: the mesh as this rank sees it; empty for one device, whose graph is the captured one.
        on_stage: told the name of each stage as it begins.

    Raises:
        ExpansionError: an operator could not be expressed on this rank.
        VerificationError: a graph broke an invariant.
    """
    verify_captured(captured)
    if not axes:
        return IterationGraphs(main=ShardedStep(captured.graph_module, captured.signature, ()))
    on_stage("expand")
    sharded = switch_streams(expand(captured, axes))
    verify_sharded(sharded)
    return IterationGraphs(main=sharded)
