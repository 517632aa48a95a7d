"""The arrow as code: capture → expand → passes → phases → runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from lightning_spmd import _private_api as private
from lightning_spmd.ir.operators.packed_sums import sum_as_eager
from lightning_spmd.ir.placement import ShardAxis
from lightning_spmd.ir.reads import checks_of
from lightning_spmd.ir.signature import InputRole
from lightning_spmd.ir.steps import CapturedStep, IterationGraphs, ShardedStep, ShownGradients
from lightning_spmd.ir.verify import verify_captured, verify_sharded
from lightning_spmd.parallel.parallel_plan import ParallelPlan
from lightning_spmd.stages.expand import (
    LOSS_CHUNKS,
    announce,
    chunk_losses,
    expand,
    mark_counted,
    what_chunks_would_save,
)
from lightning_spmd.stages.expand.auto_plan import find_plan
from lightning_spmd.stages.passes import OFFLOAD_ACTIVATIONS, PASSES, REMATERIALIZE, GraphPass, PassState, run_passes
from lightning_spmd.stages.phases import arrange_undeferred, deferrable, make_phases
from lightning_spmd.stages.phases.pause import check_unwritten, hide_gradients, pausing
from lightning_spmd.stages.runtime.lowering import Lowering, LoweringContext, as_python
from lightning_spmd.stages.runtime.random_streams import switch_streams

__all__ = ["BuildOptions", "announce", "build", "build_for_counts", "find_plan", "finish", "lowering"]


@dataclass(frozen=True)
class BuildOptions:
    """How graphs are made from a captured step.

    Args:
        passes: the pass list.
        bucket_size_mb: cap of a communication bucket in MiB, or ``"auto"``.
        reduce_dtype: in which gradients travel, a name in ``passes.REDUCE_DTYPES``; None: as they are.
        overlap_iterations: whether the end of an iteration may run inside the next one; ``"auto"``: where it is faster.
        rematerialize: the share of the activations' bytes to give back, or as an integer the bytes to leave; None: all.
        offload_activations: as ``rematerialize``, for activations that go to the host's memory meanwhile; None: none.
        lowering: what makes callables of final graphs, one of ``stages.runtime.lowering.MODES``.
        cuda_graphs: whether the final graphs run as CUDA graphs on a GPU.
        in_order: gradients travel in the order of parameters, because ranks with other graphs make them in another one.
        loss_chunks: in how many chunks of rows losses are computed; None: as a whole.
        loss_bytes: instead, how many bytes such a chunk may take.
    """

    passes: Sequence[GraphPass] = PASSES
    bucket_size_mb: float | str = "auto"
    reduce_dtype: str | None = None
    overlap_iterations: bool | str = False
    rematerialize: float | int | None = None
    lowering: str = "none"
    cuda_graphs: bool = False
    in_order: bool = False
    offload_activations: float | int | None = None
    loss_chunks: int | None = None
    loss_bytes: int | None = None

    def pass_state(self) -> PassState:
        """What one run of the passes starts with."""
        return PassState(
            self.bucket_size_mb, self.reduce_dtype, self.rematerialize, self.offload_activations, self.in_order
        )


def build(
    captured: CapturedStep,
    axes: tuple[ShardAxis, ...],
    options: BuildOptions = BuildOptions(),
    plan: ParallelPlan | None = None,
    on_stage: Callable[[str], None] = lambda _stage: None,
    on_result: Callable[[str, ShardedStep], None] = lambda _stage, _step: None,
    on_fallback: Callable[[str], None] = announce,
) -> IterationGraphs:
    """Make each rank's runnable graphs of a captured step.

    Args:
        captured: the global-view graph.
        axes: the mesh as this rank sees it; empty for one device, whose graph is the captured one after the passes.
        options: pass list and bucket size.
        plan: placements of inputs and outputs; by default only the batch is split.
        on_stage: told the name of each stage as it begins.
        on_result: called with the name of each stage and pass and the step after it (dumps).
        on_fallback: told of each operator that runs on gathered tensors.

    Raises:
        ExpansionError: an operator could not be expressed on this rank.
        CannotShowError: the iteration cannot pause with gradients in reach.
        VerificationError: a graph broke an invariant.
    """
    (graphs,) = build_for_counts([captured], axes, options, plan, on_stage, on_result, on_fallback)
    return graphs


def build_for_counts(
    steps: Sequence[CapturedStep],
    axes: tuple[ShardAxis, ...],
    options: BuildOptions = BuildOptions(),
    plan: ParallelPlan | None = None,
    on_stage: Callable[[str], None] = lambda _stage: None,
    on_result: Callable[[str, ShardedStep], None] = lambda _stage, _step: None,
    on_fallback: Callable[[str], None] = announce,
) -> list[IterationGraphs]:
    """Make graphs of one step that was captured for several counts of what values choose (``x[mask]``), to be unified.

    What is decided by sizes is decided by those that are the same in all of them. Arguments and errors as of
    :func:`build`.

    Args:
        steps: the global-view graphs.
        axes: the mesh as this rank sees it.
        options: pass list and bucket size.
        plan: placements of inputs and outputs.
        on_stage: told the name of each stage as it begins.
        on_result: called with the name of each stage and pass and the step after it.
        on_fallback: told of each operator that runs on gathered tensors.
    """
    begun = [_expanded(captured, axes, plan, on_stage, on_result, on_fallback) for captured in steps]
    mark_counted([step.graph_module.graph for step in begun])
    return [_passed(captured, step, options, on_stage, on_result) for captured, step in zip(steps, begun, strict=True)]


def _expanded(
    captured: CapturedStep,
    axes: tuple[ShardAxis, ...],
    plan: ParallelPlan | None,
    on_stage: Callable[[str], None],
    on_result: Callable[[str, ShardedStep], None],
    on_fallback: Callable[[str], None],
) -> ShardedStep:
    """This rank's step before the passes."""
    verify_captured(captured)
    if not axes:
        return _on_one_device(captured)
    on_stage("expand")
    sharded = switch_streams(expand(captured, axes, plan, on_fallback))
    verify_sharded(sharded)
    on_result("expanded", sharded)
    return sharded


