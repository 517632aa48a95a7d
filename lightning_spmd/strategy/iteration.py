"""One run's compiled training iteration: finds or builds the graph for a batch, runs it, falls back when it must.

Decisions are taken by all ranks together (``stages.runtime.agreement``): before each step the ranks exchange which
graph they would run; a rank that has none makes all of them build.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_spmd import _private_api as private
from lightning_spmd.errors import BatchError, CaptureError, ConfigurationError, ExpansionError, SPMDError
from lightning_spmd.ir.printer import write_stage
from lightning_spmd.ir.signature import OutputRole
from lightning_spmd.ir.steps import CapturedStep, IterationGraphs, ShardedStep, Variant
from lightning_spmd.parallel.mesh import Mesh
from lightning_spmd.parallel.parallel_plan import ParallelPlan
from lightning_spmd.parallel.state import StateMesh
from lightning_spmd.stages import BuildOptions, build, finish
from lightning_spmd.stages.capture.batch import Batch
from lightning_spmd.stages.capture.python_state import learning_rate_name
from lightning_spmd.stages.capture.trace import CaptureRequest, capture, parameter_names
from lightning_spmd.stages.phases import follow
from lightning_spmd.stages.runtime.agreement import ControlPlane, stable_hash
from lightning_spmd.stages.runtime.executor import Executable, FirstRunError, Pending
from lightning_spmd.stages.runtime.live_state import LiveState
from lightning_spmd.stages.runtime.profile import agree
from lightning_spmd.stages.runtime.random_streams import RandomStreams
from lightning_spmd.strategy.checkpoints import placements_of_state
from lightning_spmd.strategy.first_step import with_state
from lightning_spmd.strategy.replay import replay, resolve

# A graph whose guards keep failing costs a capture a step: past this many for one shape, training goes on eagerly.
MAX_GRAPHS_PER_SHAPE = 16
# Past this many shapes the user is told once to pad.
MANY_SHAPES = 16


@dataclass(frozen=True)
class BuildEvent:
    """Progress of building one graph, for listeners.

    Args:
        stage: ``"capture"``, ``"expand"``, ``"passes"``, ``"agree"`` or ``"ready"``.
        variant: which part of the iteration.
        seconds: since this build began.
        nodes: size of the graph, once known.
    """

    stage: str
    variant: str
    seconds: float
    nodes: int | None = None


class FellBack(Exception):
    """This iteration cannot be one graph; the caller goes on eagerly."""


class TrainingIteration:
    """The compiled iteration of one ``fit``.

    Args:
        module: the LightningModule.
        optimizer: its optimizer; None where nothing is trained (``strategy.evaluation``).
        trainer: the Trainer.
        mesh: the mesh; None on one device.
        control: host messages among the ranks; None on one device.
        streams: random numbers of several ranks; None on one device.
        tracing_context: entered while tracing.
        listeners: called with each BuildEvent.
        dump_dir: where every stage's graph is written, or None.
        options: pass list and bucket size.
        plan: the parallel plan of a variant's graph.
    """

    def __init__(
        self,
        module: Any,
        optimizer: Optimizer | None,
        trainer: Any,
        mesh: Mesh | None,
        control: ControlPlane | None,
        streams: RandomStreams | None,
        tracing_context: Callable[[int], contextlib.AbstractContextManager[Any]],
        listeners: Sequence[Callable[[BuildEvent], None]],
        dump_dir: Path | None,
        options: BuildOptions,
        plan: Callable[[Variant], ParallelPlan],
    ) -> None:
        self.module = module
        self.optimizer = optimizer
        self.trainer = trainer
        self.gradients: dict[str, Tensor] = {}
        self.captures = 0
        self._mesh = mesh
        self._state_mesh = None if mesh is None else StateMesh(mesh)
        self._plan = plan
        self._control = control
        self._streams = streams
        self._tracing_context = tracing_context
        self._listeners = listeners
        self._dump_dir = dump_dir
        self._options = options
        self._graphs: dict[tuple[Any, ...], list[int]] = {}
        self._executables: list[Executable] = []
        self._arguments: dict[str, Any] = {}
        self._told_about_shapes = False
        self._pending: Pending | None = None
        self._told: set[str] = set()
        self._dumped: dict[int, Path] = {}

    # ------------------------------------------------------------------ running
    def run(
        self, batch_tree: Any, arguments: dict[str, Any], variant: Variant, clip: Callable[[Any], None] | None
    ) -> Any:
        """Run one micro-batch.

        Args:
            batch_tree: the batch as Lightning hands it to training_step.
            arguments: the other arguments of training_step by name.
            variant: part of the iteration; ``accumulated`` follows from the gradients that are held.
            clip: gradient clipping to capture.

        Returns:
            what training_step returns, with real tensors.

        Raises:
            FellBack: the iteration must run eagerly; nothing has been changed.
        """
        batch = Batch(batch_tree)
        self._arguments = arguments
        variant = dataclasses.replace(variant, accumulated=bool(self.gradients))
        executable, rows = self._executable(batch, variant, clip)
        outputs = self._run(executable, batch.tensor_values)
        self._after(variant)
        return self._answer(executable, outputs, batch, rows)

    def _answer(self, executable: Executable, outputs: Sequence[Any], batch: Batch, rows: int) -> Any:
        captured = executable.captured
        world_size = 1 if self._control is None else self._control.world_size
        with self._step_context(captured.variant):
            replay(self.module, captured.calls, outputs, batch.values, world_size, rows)
        return resolve(captured.returned, outputs, batch.values)

    def apply(self, gradients: dict[str, Tensor], clip: Callable[[Any], None] | None, *, reduced: bool) -> None:
        """Run the optimizer alone on gradients that are there already.

        Args:
            gradients: by parameter name.
            clip: gradient clipping to capture.
            reduced: whether they are sums over the ranks already (``p.grad`` of split mode) or this rank's share.
        """
        self.gradients.clear()
        self.gradients.update(gradients)
        self._arguments = {}
        variant = Variant(forward=False, accumulated=True, expose_gradients=reduced)
        executable, _ = self._executable(None, variant, clip)
        self._run(executable, ())
        self._after(executable.captured.variant)

    def flush(self) -> None:
        """Do what the last iteration left for the next one, if anything: now parameters and state are up to date."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.owner.clean_up(pending.values)

    def _run(self, executable: Executable, tensors: Sequence[Tensor]) -> Sequence[Any]:
        if self._pending is not None and not executable.can_follow(self._pending):
            self.flush()
        pending, self._pending = self._pending, None
        try:
            outputs, self._pending = executable.run(tensors, pending)
        except FirstRunError as error:
            self._fall_back(str(error))
        return outputs

    def _after(self, variant: Variant) -> None:
        if variant.apply and self.optimizer is not None:
            self.gradients.clear()
            private.mark_stepped(self.optimizer)

    def captured(self, batch_tree: Any, arguments: dict[str, Any], variant: Variant) -> CapturedStep:
        """The global-view graph of one micro-batch, without clipping, not run.

        Raises:
            CaptureError: the step cannot be one graph.
        """
        batch = Batch(batch_tree)
        self._arguments = arguments
        rows = (batch.rows(),) * (1 if self._mesh is None else self._mesh.data)
        return self._capture(batch, dataclasses.replace(variant, accumulated=False), None, rows)

    # ------------------------------------------------------------------ choosing
    def _executable(
        self, batch: Batch | None, variant: Variant, clip: Callable[[Any], None] | None
    ) -> tuple[Executable, int]:
        if self._control is None or self._mesh is None:
            split = () if batch is None else batch.first_sizes()
            key, index, reason = self._find(batch, variant, split)
        else:
            split, key, index, reason = self._agreed_choice(self._control, self._mesh, batch, variant)
        if index is None:
            self._check_limits(key, reason)
            if reason is not None and not all(_creates_state(self._executables[i].captured) for i in self._graphs[key]):
                rank_zero_info(f"strategy='spmd' builds another graph: {reason}")
            return self._build(key, batch, variant, clip, split), sum(split)
        return self._executables[index], sum(split)

    def _agreed_choice(
        self, control: ControlPlane, mesh: Mesh, batch: Batch | None, variant: Variant
    ) -> tuple[tuple[int, ...], tuple[Any, ...], int | None, str | None]:
        """Split, key and graph on which all ranks agree; one small exchange, a second one only when rows differ."""
        problem: BatchError | None = None
        rows = 0
        try:
            rows = 0 if batch is None else batch.rows()
        except BatchError as error:
            problem = error
        split = (rows,) * mesh.data
        key, index, reason = self._find(batch, variant, split)
        shape = stable_hash(None if batch is None else batch.cache_key()[1:])
        vote = control.vote(None if problem else index, rows, -1 if problem else shape)
        if vote.shape[0] != vote.shape[1] or vote.shape[0] == -1:
            self._reject_batch(control, batch, problem)
        if vote.rows[0] != vote.rows[1]:
            split = mesh.split(control.gather(rows))
            key, index, reason = self._find(batch, variant, split)
            vote = control.vote(index, 0, 0)
        same = not vote.missing and vote.graph[0] == vote.graph[1]
        return split, key, index if same else None, reason

    def _reject_batch(self, control: ControlPlane, batch: Batch | None, problem: BatchError | None) -> None:
        sides = control.gather((None if batch is None else batch.describe(), None if problem is None else str(problem)))
        told = next((text for _, text in sides if text is not None), None)
        if told is not None:
            raise BatchError(told)
        other = next(i for i, side in enumerate(sides) if side != sides[0])
        raise BatchError(
            "the ranks hold batches that differ in more than the number of rows:\n"
            f"  rank 0: {sides[0][0]}\n  rank {other}: {sides[other][0]}\n"
            "pad every batch to the same shape (in the collate function)"
        )

    def _find(
        self, batch: Batch | None, variant: Variant, split: tuple[int, ...]
    ) -> tuple[tuple[Any, ...], int | None, str | None]:
        """(key, index of a graph whose guards hold or None, why the newest one's do not)."""
        key = (
            variant,
            None if batch is None else batch.cache_key(),
            split,
            tuple(self._arguments),
            self.trainer.accumulate_grad_batches,
            tuple(self.gradients),
        )
        tensors = [] if batch is None else batch.tensor_values
        reason: str | None = None
        for index in reversed(self._graphs.get(key, [])):
            executable = self._executables[index]
            failure = executable.captured.guards.failure(
                functools.partial(executable.inputs, tensors),
                lambda: {} if batch is None else dict(zip(batch.paths, batch.values, strict=True)),
            )
            if failure is None:
                return key, index, None
            reason = reason or failure
        return key, None, reason

    def _check_limits(self, key: tuple[Any, ...], reason: str | None) -> None:
        if len(self._graphs.get(key, [])) >= MAX_GRAPHS_PER_SHAPE:
            self._fall_back(
                f"{MAX_GRAPHS_PER_SHAPE} graphs were built for one batch shape and none fits ({reason}); make that "
                "value a tensor, or stop reading it in training_step"
            )
        if len(self._graphs) >= MANY_SHAPES and not self._told_about_shapes:
            self._told_about_shapes = True
            rank_zero_warn(
                f"{len(self._graphs)} different batch shapes so far, each with a graph of its own; pad batches to a "
                "few sizes to save capture time"
            )

    # ------------------------------------------------------------------ building
    def _build(
        self,
        key: tuple[Any, ...],
        batch: Batch | None,
        variant: Variant,
        clip: Callable[[Any], None] | None,
        split: tuple[int, ...],
    ) -> Executable:
        self.flush()
        started = time.perf_counter()

        def tell(stage: str, nodes: int | None = None) -> None:
            event = BuildEvent(stage, str(variant), time.perf_counter() - started, nodes)
            for listener in self._listeners:
                listener(event)

        executable, problem = None, None
        tell("capture")
        try:
            if batch is not None and self._mesh is not None and self._control is not None and self._mesh.tensor > 1:
                self._mesh.check_same_batch(self._control.gather(batch.digest()))
            executable = self._capture_and_build(batch, variant, clip, split, tell)
        except SPMDError as error:
            problem = error
        self._agree(executable, problem, tell)
        if executable is None:
            raise RuntimeError("unreachable: without an executable the ranks agreed to fall back")
        self.captures += 1
        self._executables.append(executable)
        self._graphs.setdefault(key, []).append(len(self._executables) - 1)
        tell("ready", len(executable.graphs.main.graph_module.graph.nodes))
        return executable

    def _capture_and_build(
        self,
        batch: Batch | None,
        variant: Variant,
        clip: Callable[[Any], None] | None,
        split: tuple[int, ...],
        tell: Callable[[str], None],
    ) -> Executable:
        captured = self._without_first_step(lambda: self._capture(batch, variant, clip, split))
        self._dump("captured", captured.graph_module, captured.signature)
        graphs = build(
            captured,
            () if self._mesh is None else self._mesh.axes(split if batch is not None else ()),
            self._options,
            self._plan(captured.variant),
            tell,
            lambda stage, step: self._dump(stage, step.graph_module, step.signature),
        )
        names = parameter_names(self.module, self.optimizer)
        state = LiveState(
            self.module,
            self.optimizer,
            names,
            self._host_values(),
            self.gradients,
            self._streams,
            None if self._state_mesh is None else self._state_mesh.wrap,
        )
        if not graphs.deferrable:
            self._tell_about_overlap(captured, graphs)
        finish = functools.partial(self._finish, captured, self.captures) if graphs.deferrable else None
        return Executable(captured, graphs, state, finish, self._follow)

    def _without_first_step(self, capture: Callable[[], CapturedStep]) -> CapturedStep:
        """What ``capture`` gives once the optimizer has the state that its first step would create."""
        captured = capture()
        if self.optimizer is None:
            return captured
        names = parameter_names(self.module, self.optimizer)
        parameters = {names[id(p)]: p for group in self.optimizer.param_groups for p in group["params"]}
        plan, mesh = self._plan(captured.variant), self._state_mesh

        def lay_out(entry: tuple[str, str], value: Tensor) -> Tensor:
            return value if mesh is None else mesh.shard(value, placements_of_state(plan, mesh, *entry, value))

        return with_state(captured, self.optimizer, parameters, lay_out, capture)

    def _step_context(self, variant: Variant) -> contextlib.AbstractContextManager[Any]:
        """What the precision plugin puts around the step method, and so around the calls that it makes."""
        return self.trainer.precision_plugin.train_step_context()

    def _capture(
        self, batch: Batch | None, variant: Variant, clip: Callable[[Any], None] | None, split: tuple[int, ...]
    ) -> CapturedStep:
        rows = None if self._mesh is None else sum(split)
        return capture(
            CaptureRequest(
                module=self.module,
                optimizer=self.optimizer,
                trainer=self.trainer,
                variant=variant,
                batch=batch,
                arguments=self._arguments,
                rows=rows,
                loss_divisor=self.trainer.accumulate_grad_batches,
                accumulators=frozenset(self.gradients),
                clip=clip,
                step_context=lambda: self._step_context(variant),
                tracing_context=lambda: self._tracing_context(rows or 0),
            )
        )

    def _finish(
        self, captured: CapturedStep, number: int, arranged: ShardedStep, seconds: Mapping[str, float]
    ) -> IterationGraphs:
        """The final graphs of a measured step, the same on all ranks."""
        everyone = [dict(seconds)] if self._control is None else self._control.gather(dict(seconds))
        agreed = agree(arranged.graph_module.graph, everyone)
        graphs = finish(
            captured,
            arranged,
            agreed,
            self._options.overlap_iterations,
            lambda stage, step: self._dump(stage, step.graph_module, step.signature, number),
        )
        self._check_agreement(graphs.main)
        self._tell_about_overlap(captured, graphs)
        return graphs

    def _follow(self, cleanup: ShardedStep, setup: ShardedStep) -> ShardedStep:
        step = follow(cleanup, setup)
        self._check_agreement(step)
        return step

    def _check_agreement(self, step: ShardedStep) -> None:
        if self._control is not None:
            self._control.agree_on(step)

    def _tell_about_overlap(self, captured: CapturedStep, graphs: IterationGraphs) -> None:
        """Once, and not for the graph of the first step."""
        gist = graphs.notes.partition(" (")[0].partition(":")[0]  # without the times, which differ a graph
        if not graphs.notes or _creates_state(captured) or not captured.variant.apply or gist in self._told:
            return
        self._told.add(gist)
        rank_zero_info(f"strategy='spmd' overlaps iterations: {graphs.notes}")

    def _host_values(self) -> dict[str, Callable[[], Any]]:
        trainer = self.trainer
        readers: dict[str, Callable[[], Any]] = {name: lambda n=name: self._arguments[n] for name in self._arguments}
        for index, config in enumerate(trainer.lr_scheduler_configs):
            for group, read in enumerate(private.last_learning_rate_readers(config.scheduler)):
                readers[learning_rate_name(index, group)] = read
        readers["trainer.global_step"] = lambda: trainer.global_step
        readers["trainer.current_epoch"] = lambda: trainer.current_epoch
        return readers

    def _agree(self, executable: Executable | None, problem: SPMDError | None, tell: Callable[[str], None]) -> None:
        """All ranks go on with the graph, or all of them fall back, or all of them raise."""
        problems = [problem]
        if self._control is not None:
            tell("agree")
            problems = self._control.gather(None if problem is None else _portable(problem))
        worst = next((p for p in problems if p is not None), None)
        if worst is None:
            if executable is not None:
                self._check_agreement(executable.graphs.main)
            return
        if isinstance(worst, CaptureError | ExpansionError):
            self._fall_back(str(worst))
        raise worst

    def _fall_back(self, reason: str) -> NoReturn:
        if self._mesh is not None and self._plan(Variant()).needs_graphs:
            raise ConfigurationError(
                f"with state sharded over the ranks training cannot go on eagerly: {reason}. Change that, or use "
                "data_parallel='replicate'"
            )
        rank_zero_warn(
            f"strategy='spmd' trains eagerly from here on (gradients averaged over the ranks, as DDP does): {reason}"
        )
        raise FellBack

    def _dump(self, stage: str, graph_module: Any, signature: Any, number: int | None = None) -> None:
        if self._dump_dir is not None and self.trainer.is_global_zero:
            number = self.captures if number is None else number
            before = None if stage == "captured" else self._dumped.get(number)
            path = write_stage(self._dump_dir, f"{number:02d}_{stage}", graph_module, signature, before)
            if stage not in ("setup", "main", "cleanup"):  # each of these is compared with the graph they are made of
                self._dumped[number] = path
            rank_zero_info(f"wrote {path}")


def _creates_state(step: CapturedStep) -> bool:
    """Whether it is the graph of a first step, which another one follows by design."""
    return any(True for _ in step.signature.outputs_of(OutputRole.OPTIMIZER_STATE))


def _portable(problem: SPMDError) -> SPMDError:
    """The same error without what does not travel between processes (graph nodes)."""
    kind = type(problem) if type(problem).__module__ == SPMDError.__module__ else ExpansionError
    return kind(str(problem))
