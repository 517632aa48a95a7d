"""The context in which a run's graphs are built, and the requests to build one."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_spmd.ir.sizes import Dimension
from lightning_spmd.ir.steps import ShardedStep, Variant
from lightning_spmd.parallel.mesh import Mesh
from lightning_spmd.stages import BuildOptions
from lightning_spmd.stages.capture.batch.batch import Batch
from lightning_spmd.stages.capture.follow.program import Program
from lightning_spmd.stages.capture.optimizer.bf16_updates import Updates
from lightning_spmd.stages.runtime.agreement.control import ControlPlane
from lightning_spmd.stages.runtime.executor import Executable
from lightning_spmd.stages.runtime.lowering import LoweringContext
from lightning_spmd.stages.runtime.random_streams import RandomStreams
from lightning_spmd.stages.runtime.waiting import WaitMeter
from lightning_spmd.strategy.checkpoints.whole_steps import Wholeness
from lightning_spmd.strategy.ranks.ranks import Ranks
from lightning_spmd.strategy.ranks.update_numbers import UpdateNumbers
from lightning_spmd.strategy.state.new_parameters import NewParameters
from lightning_spmd.strategy.steps.loss_scaling import TrainersScaler
from lightning_spmd.strategy.steps.own_batches import BatchMode


class FellBack(Exception):
    """The iteration cannot be one graph; the caller continues eagerly."""


@dataclass(frozen=True)
class Ran:
    """How a micro-batch was run.

    Args:
        executable: its graph; None if it ran eagerly.
        rows: of the global batch, if known on the host.
        tables: all tables of graphs of the run.
    """

    executable: Executable | None = None
    rows: int | None = None
    tables: tuple[Any, ...] = ()

    @property
    def graphs(self) -> int:
        """Number of graphs that are kept."""
        return sum(len(table.executables) for table in self.tables)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The counts that its graph leaves open, until the next one runs."""
        sizes = None if self.executable is None else self.executable.sizes
        return () if sizes is None else sizes.values


@dataclass(frozen=True)
class BuildEvent:
    """Progress of building one graph, for listeners.

    Args:
        stage: ``"capture"``, ``"expand"``, ``"passes"``, ``"agree"`` or ``"ready"``. Later, if a graph is compiled,
            ``"lower"`` before each region and ``"lowered"`` at the end.
        variant: which part of the iteration the graph holds.
        seconds: since this build began.
        nodes: size of the graph, once known.
        detail: progress within the stage, such as ``"3 of 17"``.
    """

    stage: str
    variant: str
    seconds: float
    nodes: int | None = None
    detail: str = ""


@dataclass(frozen=True)
class GraphSettings:
    """What the graphs of all runs of a strategy share.

    Args:
        ranks: the ranks for which graphs are expanded.
        options: pass list, bucket size, overlap.
        dump_dir: where every stage's graph is written, or None.
        listeners: called with each BuildEvent.
        bf16_updates: how weights of bfloat16 are updated.
        batch: whether the ranks of training share one batch or have local ones.
        waits: measures how long graphs of training wait for collectives; None if nobody asks.
    """

    ranks: Ranks
    options: BuildOptions
    dump_dir: Path | None
    listeners: list[Callable[[BuildEvent], None]] = field(default_factory=list[Callable[[BuildEvent], None]])
    bf16_updates: Updates = "plain"
    batch: BatchMode = "auto"
    waits: WaitMeter = field(default_factory=WaitMeter)

    def of_evaluation(self, module: Any, streams: RandomStreams | None) -> RunContext:
        """The context of the graphs of evaluation steps."""
        folder = None if self.dump_dir is None else self.dump_dir / "evaluation"
        settings = dataclasses.replace(self, batch="global", waits=WaitMeter())
        options = dataclasses.replace(self.options, overlap_iterations=False)
        return RunContext(settings, module, None, streams, options, folder)


