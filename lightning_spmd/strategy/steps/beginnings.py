"""Values that Python reads on several ranks before the step has a graph: all ranks run the beginning of the step."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

from torch import Tensor

from lightning_spmd.errors import CaptureError, SPMDError, portable
from lightning_spmd.ir.steps import CapturedStep
from lightning_spmd.stages import GraphMaker
from lightning_spmd.stages.capture.followed_trace import capture_followed
from lightning_spmd.stages.capture.request import CaptureRequest
from lightning_spmd.stages.runtime.executor import Executable
from lightning_spmd.stages.runtime.live_state import LiveState
from lightning_spmd.stages.runtime.trial_runs.trial_runs import FirstRunError
from lightning_spmd.stages.runtime.undo import Before
from lightning_spmd.strategy.graphs.run_context import RunContext, StepRequest


class Beginning:
    """A graph of the beginning of a step, up to a value that Python reads; all ranks build it together.

    Args:
        context: what the graphs of the run are made in.
        wanted: the beginning.
        split: rows of the global batch by data rank.
        state_of: the live objects behind the inputs of a graph.

    Attributes:
        executable: the graph.

    Raises:
        SPMDError: on all ranks; it cannot be built.
    """

    def __init__(
        self,
        context: RunContext,
        wanted: CaptureRequest,
        split: tuple[int, ...],
        state_of: Callable[[CapturedStep], LiveState],
    ) -> None:
        executable, problem = None, None
        try:
            prefix = capture_followed(wanted)
            maker = GraphMaker(
                () if context.mesh is None else context.mesh.axes(split if wanted.batch is not None else ()),
                dataclasses.replace(context.options, passes=(), overlap_iterations=False),
                context.settings.ranks.plan(prefix.variant),
                on_fallback=lambda _line: None,
            )
            executable = Executable(prefix, maker.make(prefix), state_of(prefix))
        except SPMDError as error:
            problem = error
        control = context.control
        problems = [problem] if control is None else control.gather(None if problem is None else portable(problem))
        worst = next((p for p in problems if p is not None), None)
        if executable is None or worst is not None:
            raise worst or RuntimeError("unreachable: what could not be built has a reason")
        self.executable = executable
        self._streams = context.streams

    def fits(self, request: StepRequest) -> bool:
        """Whether this is the beginning of a step. Optimizer state and numbers of the step may differ."""
        tensors = [] if request.batch is None else request.batch.tensor_values
        inputs = functools.partial(self.executable.looked_at, tensors)
        return self.executable.captured.guards.failure(inputs) is None

    def values(self, request: StepRequest, place: str) -> Sequence[Tensor]:
        """The values that Python reads of a step. Nothing is changed; the step itself will draw the same numbers.

        Args:
            request: the step.
            place: ``file:line`` of the read.

        Raises:
            CaptureError: the graph cannot be run for this step.
        """
        executable, streams = self.executable, self._streams
        tensors = [] if request.batch is None else request.batch.tensor_values
        before = Before(executable.graphs.main.signature.inputs, executable.inputs(tensors), all_of_them=True)
        tick = 0 if streams is None else streams.tick
        try:
            outputs, _ = executable.run(tensors)
            return [before.apart(outputs[reference.position]) for reference in executable.captured.returned]
        except FirstRunError as error:
            raise CaptureError(str(error), place) from error
        finally:
            if streams is not None:
                streams.tick = tick
            before.restore()
