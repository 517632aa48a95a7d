"""A graph that begins while the ranks still compare what each of them would run.

A run can be abandoned until its first effect: a collective, or a write into something that outlives the run. With a
split batch that is after the forward pass and most of the backward pass. The graph asks there whether all ranks agree,
so the answer had all this time to arrive.

What the iteration before left undone is no effect of this one: each rank does it, whatever comes next. So the graph
asks behind it, and holds back collectives that would start earlier and that nothing waits for. Where that cannot be, it
asks before any of it is done.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from lightning_spmd import _private_api as private
from lightning_spmd.ir.aliasing import storage_roots, written_arguments
from lightning_spmd.ir.node_info import TAIL, NodeInfo, Section
from lightning_spmd.ir.steps import ShardedStep
from lightning_spmd.ir.verify import starts_collective


class Outvoted(Exception):
    """The ranks do something else than this rank began, of which nothing has been done."""


Question = Callable[[bool], None]
"""Raises if a graph must not continue. It is told whether what the iteration before left undone is done."""


def asking(step: ShardedStep, ask: Question) -> ShardedStep:
    """A copy of a graph that calls ``ask`` before its first effect, or at its end.

    Args:
        step: the graph.
        ask: raises if the graph must not continue.
    """
    graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
    result = graph.graph_copy(step.graph_module.graph, made)
    end = graph.output(result)
    pause = _behind_tails(step.graph_module.graph) or _Pause(_first_effect(step.graph_module.graph), [], done=False)
    before = end if pause.before is None else made[pause.before]
    with graph.inserting_before(before):
        question = graph.call_function(ask, (pause.done,))
    question.meta.update(val=None, info=NodeInfo(Section.COMMUNICATION))
    for start in pause.held:
        before.prepend(made[start])
    return ShardedStep(private.GraphModule(step.graph_module, graph), step.signature, step.axes, step.fallbacks)


@dataclass(frozen=True)
class _Pause:
    """Where a graph asks.

    Args:
        before: the node in front of which it does; None: at the end.
        held: collectives that start behind the question instead of before it, in order.
        done: whether what the iteration before left undone is done there.
    """

    before: fx.Node | None
    held: list[fx.Node]
    done: bool


def _behind_tails(graph: fx.Graph) -> _Pause | None:
    """The first effect of the iteration itself, if nothing that the one before it left undone comes later."""
    roots = storage_roots(graph)
    left = sum(TAIL in node.meta for node in graph.nodes)
    held: dict[fx.Node, None] = {}
    operands: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "output":
            break
        ends = not held.keys().isdisjoint(node.all_input_nodes) or any(
            roots[written] in operands for written in written_arguments(node)
        )
        if TAIL in node.meta:
            left -= 1
        elif left and not ends and starts_collective(node):
            held[node] = None
            operands |= {roots[operand] for operand in node.all_input_nodes}
        else:
            ends = ends or _is_effect(node, roots)
        if ends:
            return None if left else _Pause(node, list(held), done=True)
    return _Pause(None, list(held), done=True)


def _first_effect(graph: fx.Graph) -> fx.Node | None:
    """The first effect of the graph or of what it does of the iteration before."""
    roots = storage_roots(graph)
    return next((node for node in graph.nodes if _is_effect(node, roots)), None)


def _is_effect(node: fx.Node, roots: Mapping[fx.Node, fx.Node]) -> bool:
    """Whether more than its result tells of a node; of random draws nothing does, a run's end takes them back."""
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    target: Any = node.target
    if not isinstance(target, private.OpOverload):
        return not all(isinstance(n.meta.get("val"), (bool, int, float)) for n in (node, *node.all_input_nodes))
    if target.namespace not in ("aten", "prims") or "assert" in str(target):
        return True
    return any(roots[written].op in ("placeholder", "get_attr") for written in written_arguments(node))
