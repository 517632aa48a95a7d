"""The arrow as code: capture → expand → passes → (phases → regions) → runtime."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning_spmd.ir.placement import ShardAxis
from lightning_spmd.ir.steps import CapturedStep, IterationGraphs, ShardedStep
from lightning_spmd.ir.verify import verify_captured, verify_sharded
from lightning_spmd.stages.expand import expand
from lightning_spmd.stages.passes import PASSES, GraphPass, PassState, run_passes
from lightning_spmd.stages.runtime.random_streams import switch_streams


@dataclass(frozen=True)
class BuildOptions:
    """How graphs are made from a captured step.

    Args:
        passes: the pass list.
        bucket_size_mb: cap of a communication bucket in MiB, or ``"auto"``.
    """

    passes: Sequence[GraphPass] = PASSES
    bucket_size_mb: float | str = "auto"


def build(
    captured: CapturedStep,
    axes: tuple[ShardAxis, ...],
    options: BuildOptions = BuildOptions(),
    on_stage: Callable[[str], None] = lambda _stage: None,
    on_result: Callable[[str, ShardedStep], None] = lambda _stage, _step: None,
) -> IterationGraphs:
    """Make each rank's runnable graphs of a captured step.

    Args:
        captured: the global-view graph.
        axes: the mesh as this rank sees it; empty for one device, whose graph is the captured one.
        options: pass list and bucket size.
        on_stage: told the name of each stage as it begins.
        on_result: called with the name of each stage and pass and the step after it (dumps).

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
    on_result("expanded", sharded)
    on_stage("passes")
    state = PassState(bucket_size_mb=options.bucket_size_mb)
    return IterationGraphs(main=run_passes(sharded, options.passes, state, on_result))
