"""Runs iteration graphs that pause before their update (``stages.phases.pause``)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Sequence
from types import FrameType
from typing import Any

from torch import Tensor, UntypedStorage, fx

from lightning_spmd import _private_api as private
from lightning_spmd.errors import VerificationError
from lightning_spmd.ir.signature import InputRole, OutputRole
from lightning_spmd.ir.source import function_of, pause
from lightning_spmd.ir.steps import PausingStep, ShardedStep, ShownGradients
from lightning_spmd.stages.runtime.ahead import Question, asking
from lightning_spmd.stages.runtime.executor import Executable, Pending, Program
from lightning_spmd.stages.runtime.live_state import in_parts
from lightning_spmd.stages.runtime.lowering import Lowering
from lightning_spmd.stages.runtime.switches import GraphSwitches
from lightning_spmd.stages.runtime.undo import tensors_of, wait_for_tensors_of

_LASTING = (InputRole.PARAMETER, InputRole.OPTIMIZER_STATE, InputRole.HYPER_PARAMETER)
Parts = Generator[Sequence[Any], None, Sequence[Any]]
"""A run: hands over what is there in the pause, goes on, and returns the outputs."""


class PausingExecutable(Executable):
    """An executable whose :meth:`run` stops before the update; :meth:`resume` does it, :meth:`drop` abandons it.

    For iterations on several ranks, whose graphs are lowered to Python.

    Args:
        pausing: makes the pausing form of a graph.
        args: as for other executables.
        kwargs: likewise.
    """

    def __init__(self, pausing: Callable[[ShardedStep], PausingStep], *args: Any, **kwargs: Any) -> None:
        self._pausing = pausing
        super().__init__(*args, **kwargs)
        if self.graphs.shown is None:
            raise VerificationError("the graphs of an iteration that pauses show no gradients")
        self._shown = self.graphs.shown
        self._early = self._pausing(self.graphs.main).early
        self._show = function_of(self._shown.recipe)
        self._parts: Parts | None = None
        self._then: Callable[[], None] = _nothing
        self._operands: Sequence[Any] = ()
        entries = [entry for _, entry in self._main.step.signature.inputs_of(*_LASTING)]
        self._lasting = [read for read in self.state.readers(entries, ()) if callable(read)]
        self._found: list[Any] = []

    @property
    def shown(self) -> ShownGradients:
        """Which gradients can be asked for."""
        return self._shown

    def run(
        self,
        batch: Sequence[Tensor],
        pending: Pending | None = None,
        question: Question | None = None,
    ) -> tuple[Sequence[Any], Pending | None]:
        """Run an iteration up to its update.

        Args:
            batch: as for other executables.
            pending: likewise.
            question: likewise.

        Returns:
            the outputs of the captured graph, None for those that the update makes; and None.
        """
        self.drop()
        self._question, self._then = question, _nothing
        program, values, run = self._main, (), None
        if self._trials:
            trial = self._trials[0]
            run = functools.partial(_in_parts, trial.interpreter())
            self._then = functools.partial(self._tried, trial)
        elif pending is not None:
            program, values = self._following(pending.owner), pending.values
        return self._begin(program, batch, values, run or program.run), None

    def gradients(self) -> dict[str, Tensor]:
        """The values of ``p.grad`` during the pause, by parameter. This needs no other rank."""
        with GraphSwitches():
            values = self._show(*self._operands)
        found: dict[str, Tensor] = {}
        entries = [e for e in self.captured.signature.outputs if e.role is OutputRole.SHOWN_GRADIENT]
        for whole, entry, value in zip(entries, self._shown.entries, values, strict=True):
            if self.state.wrap is not None and in_parts(entry.placements):
                value = self.state.wrap(value, whole.value, entry.placements)
            found[entry.key[0]] = value
        return found

    @property
    def shows_parts(self) -> bool:
        """Whether gradients that can be asked for are a rank's own parts."""
        return any(in_parts(entry.placements) for entry in self._shown.entries)

    def operand_storages(self) -> set[int]:
        """The memory of the gradients. The update reads what is written into it."""
        return (
            set()
            if not self._shown.are_updated
            else {private.storage_of(value) for value in self._operands if isinstance(value, Tensor)}
        )

    @property
    def is_current(self) -> bool:
        """Whether the update would find all that it takes as it was when the iteration began."""
        guards = self.captured.guards
        if any(guard.failure() is not None for guard in guards.values):
            return False
        return all(
            new is old if isinstance(old, Tensor) else new == old
            for new, old in zip([read() for read in self._lasting], self._found, strict=True)
        )

    def goes_on_with(self, memory: UntypedStorage) -> bool:
        """Whether the iteration that has paused holds a tensor on some memory: a view of what was in a parameter."""
        frame = self._frame()
        return frame is not None and any(private.is_in(tensor, memory) for tensor in tensors_of(frame))

    def _frame(self) -> FrameType | None:
        return getattr(self._parts, "gi_frame", None)  # of generators alone, say typing's stubs

    def resume(self) -> Pending | None:
        """Do the update. Returns the deferred work.

        Raises:
            VerificationError: no iteration has paused.
        """
        parts, self._parts, self._operands = self._parts, None, ()
        if parts is None:
            raise VerificationError("no iteration has paused")
        with GraphSwitches():
            outputs = _rest_of(parts)
        self._store(outputs)
        pending = self._left_by(outputs)[1]
        self._then()
        return pending

    def drop(self) -> None:
        """The update of the iteration that has paused is done otherwise, or not at all."""
        if self._parts is not None:
            frame = self._frame()
            if frame is not None:
                wait_for_tensors_of(frame)  # collectives that were begun for the update alone
            self._parts.close()
        self._parts, self._operands = None, ()

    # ------------------------------------------------------------------ pieces
    def _program(self, step: ShardedStep, lower: Lowering | None = None) -> Program:
        if step is self.graphs.cleanup:
            return super()._program(step, lower)
        readers = self.state.readers(step.signature.inputs, self.captured.constants)
        return Program(step, readers, lambda final: self._lower(asking(self._pausing(final).step, self._ask)))

    def _form(self, step: ShardedStep) -> fx.GraphModule:
        return self._pausing(step).step.graph_module

    def _begin(
        self, program: Program, batch: Sequence[Tensor], pending: Sequence[Any], run: Callable[..., Any]
    ) -> Sequence[Any]:
        """Up to the pause; buffers that the graph replaces are stored there."""
        begun: list[Parts] = []

        def first(*inputs: Any) -> Sequence[Any]:
            begun.append(run(*inputs))
            return begun[0].send(None)

        self._found = [read() for read in self._lasting]
        handed = self._compute(program, batch, pending, first)
        self._parts = begun[0]
        outputs: list[Any] = [None] * len(self.captured.signature.outputs)
        for position, value in zip(self._early, handed, strict=False):
            outputs[position] = value
        self._operands = handed[len(self._early) :]
        roles = self.captured.signature.outputs
        for position, write in self._writers:
            if roles[position].role is OutputRole.BUFFER:
                write(outputs[position])
        return outputs

    def _store(self, outputs: Sequence[Any]) -> None:
        """What the update made; buffers have been stored in the pause."""
        for position, write in self._writers:
            if self.captured.signature.outputs[position].role is not OutputRole.BUFFER:
                write(outputs[position])


def _nothing() -> None:
    pass


def _in_parts(interpreter: fx.Interpreter, *inputs: Any) -> Parts:
    """A run of an interpreter that hands over what a pause has."""
    graph = interpreter.module.graph
    interpreter.env = {}
    interpreter.args_iter = iter(inputs)
    for node in graph.nodes:  # type: ignore[union-attr]
        interpreter.env[node] = interpreter.run_node(node)
        if node.target is pause:
            yield interpreter.env.pop(node)
        for unused in interpreter.user_to_last_uses.get(node, []):
            interpreter.env.pop(unused, None)
        if node.op == "output":
            return interpreter.env.pop(node)
    raise VerificationError("a graph without outputs")


def _rest_of(parts: Parts) -> Sequence[Any]:
    try:
        parts.send(None)
    except StopIteration as end:
        return end.value
    raise VerificationError("an iteration paused twice")
