"""Builds the graph of a step: capture, expansion, passes, and the ranks' agreement on the result."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_spmd.cost.peaks import products_for_all
from lightning_spmd.errors import (
    CaptureError,
    ConfigurationError,
    ExpansionError,
    NoCommonGraphError,
    SPMDError,
    portable,
)
from lightning_spmd.ir.counted import CountFits, for_all_counts
from lightning_spmd.ir.printer import write_stage
from lightning_spmd.ir.same_value import same_tensor
from lightning_spmd.ir.several_optimizers import parts_of
from lightning_spmd.ir.signature import InputRole
from lightning_spmd.ir.sizes import has_sizes
from lightning_spmd.ir.steps import CapturedStep, IterationGraphs, ShardedStep, Variant
from lightning_spmd.ir.unify import Apart
from lightning_spmd.messages import tell
from lightning_spmd.parallel.state import StateMesh
from lightning_spmd.stages import GraphMaker, finish, lowering
from lightning_spmd.stages.capture.follow.counts import formulas_of, has_open_number
from lightning_spmd.stages.capture.follow.program import Program
from lightning_spmd.stages.capture.followed_trace import capture_followed
from lightning_spmd.stages.capture.pieces import PiecewiseTrace
from lightning_spmd.stages.capture.record.packing import OF_OPTIMIZER_ALONE, parameter_names
from lightning_spmd.stages.capture.request import CaptureRequest, UpdateRequest
from lightning_spmd.stages.capture.sizes.other_sizes import OtherSizes
from lightning_spmd.stages.phases import follow
from lightning_spmd.stages.phases.early_reads import gather_reads
from lightning_spmd.stages.phases.pause import pausing
from lightning_spmd.stages.runtime.agreement.same_graphs import agree_on, agree_on_exchanges, gradients_of
from lightning_spmd.stages.runtime.cuda_graphs import cuda_graphs
from lightning_spmd.stages.runtime.executor import Executable
from lightning_spmd.stages.runtime.live_state import LiveState
from lightning_spmd.stages.runtime.lowering import Lowering, as_python
from lightning_spmd.stages.runtime.pausing import PausingExecutable
from lightning_spmd.stages.runtime.trial_runs.profile import agree
from lightning_spmd.strategy.checkpoints.state_dicts import placements_of_state
from lightning_spmd.strategy.graphs.first_step import with_state
from lightning_spmd.strategy.graphs.live_inputs import live_state, options_of
from lightning_spmd.strategy.graphs.run_context import BuildEvent, RunContext, StepRequest
from lightning_spmd.strategy.notices.builds import BuildNotices
from lightning_spmd.strategy.ranks.backends import check_collectives
from lightning_spmd.strategy.state.memory import attribute_of, check_writes, lay_out_state
from lightning_spmd.strategy.state.replaced_tensors import check_used
from lightning_spmd.strategy.state.wide_state import widen_state
from lightning_spmd.strategy.steps.beginnings import Beginning
from lightning_spmd.strategy.steps.pieces import Pieces

Products = Callable[[Sequence[int]], Mapping[torch.dtype, float]]
"""Floating-point operations by dtype, for some counts."""
Tell = Callable[[str, int | None], None]
"""Told the name of a stage as it begins, and the size of the graph where it is known."""


def _have_same_constants(one: CapturedStep, other: CapturedStep) -> bool:
    """Whether none is a number of the step (``x[0] = n``), which torch makes a tensor before anybody sees it.

    The first step has constants of which it makes the optimizer's state, and which nothing else reads.
    """

    def read(step: CapturedStep) -> list[Tensor]:
        constants = (entry for entry in step.signature.inputs if entry.role is InputRole.CONSTANT)
        return [step.constants[entry.key[0]]() for entry in constants]

    mine, its = read(one), read(other)
    return len(mine) == len(its) and all(map(same_tensor, mine, its))


def _computing(step: CapturedStep) -> list[Any]:
    """The operators of a graph that give no views: a slice that takes all is left out."""
    return [node.target for node in step.graph_module.graph.nodes if not getattr(node.target, "is_view", False)]


class CannotBeBuilt(Exception):
    """A rank could not capture or expand the step. All ranks raise this together."""


class OnlyForTheseCounts(CannotBeBuilt):
    """No graph does for all counts of a step's path; each may have its own."""


