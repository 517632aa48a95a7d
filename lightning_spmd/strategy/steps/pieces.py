"""A step that reads several values on several ranks before it has a graph: pieces of it run, one behind the other.

A graph of the beginning for each read would compute all that was before it again. A piece holds what Python has called
since it read last (``stages/capture/pieces.py``). It takes values that the pieces before it have left, and leaves its
own. What a piece writes into are copies, so live tensors are as they were until the step's graph runs. A step's first
read has a graph of its own, which leaves nothing: most steps that read do so once.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_spmd.errors import CaptureError, SPMDError, portable
from lightning_spmd.ir.layout import has_layout, in_layout
from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.ir.placement import Placement
from lightning_spmd.ir.random_states import TorchRandomState
from lightning_spmd.ir.signature import GraphInput, InputRole, OutputRole
from lightning_spmd.ir.source import ErrorsNamePlaces
from lightning_spmd.ir.steps import CapturedStep, ShardedStep
from lightning_spmd.parallel.parallel_plan import sequence_dim
from lightning_spmd.stages import GraphMaker
from lightning_spmd.stages.capture.follow.program import Program
from lightning_spmd.stages.capture.pieces import PiecewiseTrace
from lightning_spmd.stages.runtime.live_state import LiveState, Reader
from lightning_spmd.stages.runtime.random_streams import NOTHING_DRAWN, Drawn, draws_numbers
from lightning_spmd.stages.runtime.switches import GraphSwitches
from lightning_spmd.stages.runtime.trial_runs.first_run import LayoutCheck
from lightning_spmd.strategy.graphs.run_context import RunContext, StepRequest
from lightning_spmd.strategy.graphs.vote import agreed

MOST_PIECES = 1024
"""Beyond so many pieces a run begins to make them anew."""
_Name = tuple[InputRole, tuple[Any, ...]]
"""Names a value in all pieces of a step: role and key of the input that it is."""


@dataclass(eq=False)
class Piece:
    """A piece of a step's beginning as this rank runs it.

    Args:
        captured: as it was captured.
        step: this rank's graph.
        readers: of its inputs, as of a program; None of what earlier pieces have left.
        drawn: where the streams of random numbers are behind it.
        draws: whether it draws from them.
        behind: the pieces that came next, by the path and what Python reads.
    """

    captured: CapturedStep
    step: ShardedStep
    readers: Sequence[Reader | int | None]
    drawn: Drawn
    draws: bool
    behind: dict[Any, list[Piece]] = field(default_factory=dict[Any, "list[Piece]"])


class Pieces:
    """The known pieces of the steps of one run.

    Args:
        context: what graphs of the run are made in.
        trace: begins the capture of a step, with these rows of the global batch by data rank.
        state_of: the live objects behind the inputs of a graph.
    """

    def __init__(
        self,
        context: RunContext,
        trace: Callable[[StepRequest, tuple[int, ...]], PiecewiseTrace],
        state_of: Callable[[CapturedStep], LiveState],
    ) -> None:
        self.context, self.trace, self.state_of = context, trace, state_of
        self.first: dict[Any, list[Piece]] = {}
        self.refused: set[Any] = set()
        """Steps that have no pieces."""
        self.count = 0

    def forget(self) -> None:
        """Drop all pieces."""
        self.first, self.count = {}, 0


class PiecesOfStep:
    """The pieces of one step, up to where it is.

    Args:
        known: the run's.
        key: gives the key of steps with the same batch and variant; most steps need none.
        split: rows of the global batch by data rank.
    """

    def __init__(self, known: Pieces, key: Callable[[], Any], split: tuple[int, ...]) -> None:
        if known.count > MOST_PIECES:
            known.forget()
        self._known, self._find_key, self.split = known, key, split
        self._reads = 0
        self._done: list[tuple[Piece, Program]] = []
        self._trace: PiecewiseTrace | None = None  # of all that is done
        self._drawn = NOTHING_DRAWN
        self._random: TorchRandomState | None = None
        self._kept: dict[_Name, Any] = {}
        self._placed: dict[_Name, tuple[Placement, ...]] = {}

    @functools.cached_property
    def _key(self) -> Any:
        return self._find_key()

    def values(self, request: StepRequest) -> Sequence[Any] | None:
        """What Python reads now; None if that takes a graph of the whole beginning. All ranks together.

        Args:
            request: the step, whose program ends at the read.
        """
        self._reads += 1
        program, known = request.program, self._known
        if self._reads == 1 or self._key in known.refused or program is None:
            return None
        key = self._key, program.key, tuple(want.source for want in program.wants)
        siblings = (self._done[-1][0].behind if self._done else known.first).setdefault(key, [])
        fitting = next((index for index, one in enumerate(siblings) if self._fits(one, request)), None)
        index = agreed(known.context.control, fitting)
        piece = siblings[index] if index is not None else self._built(request)
        if piece is None:
            known.refused.add(self._key)
            self.end()
            return None
        if index is None:
            siblings.append(piece)
            known.count += 1
        else:
            self._trace = None
        self._done.append((piece, program))
        return self._run(piece, request)

    def end(self) -> None:
        """Let go of all values: Python reads no more."""
        self._trace = None
        self._kept.clear()

    # ------------------------------------------------------------------ pieces that are new
    def _built(self, request: StepRequest) -> Piece | None:
        """A new piece behind those that have run; None, on all ranks, if there can be none."""
        piece, problem = None, None
        try:
            piece = self._made(request, self._captured(request))
        except SPMDError as error:
            problem = portable(error)
        control = self._known.context.control
        problems = [problem] if control is None else control.gather(problem)
        return piece if problems.count(None) == len(problems) else None

    def _captured(self, request: StepRequest) -> CapturedStep:
        """What Python has called since it read last; the calls before are recorded again where they have not been."""
        if request.program is None:
            raise ValueError("nothing is read in a step without Python")
        if self._trace is None:
            self._trace = self._known.trace(request, self.split)
            for piece, program in self._done:
                if _names(self._trace.piece(program)) != _names(piece.captured):
                    raise CaptureError("the calls before a read are recorded in another way than in another step")
        return self._trace.piece(request.program)

    def _made(self, request: StepRequest, captured: CapturedStep) -> Piece:
        """This rank's form of a piece."""
        context, known = self._known.context, self._known
        if context.mesh is None:
            raise ValueError("one device needs no graph for what Python reads")
        axes = context.mesh.axes(self.split if request.batch is not None else ())
        plan = context.settings.ranks.plan(captured.variant)
        if any(sequence_dim(plan, axis) is not None for axis in axes):
            raise CaptureError("how a sequence is cut is decided by the whole step")
        inputs = tuple(map(self._as_placed, captured.signature.inputs))
        captured = dataclasses.replace(captured, signature=dataclasses.replace(captured.signature, inputs=inputs))
        step = GraphMaker(axes, plan=plan, on_fallback=lambda _line: None).expanded(captured, self._drawn)
        readers = known.state_of(captured).readers(step.signature.inputs, captured.constants)
        draws = draws_numbers(captured.graph_module.graph)
        return Piece(captured, step, readers, self._drawn.behind(step), draws)

    def _as_placed(self, entry: GraphInput) -> GraphInput:
        """What an earlier piece has left lies as that left it."""
        if entry.role is not InputRole.KEPT:
            return entry
        return dataclasses.replace(entry, placements=self._placed[entry.role, entry.key])

    # ------------------------------------------------------------------ runs
    def _fits(self, piece: Piece, request: StepRequest) -> bool:
        """Whether a known piece is the next one of this step. An optimizer's first update is not like later ones."""
        return piece.captured.guards.failure(lambda: self._inputs(piece, request)) is None

    def _inputs(self, piece: Piece, request: StepRequest) -> list[Any]:
        batch = () if request.batch is None else request.batch.tensor_values
        found: list[Any] = []
        for read, entry in zip(piece.readers, piece.step.signature.inputs, strict=True):
            name = entry.role, entry.key
            if name in self._kept:  # a live tensor that an earlier piece wrote into is there as well
                found.append(self._kept[name])
            else:
                found.append(batch[read] if isinstance(read, int) else read())  # type: ignore[misc]
        return found

    def _run(self, piece: Piece, request: StepRequest) -> Sequence[Any]:
        """What Python reads; the random numbers are those that the step itself will draw."""
        streams, signature = self._known.context.streams, piece.step.signature
        if streams is None:
            raise ValueError("one device needs no graph for what Python reads")
        inputs = self._inputs(piece, request)
        for index, entry in enumerate(signature.inputs):
            if isinstance(inputs[index], Tensor):
                inputs[index] = self._laid_out(inputs[index], entry)
        with GraphSwitches(), ErrorsNamePlaces():
            try:
                with streams.active(draws=piece.draws):
                    if piece.draws and self._random is not None:
                        self._random.restore()
                    outputs = LayoutCheck(piece.step.graph_module).run(*inputs)
                    self._random = TorchRandomState() if piece.draws else self._random
            finally:
                streams.tick -= 1
        for value, entry in zip(outputs, signature.outputs, strict=True):
            if entry.role is OutputRole.KEPT:
                name = InputRole.KEPT, entry.key
                self._kept[name], self._placed[name] = value, entry.placements
        self._drawn = piece.drawn
        return [outputs[reference.position] for reference in piece.captured.returned]

    def _laid_out(self, value: Tensor, entry: GraphInput) -> Tensor:
        """An input as a piece takes it: in a copy where it is written, and what was left in the expected layout."""
        name = entry.role, entry.key
        if entry.mutated:
            value = self._kept[name] = value.detach().clone()
        if entry.role is InputRole.KEPT and isinstance(entry.value, TensorSpec) and not has_layout(value, entry.value):
            value = self._kept[name] = in_layout(value, entry.value)
        return value


def _names(captured: CapturedStep) -> tuple[list[Any], list[Any]]:
    """Of what a piece takes, and of what it leaves."""
    signature = captured.signature
    return [(e.role, e.key) for e in signature.inputs], [(e.role, e.key) for e in signature.outputs]
