"""Times every line of the graphs that a run trains with: a clock between the lines of their functions.

::

    mul = aten_mul(x, 2.0); x = None          watch.begin()
                                              mul = aten_mul(x, 2.0); x = None
                                              watch.mark()

What runs, and in which order, is unchanged, and so is every number. On a GPU the clock is an event in the stream of the
operators, so nothing waits for it. The times are of iterations as they are: with what overlaps, and with all waits.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from lightning_spmd import _private_api as private
from lightning_spmd.ir.first import first
from lightning_spmd.ir.node_info import NodeInfo, Section
from lightning_spmd.ir.steps import ShardedStep
from lightning_spmd.ir.verify import is_wait, starts_collective
from lightning_spmd.stages.runtime.trial_runs.profile import clock_of

LEAST = 2
"""Runs of a graph without which nothing is told of it: such as one for an epoch's last and smaller batch."""
_TIMES = 5
"""A collective is measured alone."""


@dataclass(frozen=True)
class Timed:
    """The times of a graph.

    Args:
        name: part of the iteration that the graph is.
        step: the graph.
        runs: how often it ran.
        seconds: the median of each operator and each wait, by name of the node.
        waiting: median seconds of all waits of a run together.
        computing: median seconds of all other lines of a run together.
        after: median seconds from the end of a run to the beginning of the next graph's.
        alone: seconds of each collective while nothing else runs, by name of the node.
    """

    name: str
    step: ShardedStep
    runs: int
    seconds: Mapping[str, float]
    waiting: float
    computing: float
    after: float
    alone: Mapping[str, float]


class TimedGraph:
    """A graph with a clock between its lines.

    Args:
        name: part of the iteration that it is.
        step: the graph without the clock.
        watch: told of each run.
    """

    def __init__(self, name: str, step: ShardedStep, watch: Stopwatch) -> None:
        self.name, self.step = name, step
        self.lines = [node for node in step.graph_module.graph.nodes if node.op == "call_function"]
        self.clock: Any = clock_of(step.graph_module.graph)
        self._watch = watch
        self._marks: list[Any] = []
        self._operands: dict[str, list[Any]] = {}

    def timed(self) -> ShardedStep:
        """A copy of the graph that marks the time at its beginning and after each line."""
        graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
        graph.output(graph.graph_copy(self.step.graph_module.graph, made))
        with graph.inserting_before(first((n for n in graph.nodes if n.op != "placeholder"), "line")):
            marks = [graph.call_function(self._begin)]
        for node in self.step.graph_module.graph.nodes:
            if node.op == "call_function":
                if starts_collective(node):
                    with graph.inserting_before(made[node]):
                        marks.append(graph.call_function(self._see, (node.name, list(made[node].args))))
                with graph.inserting_after(made[node]):
                    marks.append(graph.call_function(self._mark))
        for mark in marks:
            mark.meta.update(val=None, info=NodeInfo(Section.COMMUNICATION))
        step = self.step
        return ShardedStep(private.GraphModule(step.graph_module, graph), step.signature, step.axes, step.fallbacks)

    def result(self, runs: Sequence[Sequence[Any]], gaps: Sequence[float]) -> Timed:
        """What some runs say.

        Args:
            runs: their marks.
            gaps: seconds from their ends to what ran next.
        """
        times = [[self.clock.seconds(a, b) for a, b in zip(run, run[1:], strict=False)] for run in runs]
        lines = [node.name for node in self.lines]
        waits = [[t for t, node in zip(run, self.lines, strict=True) if is_wait(node)] for run in times]
        waiting = [sum(run) for run in waits]
        return Timed(
            name=self.name,
            step=self.step,
            runs=len(runs),
            seconds=dict(zip(lines, map(statistics.median, zip(*times, strict=True)), strict=True)),
            waiting=statistics.median(waiting),
            computing=statistics.median(sum(run) - waited for run, waited in zip(times, waiting, strict=True)),
            after=statistics.median(gaps or [0.0]),
            alone={node.name: self._alone(node) for node in self.lines if starts_collective(node)},
        )

    def _alone(self, collective: fx.Node) -> float:
        """The shortest time of a collective, on tensors like its operands; all ranks do this at the same time.

        Like those of the last run: values decide how many rows experts exchange.
        """
        target: Any = collective.target
        args = [_like(operand) for operand in self._operands[collective.name]]
        marks: list[tuple[Any, Any]] = []
        for _ in range(_TIMES):
            begin = self.clock.mark()
            for value in _listed(target(*args, **collective.kwargs)):
                torch.ops._c10d_functional.wait_tensor.default(value)  # noqa: SLF001 - an operator's public name
            marks.append((begin, self.clock.mark()))
        self.clock.settle()
        return min(self.clock.seconds(*pair) for pair in marks)

    def _see(self, collective: str, operands: Sequence[Any]) -> None:
        self._operands[collective] = [_shape(operand) for operand in operands]

    def _begin(self) -> None:
        self._marks = [self.clock.mark()]
        self._watch.runs.append((self, self._marks))

    def _mark(self) -> None:
        self._marks.append(self.clock.mark())


class Stopwatch:
    """Times the graphs of a fit.

    Attributes:
        runs: every run since :meth:`begin`, in order: the graph and its marks.
    """

    def __init__(self) -> None:
        self.runs: list[tuple[TimedGraph, list[Any]]] = []

    def begin(self) -> None:
        """From now on; what was before does not count."""
        self.runs.clear()

    def timed(self, name: str, step: ShardedStep) -> ShardedStep:
        """A graph with the clock in it.

        Args:
            name: part of the iteration that it is.
            step: the graph.
        """
        return TimedGraph(name, step, self).timed()

    def results(self) -> list[Timed]:
        """The graphs that ran, in the order of their first run; called by all ranks together.

        Runs that were abandoned do not count.
        """
        whole = [(graph, marks) for graph, marks in self.runs if len(marks) == len(graph.lines) + 1]
        if whole:
            whole[0][0].clock.settle()
        found: list[Timed] = []
        for graph in dict.fromkeys(graph for graph, _ in whole):
            runs = [marks for other, marks in whole if other is graph]
            pairs = zip(whole, whole[1:], strict=False)
            gaps = [graph.clock.seconds(a[-1], b[0]) for (other, a), (_, b) in pairs if other is graph]
            if len(runs) >= LEAST:
                found.append(graph.result(runs, gaps))
        return found


@dataclass(frozen=True)
class _Shape:
    """What is kept of a tensor, whose memory is given back."""

    sizes: Sequence[int]
    dtype: torch.dtype
    device: torch.device


def _shape(operand: Any) -> Any:
    """An operand without memory."""
    if isinstance(operand, Tensor):
        return _Shape(operand.shape, operand.dtype, operand.device)
    return [_shape(item) for item in operand] if isinstance(operand, (list, tuple)) else operand


def _like(operand: Any) -> Any:
    """An operand like the one that had this shape."""
    if isinstance(operand, _Shape):
        return torch.zeros(operand.sizes, dtype=operand.dtype, device=operand.device)
    return [_like(item) for item in operand] if isinstance(operand, list) else operand


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else [value]
