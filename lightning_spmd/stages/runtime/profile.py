"""Measures a graph node by node: how long each operator and each collective takes.

Collectives are waited for at once, so their time is their own. These are real iterations; only their speed differs.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from lightning_spmd.ir.verify import is_wait, starts_collective

RUNS = 2
"""Iterations that are measured."""


class Profile(fx.Interpreter):
    """Runs a graph and keeps the shortest time of every node over its runs.

    Args:
        graph_module: the graph.
    """

    def __init__(self, graph_module: fx.GraphModule) -> None:
        super().__init__(graph_module)
        self.seconds: dict[str, float] = {}
        self.runs = 0
        self._synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """One iteration."""
        self.runs += 1
        return super().run(*args, **kwargs)

    def run_node(self, n: fx.Node) -> Any:
        """One node, timed."""
        if n.op != "call_function":
            return super().run_node(n)
        self._synchronize()
        started = time.perf_counter()
        value = super().run_node(n)
        if starts_collective(n):
            value = torch.ops._c10d_functional.wait_tensor.default(value)  # noqa: SLF001 - an operator's public name
        self._synchronize()
        seconds = time.perf_counter() - started
        self.seconds[n.name] = min(seconds, self.seconds.get(n.name, seconds))
        return value


def agree(graph: fx.Graph, everyone: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """One set of times for all ranks, from every rank's.

    The slowest rank's computation counts; of a collective the shortest time, which is that of the rank that came last
    and waited for nobody.
    """
    found: dict[str, float] = {}
    for node in graph.nodes:
        seconds = [times[node.name] for times in everyone if node.name in times]
        if seconds and not is_wait(node):
            found[node.name] = min(seconds) if starts_collective(node) else max(seconds)
    return found