def _passed(
    captured: CapturedStep,
    sharded: ShardedStep,
    options: BuildOptions,
    on_stage: Callable[[str], None],
    on_result: Callable[[str, ShardedStep], None],
) -> IterationGraphs:
    """What the passes and phases make of it."""
    state = options.pass_state()
    on_stage("passes")
    sharded = _in_chunks(sharded, options, state, on_result)
    if not sharded.axes:
        main = run_passes(sharded, options.passes, state, on_result)
        return IterationGraphs(main=main, remarks=_remarks(state))
    passed = run_passes(sharded, options.passes, state, on_result)
    shown = _hidden_gradients(captured, passed)
    arranged = arrange_undeferred(passed, as_written=options.in_order)
    if shown is not None:
        pausing(arranged)  # or raises
    on_result("arranged", arranged)
    # with work of the iteration before in it a run could not end at a decision as if it had not been
    overlaps = options.overlap_iterations and not checks_of(arranged.graph_module.graph)
    decision = deferrable(arranged, _guarded(captured)) if overlaps else None
    return IterationGraphs(
        main=arranged,
        notes=str(decision or ""),
        deferrable=bool(decision and decision.deferred),
        remarks=_remarks(state),
        shown=shown,
    )


def _hidden_gradients(captured: CapturedStep, passed: ShardedStep) -> ShownGradients | None:
    """What hooks that run in the middle of the iteration get if they look; None if none do."""
    if not captured.variant.pauses:
        return None
    check_unwritten(captured)
    return hide_gradients(passed)


def _in_chunks(
    step: ShardedStep, options: BuildOptions, state: PassState, on_result: Callable[[str, ShardedStep], None]
) -> ShardedStep:
    """The step with its losses in chunks, if that is asked for; else a note if it would help."""
    if options.loss_chunks is not None or options.loss_bytes is not None:
        state.notes[LOSS_CHUNKS] = chunk_losses(step, options.loss_chunks, options.loss_bytes)
        verify_sharded(step)
        on_result(LOSS_CHUNKS, step)
    elif hint := what_chunks_would_save(step):
        state.notes[LOSS_CHUNKS] = hint
    return step


def _remarks(state: PassState) -> tuple[str, ...]:
    """What users are told of the passes' work."""
    told = (LOSS_CHUNKS, REMATERIALIZE.name, OFFLOAD_ACTIVATIONS.name)
    return tuple(f"{name}: {state.notes[name]}" for name in told if name in state.notes)


def _on_one_device(captured: CapturedStep) -> ShardedStep:
    """A copy of the captured graph; the original is what later traces are compared with."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(captured.graph_module.graph, {}))
    sum_as_eager(graph)
    module = private.GraphModule(captured.graph_module, graph)
    return ShardedStep(module, captured.signature, ())


def finish(
    captured: CapturedStep,
    arranged: ShardedStep,
    seconds: Mapping[str, float],
    overlap: bool | str = True,
    on_result: Callable[[str, ShardedStep], None] = lambda _stage, _step: None,
) -> IterationGraphs:
    """Make the final graphs of a step that has been measured: work is deferred, collectives start in the best order.

    Args:
        captured: what the step was made of.
        arranged: ``build(...).main``, after its first run.
        seconds: time of every node by name, the same on all ranks.
        overlap: ``BuildOptions.overlap_iterations``.
        on_result: called with the name of each phase and its graph (dumps).

    Raises:
        VerificationError: a graph broke an invariant.
    """
    graphs = make_phases(arranged, overlap=overlap, seconds=seconds, guarded=_guarded(captured))
    for name, phase in (("setup", graphs.setup), ("main", graphs.main), ("cleanup", graphs.cleanup)):
        if phase is not None:
            on_result(name, phase)
    return graphs


def lowering(mode: str, context: LoweringContext, last: Lowering = as_python) -> Lowering:
    """The lowering that ``SPMDStrategy(lowering=mode)`` asks for.

    Args:
        mode: one of ``stages.runtime.lowering.MODES``.
        context: the rest of the run.
        last: what the graph with regions runs as.
    """
    if mode == "none":
        return last
    from lightning_spmd.stages.runtime.regions.lowering import RegionLowering  # nothing of it runs where nobody asks

    return RegionLowering(mode, context, last)


def _guarded(captured: CapturedStep) -> frozenset[tuple[InputRole, tuple[Any, ...]]]:
    """State whose values decide whether a graph may run."""
    predicate = captured.guards.predicate
    entries = [] if predicate is None else [captured.signature.inputs[i] for i in predicate.inputs]
    return frozenset((entry.role, entry.key) for entry in entries)
