"""Gives capture the values that Python reads from tensors: all ranks run what comes before, on this step's batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_spmd.errors import CaptureError, SPMDError, portable
from lightning_spmd.ir.first import first
from lightning_spmd.ir.reads import Number
from lightning_spmd.ir.steps import CapturedStep
from lightning_spmd.stages import build
from lightning_spmd.stages.capture.foresight import Foreseen
from lightning_spmd.stages.capture.reads import ReadWanted, UnknownValueError
from lightning_spmd.stages.runtime.executor import Executable, FirstRunError
from lightning_spmd.stages.runtime.live_state import LiveState
from lightning_spmd.stages.runtime.undo import random_numbers_kept
from lightning_spmd.strategy.run_context import RunContext, StepRequest

_TRACES_BEFORE_A_GATHER = 2
"""So many values are found one after the other before ranks gather the whole batch, to find the rest at once."""
_MOST_BYTES = 2**28
"""A larger batch is not gathered for that."""
MOST_TRACES = 200
"""A step that needs more answers than this, one after the other, runs eagerly."""


class Answers:
    """Finds out what a step reads.

    Args:
        context: what the graphs of the run are made in.
        state_of: the live objects behind the inputs of a graph.
    """

    def __init__(self, context: RunContext, state_of: Callable[[CapturedStep], LiveState]) -> None:
        self._context = context
        self._state_of = state_of

    def give(
        self,
        request: StepRequest,
        split: tuple[int, ...],
        known: Mapping[int, Number] | None,
        trace: Callable[[Mapping[int, Number]], CapturedStep],
    ) -> CapturedStep:
        """What ``trace`` gives once it has all the answers that it asks for.

        All ranks do so together, but for a graph that some of them build alone: of a rank's own batch, or in place of
        one that another rank could not build. There nothing is answered.

        Args:
            request: the step.
            split: rows of the global batch by data rank.
            known: values by the number of the read, as far as they are known; None: this rank builds alone.
            trace: captures the step with these values.

        Raises:
            SPMDError: of this rank's capture; or another rank's step reads something else.
        """
        if known is None or request.variant.own_batch:
            mine = () if request.batch is None else request.batch.tensor_values
            try:
                return trace(Foreseen(known or {}, mine, draws=False, alone=True) if request.variant.own_batch else {})
            except ReadWanted as wanted:
                raise UnknownValueError("a tensor's value decides something", wanted.place) from None
        answers, batch = dict(known), None
        for attempt in range(MOST_TRACES):
            if attempt == (0 if self._is_alone else _TRACES_BEFORE_A_GATHER):
                batch = whole_batch(self._context, request, split)
            found, wanted, problem = None, None, None
            try:
                found = trace(answers if batch is None else Foreseen(answers, batch, draws=self._is_alone))
            except ReadWanted as error:
                wanted = error
            except SPMDError as error:
                problem = error
            guesses = None
            if batch is not None:
                guesses = found.answers if found is not None else {} if wanted is None else wanted.seen
            together = self._together(wanted, problem, guesses)
            if problem is not None:
                raise problem
            if wanted is not None and together:
                answers = wanted.seen | self._run(wanted, request, split)
            elif found is not None and together:
                return found
            batch = None
        raise CaptureError(f"the step decides {MOST_TRACES} times by the value of a tensor, each after the other")

    @property
    def _is_alone(self) -> bool:
        return self._context.control is None

    def _together(
        self, wanted: ReadWanted | None, problem: SPMDError | None, guesses: Mapping[int, Number] | None
    ) -> bool:
        """Whether all ranks want the same values, or none does; false where they only guess differently.

        Args:
            wanted: what this rank's trace wants.
            problem: what ended it.
            guesses: the values with which it got so far, where it found some itself.

        Raises:
            CaptureError: some of them do, others do not.
        """
        if self._context.control is None:
            return True
        mine = None if wanted is None else (wanted.place, wanted.numbers)
        told = None if guesses is None else repr(sorted(guesses.items()))
        sides = self._context.control.gather((mine, None if problem is None else str(problem), told))
        failed = any(text is not None for _, text, _ in sides)
        if all(side == mine for side, _, _ in sides):
            return failed or all(other == told for _, _, other in sides)
        if problem is not None or not (failed or guesses is None):
            return False
        rank, (other, text, _) = first(((r, s) for r, s in enumerate(sides) if s[0] != mine), "rank that differs")
        place = mine if mine is not None else other
        raise CaptureError(
            f"the value of a tensor decides something on some ranks alone; rank {rank} "
            + (text or ("does not read it" if other is None else "reads another one")),
            None if place is None else place[0],
        )

    def _run(self, wanted: ReadWanted, request: StepRequest, split: tuple[int, ...]) -> dict[int, Number]:
        prefix = wanted.prefix
        if prefix is None:
            raise RuntimeError("unreachable: a capture that wants a value packs what gives it")
        outputs = self.run(self.built(lambda: prefix, request, split), request, wanted.place)
        return dict(zip(wanted.numbers, outputs, strict=True))

    def built(self, capture: Callable[[], CapturedStep], request: StepRequest, split: tuple[int, ...]) -> Executable:
        """What runs the beginning of a step, for the values that Python reads; all ranks together.

        Args:
            capture: gives that beginning.
            request: the step.
            split: rows of the global batch by data rank.

        Raises:
            SPMDError: on all ranks; it cannot be built.
        """
        context, executable, problem = self._context, None, None
        try:
            prefix = capture()
            graphs = build(
                prefix,
                () if context.mesh is None else context.mesh.axes(split if request.batch is not None else ()),
                dataclasses.replace(context.options, passes=(), overlap_iterations=False),
                context.plan(prefix.variant),
                on_fallback=lambda _line: None,
            )
            executable = Executable(prefix, graphs, self._state_of(prefix))
        except SPMDError as error:
            problem = error
        control = context.control
        problems = [problem] if control is None else control.gather(None if problem is None else portable(problem))
        worst = next((p for p in problems if p is not None), None)
        if executable is None or worst is not None:
            raise worst or RuntimeError("unreachable: what could not be built has a reason")
        return executable

    def run(self, executable: Executable, request: StepRequest, place: str | None) -> Sequence[Any]:
        """What it gives; random numbers are those that the step itself will draw.

        Args:
            executable: the beginning of the step.
            request: the step.
            place: ``file:line`` that reads.

        Raises:
            CaptureError: it cannot be run.
        """
        context = self._context
        streams = context.streams
        tick = None if streams is None else streams.tick
        try:
            with random_numbers_kept(draws=streams is None, always=True):
                outputs, _ = executable.run(() if request.batch is None else request.batch.tensor_values)
        except FirstRunError as error:
            raise CaptureError(str(error), place) from error
        finally:
            if streams is not None and tick is not None:
                streams.tick = tick
        return outputs


def whole_batch(
    context: RunContext, request: StepRequest, split: tuple[int, ...], most_bytes: int | None = _MOST_BYTES
) -> Sequence[Tensor] | None:
    """The tensors of the global batch, the same on every rank; None where there is none, or it is too large.

    All ranks do this together.

    Args:
        context: of the run.
        request: the step.
        split: rows of the global batch by data rank.
        most_bytes: what is too large; None: nothing.
    """
    batch, mesh, control = request.batch, context.mesh, context.control
    if batch is None or mesh is None or control is None:
        return None if batch is None else batch.tensor_values
    mine = sum(t.nbytes for t in batch.tensor_values)
    if most_bytes is not None and max(control.gather(mine)) * len(split) > most_bytes:
        return None
    whole = [batch.is_shared(i) or batch.values[i].shape[0] == sum(split) for i in batch.tensors]
    own = [None if w else t.detach().cpu() for w, t in zip(whole, batch.tensor_values, strict=True)]
    parts = dict(reversed(control.gather((mesh.batch_rank, own))))
    in_order = [parts[rank] for rank in sorted(parts)]
    return [
        tensor if w else torch.cat([part[i] for part in in_order]).to(tensor.device)
        for i, (w, tensor) in enumerate(zip(whole, batch.tensor_values, strict=True))
    ]