class OtherGradients(Exception):
    """The ranks' local batches reach different parameters, or in a different order. All ranks raise this together.

    Args:
        names: of all gradients.
        built: what this rank built. It fits batches that reach the same parameters on all ranks.
    """

    def __init__(self, names: frozenset[str], difference: str) -> None:
        super().__init__(difference)
        self.names = names
        self.built: Executable | None = None


class GraphBuilder:
    """Builds the executables of one run.

    Args:
        context: the context of the run's graphs.
        gradients: accumulated gradients of earlier micro-batches, by name. The dictionary is read in each step.
    """

    def __init__(self, context: RunContext, gradients: MutableMapping[str, Tensor]) -> None:
        self.captures = 0
        self._context = context
        self._gradients = gradients
        self.state_mesh = None if context.mesh is None else StateMesh(context.mesh)
        self._last_lowering = self._recorded()
        self._notices = BuildNotices()
        self.pieces = Pieces(context, self._piecewise, self._live_state)
        self._dumped: dict[int, Any] = {}

    def build(
        self,
        request: StepRequest,
        split: tuple[int, ...],
        known: Executable | None = None,
        refusal: str | None = None,
    ) -> Executable:
        """Build the graph of a step: the same on all ranks, or one for each rank's local batch.

        Args:
            request: the step.
            split: rows of the global batch by data rank; empty for a local batch.
            known: the graph that this rank already has for its local batch; the other ranks build.
            refusal: why this rank can have no further graph, or None.

        Raises:
            CannotBeBuilt: on all ranks, with the reason of the first rank that cannot build.
            OnlyForTheseCounts: on all ranks; it may be built for the step's counts alone.
            SPMDError: on all ranks, if the run cannot continue.
        """
        started = time.perf_counter()
        batch, mesh, control = request.batch, self._context.mesh, self._context.control

        def tell(stage: str, nodes: int | None = None) -> None:
            event = BuildEvent(stage, str(request.variant), time.perf_counter() - started, nodes)
            for listener in self._context.settings.listeners:
                listener(event)

        if self._context.new_parameters is not None:
            self._context.new_parameters.share(frozenset() if request.program is None else request.program.handed())
        executable, problem = known, None
        if known is None:
            tell("capture")
        try:
            if batch is not None and mesh is not None and control is not None and mesh.shares_batches:
                mesh.check_same_batch(control.gather(batch.digest()))
            if refusal is not None:
                raise CaptureError(refusal)
            if known is None:
                executable = self._capture_and_build(request, split, tell)
        except SPMDError as error:
            problem = error
        try:
            self._agree(executable, problem, tell)
        except OtherGradients as other:
            other.built = executable
            raise
        if executable is None:
            raise RuntimeError("unreachable: without an executable the ranks agreed to fall back")
        if known is None:
            self.captures += 1
            tell("ready", len(executable.graphs.main.graph_module.graph.nodes))
        return executable

    def beginning(self, request: StepRequest, split: tuple[int, ...]) -> Beginning:
        """Build the graph that gives the values Python reads in a followed step; all ranks together.

        Args:
            request: the step, whose program ends at the read.
            split: rows of the global batch by data rank.

        Raises:
            SPMDError: on all ranks, if it cannot be built.
        """
        return Beginning(self._context, self._of_beginning(request, split), split, self._live_state)

    def _piecewise(self, request: StepRequest, split: tuple[int, ...]) -> PiecewiseTrace:
        return PiecewiseTrace(self._of_beginning(request, split))

    def _of_beginning(self, request: StepRequest, split: tuple[int, ...]) -> CaptureRequest:
        """A request to capture the beginning of a step, without its update unless Python makes that."""
        by_hand = request.variant.by_hand
        variant = request.variant if by_hand else Variant.evaluation(request.variant.method)
        whole = self._capture_request(dataclasses.replace(request, variant=variant, clip=None), split)
        optimizer = whole.update.optimizer if by_hand else None
        update = dataclasses.replace(whole.update, optimizer=optimizer, accumulators=frozenset())
        return dataclasses.replace(whole, update=update)

    def followed(self, request: StepRequest, split: tuple[int, ...]) -> CapturedStep:
        """Capture the global-view graph of a followed step, without clipping; all ranks together.

        Args:
            request: the step.
            split: rows of the global batch by data rank.

        Raises:
            CannotBeBuilt: on all ranks, if the step cannot be one graph.
        """
        captured, problem, control = None, None, self._context.control
        try:
            captured = capture_followed(self._capture_request(dataclasses.replace(request, clip=None), split))
        except SPMDError as error:
            problem = str(error)
        problems = [problem] if control is None else control.gather(problem)
        if captured is None or any(problems):
            raise CannotBeBuilt(next(filter(None, problems), "a step is no graph"))
        return captured

    # ------------------------------------------------------------------ pieces
    def _recorded(self) -> Lowering:
        """What lowered graphs run as; CUDA graphs of a run share their memory."""
        if not self._context.options.cuda_graphs:
            return as_python
        device = self._context.trainer.strategy.root_device
        found = cuda_graphs.of_device(device)
        if found is None:
            tell(f"strategy='spmd' has cuda_graphs=True, which does nothing on {device.type!r}")
        return found or as_python

    def _capture_request(self, request: StepRequest, split: tuple[int, ...]) -> CaptureRequest:
        context, program = self._context, request.program
        opened = () if program is None or program.counts is None or program.at is None else program.counts.places
        return CaptureRequest(
            module=context.module,
            update=UpdateRequest(
                context.optimizer,
                request.clip,
                context.trainer.accumulate_grad_batches,
                frozenset(self._gradients),
                context.scaler,
                context.scaler.device,
                context.settings.bf16_updates,
            ),
            trainer=context.trainer,
            variant=request.variant,
            batch=request.batch,
            arguments=dict(request.arguments),
            rows=None if context.mesh is None or request.variant.own_batch else sum(split),
            step_context=lambda: context.step_context(request.variant.method),
            tracing_context=lambda: context.settings.ranks.tracing(split),
            came_late=context.came_late,
            needed=request.needed,
            sizes=OtherSizes(dict(zip(opened, () if program is None else program.at or (), strict=False))),
            program=program,
        )

    def _live_state(self, captured: CapturedStep) -> LiveState:
        return live_state(self._context, captured, self._gradients, self.state_mesh)

    def _capture_and_build(self, request: StepRequest, split: tuple[int, ...], tell: Tell) -> Executable:
        context = self._context
        program = request.program
        is_for_each = context.options.lowering != "none" or self._last_lowering is not as_python
        if is_for_each and request.vary and program is not None and program.has_sizes_alone:
            raise NoCommonGraphError("compiled regions and CUDA graphs are made for each size")
        if program is not None and program.samples:
            request = dataclasses.replace(request, program=dataclasses.replace(program, at=program.samples[0]))
        if context.optimizer is not None:
            self._prepare(context.optimizer)
        captured = self._captured(self._capture_request(request, split))
        self._dump("captured", captured.graph_module, captured.signature)
        state = self._live_state(captured)
        maker = GraphMaker(
            axes=() if context.mesh is None else context.mesh.axes(split if request.batch is not None else ()),
            options=options_of(context, captured, state, bool(request.needed)),
            plan=context.settings.ranks.plan(captured.variant),
            on_stage=lambda stage: tell(stage, None),
            on_result=lambda stage, step: self._dump(stage, step.graph_module, step.signature),
            on_fallback=self._notices.of_fallback,
        )
        products = None
        if samples := () if program is None else program.samples:
            graphs, products = self._for_all_counts(captured, request, split, maker, samples)
        else:
            graphs = maker.make(captured)
        if context.mesh is None:
            gather_reads(graphs.main.graph_module.graph)
        if whole := state.misplaced(graphs.main, parts=False):
            if any(name.startswith(OF_OPTIMIZER_ALONE) for name in whole):
                raise ConfigurationError(
                    f"{', '.join(whole)}: the optimizer trains parameters that the module does not have, and the plan "
                    "keeps each rank's part of parameters. Give them to the module, for instance as an nn.ParameterList"
                )
            raise ConfigurationError(
                f"{', '.join(whole)} came into the module after the start of the run, whole, and the plan keeps each "
                "rank's part of them. With parameters in parts replace layers before fit or in configure_model; or use "
                "data_parallel='replicate' or 'zero2'"
            )
        if parts := state.misplaced(graphs.main, parts=True):
            raise ConfigurationError(
                f"{', '.join(parts)} came into the module after the start of the run, in parts, and the plan keeps it "
                "whole on every rank. Make the layer in __init__ or configure_model; or keep it outside of the module, "
                "in a list (self.teacher = [copy.deepcopy(layer).requires_grad_(False)]): steps have all of it then"
            )
        check_collectives(graphs.main, context.settings.ranks.backend)
        captured.guards.values.append(state.layout_guard(graphs.main))
        self._notices.of_passes(captured, graphs)
        if not graphs.deferrable:
            self._notices.of_overlap(captured, graphs)
        finish_graphs = functools.partial(self._finish, captured, self.captures) if graphs.deferrable else None
        last = as_python if samples else self._last_lowering
        executable = (functools.partial(PausingExecutable, pausing) if captured.variant.pauses else Executable)(
            captured,
            graphs,
            state,
            finish_graphs,
            functools.partial(self._follow, captured),
            lowering(
                "none" if captured.variant.own_batch or samples else context.options.lowering,
                context.lowering_context(captured.variant.method, self._dump_of(self.captures)),
                context.settings.waits.timing(last, str(captured.variant)),
            ),
            on_repairs=self._notices.of_repairs,
            asks=self._last_lowering is as_python,
            sizes=program.counts if samples and program is not None else None,
        )
        executable.products = products
        if context.mesh is not None:
            values = executable.inputs(() if request.batch is None else request.batch.tensor_values)
            check_used(graphs.main.signature.inputs, values, context.module)
            check_writes(graphs.main.signature.inputs, values, functools.partial(self._named, program))
            if request.batch is not None and len(split) > 1:
                self._notices.of_lists(request.batch, captured)
        return executable

    def _named(self, program: Program | None, tensor: Tensor) -> str | None:
        """What a tensor from outside is for the user."""
        line = None if program is None else program.line_of(tensor)
        return attribute_of(self._context.module, tensor) or (line and f"the tensor that {line} reads or writes")

    def _prepare(self, optimizer: Optimizer) -> None:
        """Bring an optimizer's state into the form that graphs expect."""
        if (advice := self._context.scaler.advice(optimizer)) is not None:
            self._notices.once(advice)
        for part in parts_of(optimizer):
            if widen_state(part, self._context.settings.bf16_updates, self.state_mesh):
                self._notices.once("the optimizer's state has no float32 masters: they begin as the bfloat16 weights")
            lay_out_state(part, self.state_mesh)

    def _for_all_counts(
        self,
        captured: CapturedStep,
        request: StepRequest,
        split: tuple[int, ...],
        maker: GraphMaker,
        samples: Sequence[tuple[int, ...]],
    ) -> tuple[IterationGraphs, Products | None]:
        """The graphs of a step for all counts, and what products they take.

        Args:
            captured: the step with the first of some counts.
            request: that it was captured by.
            split: rows of the global batch by data rank.
            maker: makes the graphs of the step as captured with each of them.
            samples: the counts.

        Raises:
            NoCommonGraphError: there are none that do for all counts.
        """
        program = request.program
        if program is None or program.counts is None:
            raise RuntimeError("unreachable: counts are those of a program")
        steps = [captured]
        for sample in samples[1:]:
            other = dataclasses.replace(request, program=dataclasses.replace(program, at=sample))
            steps.append(capture_followed(self._capture_request(other, split)))
            if len({len(step.graph_module.graph.nodes) for step in steps}) > 1:  # a loop over what was found
                raise NoCommonGraphError(
                    "there is no graph for all sizes that the data say: other operators are chosen"
                )
            if not _have_same_constants(captured, steps[-1]):
                raise NoCommonGraphError("there is no graph for all sizes that the data say: a tensor is made of one")
        if any(map(has_open_number, program.notes)):  # formulas were found with another one
            own = dataclasses.replace(request, program=dataclasses.replace(program, at=tuple(program.live.counts)))
            if _computing(capture_followed(self._capture_request(own, split))) != _computing(captured):
                raise NoCommonGraphError("with a number of the step torch does otherwise for some sizes")
        graphs = maker.make_for_counts(steps)
        fits = CountFits(program.counts, samples)
        for _, formula in formulas_of(program.notes):
            fits.learn(formula)
        try:
            main = for_all_counts([g.main for g in graphs], fits)
        except Apart as error:
            raise NoCommonGraphError(f"there is no graph for all sizes that the data say: {error}") from None
        return dataclasses.replace(graphs[0], main=main), products_for_all(steps, fits)

    def _captured(self, request: CaptureRequest) -> CapturedStep:
        """The graph of a step; the optimizer has the state that its first step would create."""
        context = self._context
        if context.optimizer is None:
            return capture_followed(request)
        names = parameter_names(context.module, context.optimizer)
        parameters = {names[id(p)]: p for group in context.optimizer.param_groups for p in group["params"]}
        plan, mesh = context.settings.ranks.plan(request.variant), self.state_mesh

        def lay_out(entry: tuple[str, str], value: Tensor) -> Tensor:
            return value if mesh is None else mesh.shard(value, placements_of_state(plan, mesh, *entry, value))

        return with_state(functools.partial(capture_followed, request), context.optimizer, parameters, lay_out)

    def _finish(
        self, captured: CapturedStep, number: int, arranged: ShardedStep, seconds: Mapping[str, float], whole: float
    ) -> IterationGraphs:
        """The final graphs of a measured step, the same on all ranks."""
        control = self._context.control
        mine = dict(seconds), whole
        everyone = [mine] if control is None else control.gather(mine)
        times = agree(arranged.graph_module.graph, [seconds for seconds, _ in everyone])
        whole, overlap = max(whole for _, whole in everyone), self._context.options.overlap_iterations
        graphs = finish(captured, arranged, times, overlap, self._dump_of(number), whole=whole)
        if graphs.cleanup is not None and has_sizes(graphs.cleanup.graph_module.graph):  # they would be the next step's
            graphs = finish(captured, arranged, times, False, self._dump_of(number))
        self._check_agreement(graphs.main, captured)
        self._notices.of_overlap(captured, graphs)
        return graphs

    def _follow(self, captured: CapturedStep, cleanup: ShardedStep, setup: ShardedStep) -> ShardedStep:
        step = follow(cleanup, setup)
        if not self._context.fenced:  # then all ranks are here; the parts have been compared in any case
            self._check_agreement(step, captured)
        return step

    def _check_agreement(self, step: ShardedStep, captured: CapturedStep) -> None:
        control, mesh = self._context.control, self._context.mesh
        if control is None or mesh is None:
            return
        if not captured.variant.own_batch:
            agree_on(control, step, captured)
        elif difference := agree_on_exchanges(control, step, captured, mesh.batches_of_ranks()):
            raise OtherGradients(frozenset[str]().union(*control.gather(gradients_of(captured))), difference)

    def _agree(self, executable: Executable | None, problem: SPMDError | None, tell: Tell) -> None:
        """All ranks go on with the graph, or all of them raise the same."""
        problems = [problem]
        if self._context.control is not None:
            tell("agree", None)
            problems = self._context.control.gather(None if problem is None else portable(problem))
        worst = next((p for p in problems if p is not None), None)
        if worst is None:
            if executable is not None:
                self._check_agreement(executable.graphs.main, executable.captured)
            return
        if isinstance(worst, NoCommonGraphError):
            raise OnlyForTheseCounts(str(worst))
        if isinstance(worst, CaptureError | ExpansionError):
            raise CannotBeBuilt(str(worst))
        raise worst

    # ------------------------------------------------------------------ dumps
    def _dump_of(self, number: int) -> Callable[[str, ShardedStep], None]:
        return lambda stage, step: self._dump(stage, step.graph_module, step.signature, number)

    def _dump(self, stage: str, graph_module: Any, signature: Any, number: int | None = None) -> None:
        folder = self._context.dump_dir
        if folder is not None and self._context.trainer.is_global_zero:
            number = self.captures if number is None else number
            before = None if stage == "captured" else self._dumped.get(number)
            path = write_stage(folder, f"{number:02d}_{stage}", graph_module, signature, before)
            if stage not in ("setup", "main", "cleanup"):  # each of these is compared with the graph they are made of
                self._dumped[number] = path
            tell(f"wrote {path}")
