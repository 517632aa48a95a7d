"""Measures a graph node by node: how long each operator and each collective takes, and then as a whole.

Node by node, collectives are waited for at once, so their time is their own. As a whole they overlap with operators,
which slows down both where they share cores. These are real iterations; only their speed differs.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.ir.sizes import SizedInterpreter
from lightning_spmd.ir.verify import is_wait, starts_collective

RUNS = 2
"""Iterations that are measured node by node; one more is measured as a whole."""


class HostClock:
    """Time on the host, where an operator is complete when its call returns."""

    def mark(self) -> float:
        """Now."""
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        """Between two marks."""
        return end - begin

    def settle(self) -> None:
        """Wait until every mark has been passed."""

    def has_passed(self, mark: float) -> bool:
        """Whether a mark has been passed."""
        return True


class DeviceClock:
    """Time on a GPU: events in its stream, which take no synchronisation, so the host runs ahead as it always does."""

    def mark(self) -> torch.cuda.Event:
        """An event behind the operators issued so far."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Between two marks."""
        return 1e-3 * begin.elapsed_time(end)

    def settle(self) -> None:
        """Wait until every mark has been passed."""
        torch.cuda.synchronize()

    def has_passed(self, mark: torch.cuda.Event) -> bool:
        """Whether the device has passed a mark, without waiting."""
        return mark.query()


def clock_of(graph: fx.Graph) -> HostClock | DeviceClock:
    """The clock of the device that a graph's values are on."""
    values = [node.meta.get("val") for node in graph.nodes]
    on_device = any(isinstance(v, TensorSpec) and v.device.type == "cuda" for v in values)
    return DeviceClock() if on_device else HostClock()


class Profile(SizedInterpreter):
    """Runs a graph and keeps the shortest time of every node over its runs.

    Args:
        graph_module: the graph.
    """

    def __init__(self, graph_module: fx.GraphModule) -> None:
        super().__init__(graph_module)
        self.seconds: dict[str, float] = {}
        self.runs = 0
        self._clock: Any = clock_of(graph_module.graph)
        self._marks: list[tuple[str, Any, Any]] = []

    def _end(self) -> None:
        """All nodes of an iteration have run."""
        self.runs += 1
        self._clock.settle()
        for name, begin, end in self._marks:
            seconds = self._clock.seconds(begin, end)
            self.seconds[name] = min(seconds, self.seconds.get(name, seconds))
        self._marks = []

    def run_node(self, n: fx.Node) -> Any:
        """One node, between two marks."""
        if n.op == "output":
            self._end()
        if n.op != "call_function":
            return super().run_node(n)
        begin = self._clock.mark()
        value = super().run_node(n)
        if starts_collective(n):
            value = torch.ops._c10d_functional.wait_tensor.default(value)  # noqa: SLF001 - an operator's public name
        self._marks.append((n.name, begin, self._clock.mark()))
        return value


class Whole(SizedInterpreter):
    """Runs a graph once and keeps the time.

    Args:
        graph_module: the graph.
    """

    def __init__(self, graph_module: fx.GraphModule) -> None:
        super().__init__(graph_module)
        self.seconds: float | None = None
        self._clock: Any = clock_of(graph_module.graph)
        self._begin: Any = None

    def run_node(self, n: fx.Node) -> Any:
        """One node; the clock is read before the first and behind the last."""
        if self._begin is None and n.op != "placeholder":
            self._begin = self._clock.mark()
        if n.op == "output":
            end = self._clock.mark()
            self._clock.settle()
            self.seconds = self._clock.seconds(self._begin, end)
        return super().run_node(n)


def agree(graph: fx.Graph, everyone: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """One set of times for all ranks.

    For computation the slowest rank counts. For a collective the shortest time counts: it is that of the last rank to
    arrive, which waited for no other.
    """
    found: dict[str, float] = {}
    for node in graph.nodes:
        seconds = [times[node.name] for times in everyone if node.name in times]
        if seconds and not is_wait(node):
            found[node.name] = min(seconds) if starts_collective(node) else max(seconds)
    return found
