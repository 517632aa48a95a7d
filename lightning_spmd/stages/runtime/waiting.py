"""Measures how long the graphs of a run wait for collectives: communication that no computation hides.

A final graph gets a mark of the clock at its beginning and two around each wait. On a GPU the marks are events in its
stream, so measuring does not wait. Graphs are only marked if the waits are used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from lightning_spmd import _private_api as private
from lightning_spmd.ir.first import first
from lightning_spmd.ir.node_info import NodeInfo, Section
from lightning_spmd.ir.steps import ShardedStep
from lightning_spmd.ir.verify import is_wait
from lightning_spmd.stages.runtime.lowering import Lowering, as_python
from lightning_spmd.stages.runtime.stopwatch import Stopwatch
from lightning_spmd.stages.runtime.trial_runs.profile import DeviceClock, HostClock, clock_of

_WAIT = private.entry_of(torch.ops._c10d_functional.wait_tensor.default)  # noqa: SLF001 - an operator's public name

Waits = Sequence[tuple[Any, Any]]
"""Marks around the waits of one run of a graph, each a beginning and an end."""


class WaitMeter:
    """The waits of the graphs of one run.

    Attributes:
        wanted: whether graphs that are lowered from now on are measured.
        is_on: whether the graph that runs is.
        stopwatch: times every line of the graphs that are lowered from now on, in place of the waits alone; or None.
    """

    def __init__(self) -> None:
        self.wanted = False
        self.is_on = True
        self.stopwatch: Stopwatch | None = None
        self._clock: HostClock | DeviceClock = HostClock()
        self._found: list[tuple[Any, Any]] | None = None

    def timing(self, lower: Lowering, name: str = "") -> Lowering:
        """A lowering whose callables are measured, if waits are used. CUDA graphs are not measured.

        Args:
            lower: makes the callables.
            name: part of the iteration that the graphs are.
        """
        if lower is not as_python:
            return lower
        if (watch := self.stopwatch) is not None:
            return lambda step: lower(watch.timed(name, step))
        return (lambda step: lower(self._marked(step))) if self.wanted else lower

    def take(self) -> Waits | None:
        """The waits since the last call; None if no marked graph has run."""
        found, self._found = self._found, None
        return found

    def _marked(self, step: ShardedStep) -> ShardedStep:
        """A copy of a graph of several ranks with the marks in it."""
        if not step.axes:
            return step
        graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
        graph.output(graph.graph_copy(step.graph_module.graph, made))
        self._clock = clock_of(step.graph_module.graph)
        with graph.inserting_before(first((n for n in graph.nodes if n.op != "placeholder"), "output")):
            begin = graph.call_function(self._begin)
        begin.meta.update(val=None, info=NodeInfo(Section.COMMUNICATION))
        wait: Callable[..., Any] = self._wait
        for node in [node for node in graph.nodes if is_wait(node)]:
            node.target = wait
        return ShardedStep(private.GraphModule(step.graph_module, graph), step.signature, step.axes, step.fallbacks)

    def _begin(self) -> None:
        self._found = [] if self.is_on else None

    def _wait(self, tensor: Tensor) -> Tensor:
        if self._found is None:
            return _WAIT(tensor)
        mark = self._clock.mark
        begin = mark()
        tensor = _WAIT(tensor)
        self._found.append((begin, mark()))
        return tensor
