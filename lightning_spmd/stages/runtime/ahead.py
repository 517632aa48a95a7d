"""A graph that begins while the ranks still compare what each of them would run.

A run can be abandoned until its first effect: a collective, or a write into something that outlives the run. With a
split batch that is after the forward pass and most of the backward pass. The graph asks there whether all ranks agree,
so the answer had all this time to arrive.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch import fx

from lightning_spmd import _private_api as private
from lightning_spmd.ir.aliasing import storage_roots, written_arguments
from lightning_spmd.ir.node_info import NodeInfo, Section
from lightning_spmd.ir.steps import ShardedStep


class Outvoted(Exception):
    """The ranks do something else than this rank began; nothing has been changed."""


def asking(step: ShardedStep, ask: Callable[[], None]) -> ShardedStep:
    """A copy of a graph that calls ``ask`` before its first effect, or at its end.

    Args:
        step: the graph.
        ask: raises if the graph must not continue.
    """
    graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
    result = graph.graph_copy(step.graph_module.graph, made)
    end = graph.output(result)
    effect = _first_effect(step.graph_module.graph)
    with graph.inserting_before(end if effect is None else made[effect]):
        question = graph.call_function(ask)
    question.meta.update(val=None, info=NodeInfo(Section.COMMUNICATION))
    return ShardedStep(private.GraphModule(step.graph_module, graph), step.signature, step.axes, step.fallbacks)


def _first_effect(graph: fx.Graph) -> fx.Node | None:
    """The first node that more than its result tells of; random draws are none, a run's end takes them back."""
    roots = storage_roots(graph)
    for node in graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        target: Any = node.target
        numbers = (node, *node.all_input_nodes)
        if not isinstance(target, private.OpOverload):
            if all(isinstance(n.meta.get("val"), (bool, int, float)) for n in numbers):
                continue
            return node
        if target.namespace not in ("aten", "prims") or "assert" in str(target):
            return node
        if any(roots[written].op in ("placeholder", "get_attr") for written in written_arguments(node)):
            return node
    return None