@dataclass(frozen=True)
class RunContext:
    """The live objects and options that all graphs of a run share.

    Args:
        settings: what the graphs of all runs share.
        module: the LightningModule.
        optimizer: its optimizer; None if nothing is trained (``steps.evaluation``).
        streams: random numbers of several ranks; None on one device.
        options: pass list and bucket size.
        dump_dir: where every stage's graph is written, or None.
        new_parameters: shares parameters that join the module during the run; None if they need not be shared.
        fenced: whether one rank alone may finish pending work, because one of its hooks reads a weight.
        came_late: names a hook that was added after the mode was chosen and needs another mode, or returns None.
        whole: whether the weights belong to a step that the Trainer has counted.
    """

    settings: GraphSettings
    module: Any
    optimizer: Optimizer | None
    streams: RandomStreams | None
    options: BuildOptions
    dump_dir: Path | None
    new_parameters: NewParameters | None = None
    fenced: bool = False
    came_late: Callable[[], str | None] = lambda: None
    whole: Wholeness = field(default_factory=Wholeness)

    @functools.cached_property
    def trainer(self) -> Any:
        """The Trainer."""
        return self.module.trainer

    @functools.cached_property
    def mesh(self) -> Mesh | None:
        """The mesh; None on one device."""
        return self.settings.ranks.mesh

    @functools.cached_property
    def control(self) -> ControlPlane | None:
        """Host messages among the ranks; None on one device."""
        return self.settings.ranks.control

    @functools.cached_property
    def update_numbers(self) -> UpdateNumbers:
        """Numbers of optimizers and clipping that ranks must have in common."""
        return UpdateNumbers(self.optimizer, self.trainer)

    @property
    def scaler(self) -> TrainersScaler:
        """The GradScaler, if the precision has one."""
        return TrainersScaler(self.trainer)

    def parameters(self) -> Iterable[Parameter]:
        """The module's, and those that its optimizer has alone."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return dict.fromkeys([*self.module.parameters(), *(p for group in groups for p in group["params"])])

    def step_context(self, method: str) -> contextlib.AbstractContextManager[Any]:
        """The context that the precision plugin puts around a step method and its calls."""
        return getattr(self.trainer.precision_plugin, _CONTEXTS[method])()

    def lowering_context(self, method: str, on_result: Callable[[str, ShardedStep], None]) -> LoweringContext:
        """What the lowering of a graph may ask; ``on_result`` gets the lowered graph."""
        begun: list[float] = []

        def on_region(number: int, count: int) -> None:
            begun[:] = begun or [time.perf_counter()]
            stage, detail = ("lower", f"{number + 1} of {count}") if number < count else ("lowered", "")
            event = BuildEvent(stage, method, time.perf_counter() - begun[0], None, detail)
            for listener in self.settings.listeners:
                listener(event)

        left = functools.partial(self.steps_left, method)
        if self.control is None:
            return LoweringContext(steps_left=left, on_result=on_result, on_region=on_region)
        return LoweringContext(self.control.rank, self.control.gather, left, on_result, on_region)

    def steps_left(self, method: str) -> float:
        """How many more batches a step method may get; infinite if unknown."""
        trainer = self.trainer
        epochs = math.inf if trainer.max_epochs in (None, -1) else trainer.max_epochs - trainer.current_epoch
        if method == "training_step":
            left = math.inf if trainer.max_steps < 0 else trainer.max_steps - trainer.global_step
            return min(left * trainer.accumulate_grad_batches, epochs * trainer.num_training_batches)
        batches = {
            "validation_step": trainer.num_val_batches,
            "test_step": trainer.num_test_batches,
            "predict_step": trainer.num_predict_batches,
        }
        return sum(batches[method]) * (max(epochs, 1) if method == "validation_step" and trainer.fitting else 1)


_CONTEXTS = {
    "training_step": "train_step_context",
    "validation_step": "val_step_context",
    "test_step": "test_step_context",
    "predict_step": "predict_step_context",
}


@dataclass(frozen=True)
class StepRequest:
    """One micro-batch to run, or the optimizer alone.

    Args:
        batch: what Lightning passes to the step method; None if there is no forward pass.
        variant: part of the iteration.
        arguments: the method's other arguments by name.
        clip: gradient clipping to capture; None: none.
        vary: sizes of the batch that a graph built for it should leave open, with their values.
        needed: parameters that get a gradient from another rank's local batch.
        program: the step's calls, if its Python has run; None otherwise.
    """

    batch: Batch | None
    variant: Variant
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    clip: Callable[[Any], None] | None = None
    vary: Mapping[Dimension, int] = field(default_factory=dict[Dimension, int])
    needed: frozenset[str] = frozenset()
    program: Program | None = None


def named_arguments(signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What a step method gets, by name and in its order; each of ``*args`` has a name of its own.

    Args:
        signature: of the bound method.
        args: as Lightning passes them.
        kwargs: likewise.
    """
    found: dict[str, Any] = {}
    for name, value in signature.bind(*args, **kwargs).arguments.items():
        several = signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
        found |= {f"{name}[{place}]": one for place, one in enumerate(value)} if several else {name: value}
    return found
