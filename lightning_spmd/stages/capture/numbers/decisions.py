"""Turns the branches that Python took on recorded numbers into one small program that tells whether they still hold.

    rho_t = rho_inf - 2 * step * beta2 ** step / (1 - beta2 ** step)
    if rho_t > 5: ...                                        (RAdam)

becomes a program over ``step`` and ``beta2`` that yields ``rho_t > 5``. It works on clones, so the step counters that
the optimizer advances inside the graph are not advanced by asking.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from lightning_spmd import _private_api as private
from lightning_spmd.ir.aliasing import storage_roots, written_arguments
from lightning_spmd.ir.guards import PredicateGuard
from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.ir.reads import hands_over
from lightning_spmd.ir.source import function_of
from lightning_spmd.stages.capture.numbers.host_scalar import Number

Decision = tuple[fx.Node, Number, str]


@dataclass
class DecisionProgram:
    """The program, the placeholders of the captured graph that it reads, and the outcomes seen at capture."""

    module: fx.GraphModule
    inputs: tuple[fx.Node, ...]
    names: tuple[str, ...]
    expected: tuple[Number, ...]

    def guard(self, placeholders: Sequence[fx.Node]) -> PredicateGuard:
        """The guard, with inputs as positions among ``placeholders``."""
        positions = tuple(placeholders.index(n) for n in self.inputs)
        compiled = functools.cache(functools.partial(function_of, self.module))  # many captured steps never ask
        return PredicateGuard(self.names, positions, lambda *now: compiled()(*now), self.expected)


def decision_program(graph: fx.Graph, decisions: Sequence[Decision]) -> DecisionProgram | None:
    """The program that recomputes ``decisions``, or None if there are none. ``graph`` is left as it is."""
    if not decisions:
        return None
    needed = needed_for(graph, [node for node, _, _ in decisions])
    out, copies, seen = fx.Graph(), {}, {}
    inputs = [n for n in graph.nodes if n.op == "placeholder" and n in needed]
    for node in inputs:
        copies[node] = out.placeholder(node.name)
    for node in inputs:
        if isinstance(node.meta["val"], TensorSpec):
            copies[node] = out.call_function(torch.ops.aten.clone.default, (copies[node],))
    for node in graph.nodes:
        if node not in needed or node.op == "placeholder":
            continue
        given = ((), {}) if hands_over(node) else (node.args, node.kwargs)  # Python is done when this is asked
        args, kwargs = fx.map_arg(given, lambda n: copies[n])  # type: ignore[no-untyped-call]
        key = (node.target, repr(args)) if not isinstance(node.target, private.OpOverload) else node
        if key not in seen:  # `if weight_decay != 0` once a parameter is one question
            seen[key] = out.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
        copies[node] = seen[key]
    answers: dict[fx.Node, tuple[str, Number]] = {}
    for node, value, where in decisions:
        answers.setdefault(copies[node], (where, value))
    out.output(tuple(answers))
    names, expected = zip(*answers.values(), strict=True)
    return DecisionProgram(private.GraphModule(nn.Module(), out), tuple(inputs), names, expected)


def needed_for(graph: fx.Graph, targets: Sequence[fx.Node]) -> set[fx.Node]:
    """Everything that the targets are computed from, including earlier writes into what they read."""
    roots = storage_roots(graph)
    order = {node: i for i, node in enumerate(graph.nodes)}
    writers: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        for target in written_arguments(node):
            writers.setdefault(roots[target], []).append(node)
    needed: set[fx.Node] = set()
    todo: list[Any] = list(targets)
    while todo:
        node = todo.pop()
        if node in needed:
            continue
        needed.add(node)
        if hands_over(node):
            continue
        todo.extend(node.all_input_nodes)
        if node.op == "call_function" and node.target is not operator.getitem:
            for source in node.all_input_nodes:
                if isinstance(source.meta.get("val"), TensorSpec):
                    todo.extend(w for w in writers.get(roots[source], []) if order[w] < order[node])
    return needed
