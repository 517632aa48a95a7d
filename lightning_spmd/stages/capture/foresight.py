"""Values that Python reads, found in the middle of a trace: what was recorded so far is run beside it.

A step that decides thirty times by what it reads would otherwise be traced thirty times, each time up to the next
value. Here the recorded operators run on this step's batch and live parameters, on copies where they write, and the
trace goes on with what they give. Such a value is a good guess and no more: the graph asks in each run, the first one
included, whether its decisions hold (``ir.reads``). What cannot be run so is found as before, by a graph of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.tensor import DTensor

from lightning_spmd import _private_api as private
from lightning_spmd.ir.aliasing import written_arguments
from lightning_spmd.ir.effects import draws_random
from lightning_spmd.ir.reads import Number
from lightning_spmd.ir.signature import GraphInput, InputRole
from lightning_spmd.stages.capture.decisions import needed_for
from lightning_spmd.stages.capture.inputs import InputTable
from lightning_spmd.stages.capture.recorder import Recorder

_COPIED = (InputRole.BATCH, InputRole.SHARED_BATCH, InputRole.BUFFER, InputRole.CONSTANT)


class Foreseen(dict[int, Number]):
    """Values that are known, by the number of the read, and with what others are found while a step is traced.

    Args:
        known: the values.
        batch: the tensors of the global batch.
        draws: whether a draw here gives the numbers that the graph would draw.
        alone: nothing else is run than what a value follows from.
    """

    def __init__(
        self, known: Mapping[int, Number], batch: Sequence[Tensor], *, draws: bool, alone: bool = False
    ) -> None:
        super().__init__(known)
        self.batch, self.draws, self.alone = batch, draws, alone


def foresee(recorder: Recorder, inputs: InputTable, answers: Mapping[int, Number]) -> None:
    """Let a trace find the values that it reads, if it is given with what."""
    if isinstance(answers, Foreseen):
        recorder.reads.foresee = _Foresight(recorder, inputs, answers).number


class _CannotBeForeseenError(Exception):
    """What was recorded cannot be run beside the trace."""


class _Foresight:
    """What one trace recorded, run as far as somebody asked."""

    def __init__(self, recorder: Recorder, inputs: InputTable, given: Foreseen) -> None:
        self._recorder, self._inputs, self._given = recorder, inputs, given
        self._values: dict[fx.Node, Any] = {}
        self._parameters: set[int] = set()
        self._random = _generators()  # before the recorder advances them
        self._ended = False

    def number(self, node: fx.Node) -> Number | None:
        """The number that a node reads; None where that cannot be told."""
        if self._ended:
            return None
        watch = self._recorder.watch
        watched = watch is not None and watch.pause()
        try:
            with self._beside():
                self._catch_up(node)
            return self._values[node]
        except Exception:  # whatever it is: what reads the value in the usual way says so better
            self._ended = True
            self._values.clear()
            return None
        finally:
            if watched and watch is not None:
                watch.go_on()

    @contextlib.contextmanager
    def _beside(self) -> Iterator[None]:
        """Tensors are real, and the next draws those that follow the last ones here."""
        with contextlib.ExitStack() as stack:
            for enter in (private.disable_dispatch_modes, private.disable_torch_functions, private.disable_autocast):
                stack.enter_context(enter())
            stack.enter_context(torch.no_grad())
            before = _generators()
            _put(self._random)
            try:
                yield
            finally:
                self._random = _generators()
                _put(before)

    def _catch_up(self, wanted: fx.Node) -> None:
        graph = self._recorder.graph
        needed = needed_for(graph, [wanted]) if self._given.alone else set(graph.nodes)
        for node in graph.nodes:
            if node in needed and node not in self._values:
                self._values[node] = self._run(node)

    def _run(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            return self._input(node, self._inputs.entries[node])
        if draws_random(node) and not self._given.draws:
            raise _CannotBeForeseenError
        for written in written_arguments(node):
            if private.storage_of(self._values[written]) in self._parameters:
                raise _CannotBeForeseenError
        function: Any = node.target
        args = fx.map_arg(node.args, self._values.__getitem__)
        kwargs = fx.map_arg(node.kwargs, self._values.__getitem__)
        return function(*args, **kwargs)

    def _input(self, node: fx.Node, entry: GraphInput) -> Any:
        """What an input is in this step."""
        if isinstance(entry.value, (bool, int, float)):
            return entry.value
        if entry.role in (InputRole.BATCH, InputRole.SHARED_BATCH):
            live: Tensor | None = self._given.batch[entry.key[0]]
        elif entry.role is InputRole.CONSTANT:
            live = self._recorder.constants[entry.key[0]]
        else:
            live = self._inputs.live.get(node)
        if live is None or isinstance(live, DTensor):
            raise _CannotBeForeseenError
        if entry.role in _COPIED:
            return live.detach().clone()
        self._parameters.add(private.storage_of(live))
        return live.detach()


def _generators() -> tuple[Tensor, list[Tensor]]:
    return torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []


def _put(state: tuple[Tensor, list[Tensor]]) -> None:
    torch.set_rng_state(state[0])
    if state[1]:
        torch.cuda.set_rng_state_all(state[1])
