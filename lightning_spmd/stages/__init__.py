"""The arrow as code: capture → expand → passes → phases → runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from lightning_spmd import _private_api as private
from lightning_spmd.ir.operators.packed_sums import sum_as_eager
from lightning_spmd.ir.placement import ShardAxis
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
from lightning_spmd.stages.runtime.random_streams import NOTHING_DRAWN, Drawn, switch_streams

__all__ = ["BuildOptions", "GraphMaker", "announce", "build", "find_plan", "finish", "lowering"]


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


@dataclass(frozen=True)
class GraphMaker:
    """Makes this rank's graphs of captured steps: expand, passes, phases.

    Args:
        axes: the mesh as this rank sees it; empty for one device, whose graph is the captured one after the passes.
        options: pass list and bucket size.
        plan: placements of inputs and outputs; by default only the batch is split.
        on_stage: called with the name of each stage as it begins.
        on_result: called with the name of each stage and pass and the step after it (dumps).
        on_fallback: called with a line for each operator that runs on gathered tensors.
    """

    axes: tuple[ShardAxis, ...]
    options: BuildOptions = BuildOptions()
    plan: ParallelPlan | None = None
    on_stage: Callable[[str], None] = lambda _stage: None
    on_result: Callable[[str, ShardedStep], None] = lambda _stage, _step: None
    on_fallback: Callable[[str], None] = announce

    def make(self, captured: CapturedStep) -> IterationGraphs:
        """The graphs of a step.

        Raises:
            ExpansionError: an operator could not be expressed on this rank.
            CannotShowError: the iteration cannot pause with gradients in reach.
            VerificationError: a graph broke an invariant.
        """
        (graphs,) = self.make_for_counts([captured])
        return graphs

    def make_for_counts(self, steps: Sequence[CapturedStep]) -> list[IterationGraphs]:
        """The graphs of one step that was captured for several counts of what values choose (``x[mask]``).

        They are to be unified: what is decided by sizes is decided by those that are the same in all of them. Errors
        are those of :meth:`make`.
        """
        begun = [self.expanded(captured) for captured in steps]
        mark_counted([step.graph_module.graph for step in begun])
        return [self._passed(captured, step) for captured, step in zip(steps, begun, strict=True)]

    def expanded(self, captured: CapturedStep, drawn: Drawn = NOTHING_DRAWN) -> ShardedStep:
        """This rank's step before the passes.

        Args:
            captured: the step.
            drawn: where the streams of random numbers are when it begins.
        """
        verify_captured(captured)
        if not self.axes:
            return _on_one_device(captured)
        self.on_stage("expand")
        sharded = switch_streams(expand(captured, self.axes, self.plan, self.on_fallback), drawn)
        verify_sharded(sharded)
        self.on_result("expanded", sharded)
        return sharded

    def _passed(self, captured: CapturedStep, sharded: ShardedStep) -> IterationGraphs:
        """What the passes and phases make of it."""
        state = self.options.pass_state()
        self.on_stage("passes")
        self._cut_losses(sharded, state)
        passed = run_passes(sharded, self.options.passes, state, self.on_result)
        if not passed.axes:
            return IterationGraphs(main=passed, remarks=_remarks(state))
        shown = _hidden_gradients(captured, passed)
        arranged = arrange_undeferred(passed, as_written=self.options.in_order)
        if shown is not None:
            pausing(arranged)  # or raises
        self.on_result("arranged", arranged)
        decision = deferrable(arranged, _guarded(captured)) if self.options.overlap_iterations else None
        return IterationGraphs(
            main=arranged,
            notes=str(decision or ""),
            deferrable=bool(decision and decision.deferred),
            remarks=_remarks(state),
            shown=shown,
        )

    def _cut_losses(self, step: ShardedStep, state: PassState) -> None:
        """Compute losses in chunks, if that is asked for; else note where it would help."""
        options = self.options
        if options.loss_chunks is not None or options.loss_bytes is not None:
            state.notes[LOSS_CHUNKS] = chunk_losses(step, options.loss_chunks, options.loss_bytes)
            verify_sharded(step)
            self.on_result(LOSS_CHUNKS, step)
        elif hint := what_chunks_would_save(step):
            state.notes[LOSS_CHUNKS] = hint


def build(
    captured: CapturedStep,
    axes: tuple[ShardAxis, ...],
    options: BuildOptions = BuildOptions(),
    plan: ParallelPlan | None = None,
) -> IterationGraphs:
    """The graphs of one step; arguments and errors are those of :class:`GraphMaker`."""
    return GraphMaker(axes, options, plan).make(captured)


def _hidden_gradients(captured: CapturedStep, passed: ShardedStep) -> ShownGradients | None:
    """What hooks that run in the middle of the iteration get if they look; None if none do."""
    if not captured.variant.pauses:
        return None
    check_unwritten(captured)
    return hide_gradients(passed)


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
    *,
    whole: float | None = None,
) -> IterationGraphs:
    """Make the final graphs of a step that has been measured: work is deferred, collectives start in the best order.

    Args:
        captured: what the step was made of.
        arranged: ``build(...).main``, after its first run.
        seconds: time of every node by name, the same on all ranks.
        overlap: ``BuildOptions.overlap_iterations``.
        on_result: called with the name of each phase and its graph (dumps).
        whole: measured seconds of a run of ``arranged``, in which collectives and operators overlap.

    Raises:
        VerificationError: a graph broke an invariant.
    """
    graphs = make_phases(arranged, overlap=overlap, seconds=seconds, whole=whole, guarded=_guarded(captured))
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
