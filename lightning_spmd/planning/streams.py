"""Simulates the graphs of an iteration with times instead of tensors: when a rank computes and communicates.

The host issues one operator after the other. On a GPU the device runs them in a stream behind the host; on a CPU the
host is the device. A collective begins when it is issued, its operand exists, and the previous one of its group has
ended. A wait blocks the device until the collective has ended. Collectives in flight at the end of an iteration are
waited for in the next one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from lightning_spmd._private_api import OpOverload
from lightning_spmd.ir.signature import InputRole, OutputRole
from lightning_spmd.ir.steps import ShardedStep
from lightning_spmd.ir.verify import is_wait, starts_collective

COMPUTE = "compute"
"""The stream of the device; the others are named after process groups."""
BETWEEN = "between graphs"
"""What a rank does from the end of a graph to the next one: Lightning, data, the step's Python, meetings of ranks."""


@dataclass
class Span:
    """A node's time in a stream.

    Args:
        node: the node.
        stream: ``COMPUTE``, or the name of a process group.
        begin: seconds since the first graph began.
        end: likewise.
    """

    node: fx.Node
    stream: str
    begin: float
    end: float

    @property
    def seconds(self) -> float:
        """How long it takes."""
        return self.end - self.begin


@dataclass
class Played:
    """One simulated run of a graph.

    Args:
        name: name of the phase.
        begin: when it began, in seconds since the first graph began.
        spans: nodes that began in it.
        carried: collectives that began in the run before and end in this one.
        stalls: times in which the device waited for a collective; their node is the start of the collective.
        end: when the device was done.
        at: by position in the graph, when the device was done with the node.
    """

    name: str
    begin: float
    spans: list[Span] = field(default_factory=list[Span])
    carried: list[Span] = field(default_factory=list[Span])
    stalls: list[Span] = field(default_factory=list[Span])
    end: float = 0.0
    at: list[float] = field(default_factory=list[float])

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.begin

    @property
    def exposed(self) -> float:
        """Seconds in which the device waited for a collective."""
        return sum(s.seconds for s in self.stalls)

    def waited(self, node: fx.Node) -> float:
        """Seconds in which the device waited for the collective that this node starts."""
        return sum(s.seconds for s in self.stalls if s.node is node)

    @property
    def computing(self) -> float:
        """Seconds in which the device computes."""
        return sum(s.seconds for s in self.spans if s.stream == COMPUTE)

    @property
    def communicating(self) -> float:
        """Seconds of all collectives, one after the other."""
        return sum(s.seconds for s in self.spans if s.stream != COMPUTE)


class Player:
    """The streams of a rank, over any number of graphs.

    Args:
        launch: seconds of the host from one operator to the next.
        on_host: whether the host is the device.
        core: seconds that the host loses in each second of a collective, by group; none where there is nothing.
    """

    def __init__(self, launch: float, *, on_host: bool, core: Mapping[str, float] | None = None) -> None:
        self._launch, self._on_host, self._core = launch, on_host, core or {}
        self._host = self._device = 0.0
        self._free: dict[str, float] = {}
        self._pending: dict[tuple[Any, ...], Span] = {}

    def play(self, name: str, step: ShardedStep, seconds: Mapping[str, float]) -> Played:
        """Run a graph.

        Args:
            name: of the phase.
            step: the graph.
            seconds: of every node, by name.
        """
        played = Played(name, self._device)
        due: dict[fx.Node, Span] = {}
        graph = step.graph_module.graph
        for node, entry in zip(graph.find_nodes(op="placeholder"), step.signature.inputs, strict=True):
            if entry.role is InputRole.PENDING and entry.key in self._pending:
                due[node] = self._pending[entry.key]
                played.carried.append(due[node])
        for node in graph.nodes:
            if node.op == "call_function":
                self._run(node, seconds.get(node.name, 0.0), due, played)
            played.at.append(self._device)
        outputs: Any = graph.output_node().args[0]
        handed_on = step.signature.outputs_of(OutputRole.PENDING)
        self._pending = {entry.key: due[outputs[i]] for i, entry in handed_on if outputs[i] in due}
        # Lightning reads the loss at the end of a step at the latest, so the host does not run further ahead.
        self._host = self._device = max(self._host, self._device)
        played.end = self._device
        return played

    def _run(self, node: fx.Node, seconds: float, due: dict[fx.Node, Span], played: Played) -> None:
        if isinstance(node.target, OpOverload):
            self._host += self._launch
        if self._on_host:
            self._host = self._device = max(self._host, self._device)
        ready = max(self._host, self._device)
        if starts_collective(node):
            group = str(node.args[-1])
            begin = max(ready, self._free.get(group, 0.0))
            self._free[group] = begin + seconds
            due[node] = Span(node, group, begin, begin + seconds)
            played.spans.append(due[node])
            self._host += self._core.get(group, 0.0) * seconds
        elif is_wait(node):
            self._wait(due.get(node.all_input_nodes[0]), played)
        elif seconds > 0:
            self._device = ready + seconds
            played.spans.append(Span(node, COMPUTE, ready, self._device))
        else:  # perhaps taken out of a box in which something under way was handed on
            known = [due[n] for n in node.all_input_nodes if n in due]
            if known:
                due[node] = known[0]

    def _wait(self, flight: Span | None, played: Played) -> None:
        if flight is None:
            return
        held = flight.end - max(self._device, self._host)
        if held > 0:
            played.stalls.append(Span(flight.node, COMPUTE, flight.end - held, flight.end))
            self._device = flight.end
            if self._on_host:
                self._host = flight.end
