"""The streams of a rank and its waits, as they were measured: what ``streams.py`` simulates, from clocks between lines.

Operators and waits have the median of their times. When a collective ends, its wait alone knows: one that was waited
for ends with the wait. Any other is drawn as long as it takes alone, and ends before the wait.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import fx

from lightning_spmd.ir.node_info import Section, info_of
from lightning_spmd.ir.steps import ShardedStep
from lightning_spmd.ir.verify import is_wait, starts_collective
from lightning_spmd.planning.facts import streams_facts
from lightning_spmd.planning.outlook import Outlook
from lightning_spmd.planning.streams import BETWEEN, COMPUTE, Played, Player, Span
from lightning_spmd.planning.times import message_of
from lightning_spmd.stages.runtime.stopwatch import Timed

AT_ONCE = 20e-6
"""Seconds: a wait that takes less found its collective ended, and the time is that of the call."""
Facts = dict[str, Any]


@dataclass(frozen=True)
class Wait:
    """A wait of an iteration.

    Args:
        name: of the collective's node, with its phase.
        kind: of the collective.
        size: its bytes.
        seconds: of waiting.
        of: whose values it moves: modules with the user's lines, or parameters.
    """

    name: str
    kind: str
    size: int
    seconds: float
    of: str


class _Watched(Player):
    """Plays graphs with the times that their lines had."""

    def __init__(self) -> None:
        super().__init__(0.0, on_host=True)
        self._alone: Mapping[str, float] = {}

    def watched(self, timed: Timed) -> Played:
        """A run of a graph, and what is between it and the next one."""
        self._alone = timed.alone
        played = self.play(timed.name, timed.step, timed.seconds)
        self._host = self._device = self._device + timed.after
        return played

    def _run(self, node: fx.Node, seconds: float, due: dict[fx.Node, Span], played: Played) -> None:
        begin = self._device
        if starts_collective(node):
            self._host = self._device = begin + seconds
            due[node] = Span(node, str(node.args[-1]), begin, begin + self._alone[node.name])
            played.spans += [Span(node, COMPUTE, begin, self._device), due[node]]
        elif is_wait(node):
            flight = due.get(node.all_input_nodes[0])
            self._host = self._device = begin + seconds
            if flight is not None and seconds > AT_ONCE:
                flight.end = self._device
                played.stalls.append(Span(flight.node, COMPUTE, begin, self._device))
            elif flight is not None:
                flight.end = max(flight.begin, min(flight.end, begin))
            if flight is not None:
                _one_after_the_other([span for span in due.values() if span.stream == flight.stream])
        else:
            super()._run(node, seconds, due, played)


def _one_after_the_other(messages: Iterable[Span]) -> None:
    """Messages of a stream, in the order of their starts, begin when the one before has ended."""
    free = float("-inf")
    for span in messages:
        if span.begin < free:
            span.begin, span.end = free, max(span.end, free)
        free = span.end


def timed_facts(results: Sequence[Timed], batches: int, iterations: int) -> Facts:
    """What a rank did, as plain data.

    Args:
        results: of the graphs that ran, in order.
        batches: in which they ran.
        iterations: of which these were the batches.
    """
    player = _Watched()
    for timed in results:  # what this iteration leaves under way ends in the next one, which is the steady one
        player.watched(timed)
    totals: dict[str, float] = defaultdict(float)
    phases: list[Facts] = []
    waits: list[Wait] = []
    for timed in results:
        played = player.watched(timed)
        phases.append(_phase(timed, played, max(1, round(timed.runs / max(1, iterations)))))
        waits += waits_of(played, timed.step)
        found = {
            "computing": timed.computing,
            "exposed": timed.waiting,
            "communicating": sum(timed.alone.values()),
            "between": timed.after,
        }
        for name, seconds in found.items():
            totals[name] += timed.runs * seconds / max(1, batches)
    return {"phases": phases, "waits": [dataclasses.asdict(w) for w in waits], "seconds": dict(totals)}


def waits_of(played: Played, step: ShardedStep) -> list[Wait]:
    """The waits of a run of a graph.

    Args:
        played: the run, predicted or measured.
        step: the graph.
    """
    inputs = zip(step.graph_module.graph.find_nodes(op="placeholder"), step.signature.inputs, strict=True)
    names = {node: entry.name for node, entry in inputs}
    found: list[Wait] = []
    for stall in played.stalls:
        message = message_of(stall.node)
        name = f"{played.name}: {stall.node.name}"
        found.append(Wait(name, message.kind, message.size, stall.seconds, _moved(stall.node, names)))
    return found


def predicted_waits(outlook: Outlook) -> list[Facts]:
    """The waits of a predicted iteration in the steady state."""
    phases = [phase for phase in outlook.phases if phase.times]
    return [dataclasses.asdict(wait) for phase in phases for wait in waits_of(phase.played, phase.step)]


# ---------------------------------------------------------------- pieces
def _phase(timed: Timed, played: Played, times: int) -> Facts:
    """The streams of a graph and what comes behind it, up to the next one."""
    facts = streams_facts(timed.name, times, played)
    facts["seconds"] += timed.after
    free: dict[str, float] = {}
    for span in facts["spans"]:
        if span["stream"] != COMPUTE:  # one after the other; what is still under way is drawn in the next iteration
            earliest = max(0.0, free.get(span["stream"], 0.0))
            span["end"] = min(span["end"], facts["seconds"])
            span["begin"] = min(max(span["begin"], earliest), span["end"])
            free[span["stream"]] = max(earliest, span["end"])
    rest = {"stream": COMPUTE, "waited": 0.0, "name": "host", "module": "", "section": BETWEEN}
    facts["spans"].append({**rest, "begin": facts["seconds"] - timed.after, "end": facts["seconds"]})
    return {**facts, "curve": []}


def _moved(collective: fx.Node, names: Mapping[fx.Node, str]) -> str:
    """Whose values a collective moves: those of modules, or inputs of the graph."""
    places = list(dict.fromkeys(_places(collective.all_input_nodes, names)))
    if not places:
        return "the step"
    more = f" and {len(places) - 2} more" if len(places) > 2 else ""
    return places[0] if len(places) == 1 else f"{places[0]} to {places[-1]}{more}"


def _places(nodes: Iterable[fx.Node], names: Mapping[fx.Node, str]) -> Iterator[str]:
    for node in nodes:
        info = info_of(node)
        if node in names:
            yield names[node]
        elif info.section is Section.COMMUNICATION:  # packing
            yield from _places(node.all_input_nodes, names)
        elif info.module or info.source:
            line = Path(info.source).name
            yield (info.module or "the step") + (f" at {line}" if line else "")
