"""What the graphs of one run are made in, and what asks for one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from lightning_spmd.ir.steps import Variant
from lightning_spmd.parallel.mesh import Mesh
from lightning_spmd.parallel.parallel_plan import ParallelPlan
from lightning_spmd.stages import BuildOptions
from lightning_spmd.stages.capture.batch import Batch
from lightning_spmd.stages.runtime.control import ControlPlane
from lightning_spmd.stages.runtime.random_streams import RandomStreams
from lightning_spmd.strategy.newcomers import Newcomers


class FellBack(Exception):
    """This iteration cannot be one graph; the caller goes on eagerly."""


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


@dataclass(frozen=True)
class RunContext:
    """The live objects and options that all graphs of a run share.

    Args:
        module: the LightningModule.
        optimizer: its optimizer; None where nothing is trained (``strategy.evaluation``).
        trainer: the Trainer.
        mesh: the mesh; None on one device.
        control: host messages among the ranks; None on one device.
        streams: random numbers of several ranks; None on one device.
        tracing_context: entered while tracing, given the rows of each part of the global batch.
        listeners: called with each BuildEvent.
        dump_dir: where every stage's graph is written, or None.
        options: pass list and bucket size.
        plan: the parallel plan of a variant's graph.
        newcomers: what joins the module in mid-run; None where nobody has to share it.
    """

    module: Any
    optimizer: Optimizer | None
    trainer: Any
    mesh: Mesh | None
    control: ControlPlane | None
    streams: RandomStreams | None
    tracing_context: Callable[[tuple[int, ...]], contextlib.AbstractContextManager[Any]]
    listeners: Sequence[Callable[[BuildEvent], None]]
    dump_dir: Path | None
    options: BuildOptions
    plan: Callable[[Variant], ParallelPlan]
    newcomers: Newcomers | None = None

    def step_context(self, method: str) -> contextlib.AbstractContextManager[Any]:
        """What the precision plugin puts around a step method, and so around the calls that it makes."""
        precision = self.trainer.precision_plugin
        contexts = {
            "training_step": precision.train_step_context,
            "validation_step": precision.val_step_context,
            "test_step": precision.test_step_context,
            "predict_step": precision.predict_step_context,
        }
        return contexts[method]()


@dataclass(frozen=True)
class StepRequest:
    """One micro-batch to run, or the optimizer alone.

    Args:
        batch: what Lightning hands to the step method; None: there is no forward pass.
        variant: part of the iteration.
        arguments: the method's other arguments by name.
        clip: gradient clipping to capture; None: none.
        numbers: of Python's state, by path, that are inputs of graphs; they must be the same on all ranks.
    """

    batch: Batch | None
    variant: Variant
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    clip: Callable[[Any], None] | None = None
    numbers: Mapping[str, Any] = field(default_factory=dict[str, Any])
