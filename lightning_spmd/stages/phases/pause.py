"""An iteration that pauses before its update, for hooks that may look at gradients.

Before, the graph that would do without hooks, with ``p.grad`` among its outputs::

    ...; r1 = all_reduce(b1); w1 = wait(r1); g1 = w1[0:8]; update(p1, g1, lr); return loss, g1

After (:func:`hide_gradients`), and the recipe for those who look::

    ...; r1 = all_reduce(b1); w1 = wait(r1); g1 = w1[0:8]; update(p1, g1, lr); return loss, None
    recipe(r1):  w1 = wait(r1); return w1[0:8]

What runs (:func:`pausing`)::

    ...; r1 = all_reduce(b1); pause(loss, r1); w1 = wait(r1); ...; update(p1, ...)

Gradients cost nothing until something looks: nothing waits for them in the pause, and what may run in the next
iteration still may. The recipe starts no collective, so one rank may look alone. It is not there
(:class:`CannotShowError`) where gradients would have to be gathered for the look, or where the update writes into them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import fx

from lightning_spmd import _private_api as private
from lightning_spmd.errors import CannotShowError
from lightning_spmd.ir.aliasing import aliased_argument, storage_roots, written_arguments
from lightning_spmd.ir.dependence import Dependences, reorder
from lightning_spmd.ir.effects import draws_random, is_pure
from lightning_spmd.ir.node_info import NodeInfo, Section, info_of
from lightning_spmd.ir.signature import GraphOutput, InputRole, OutputRole
from lightning_spmd.ir.source import pause
from lightning_spmd.ir.steps import CapturedStep, PausingStep, ShardedStep, ShownGradients
from lightning_spmd.ir.verify import forget_writes, is_wait, starts_collective, verify_sharded
from lightning_spmd.stages.phases.split import TAIL
from lightning_spmd.stages.phases.touch import LIVE, Touches

LEAF = "shown"
"""``node.meta`` key: the position among the recipe's operands."""
_UPDATE = (Section.CLIP, Section.OPTIMIZER)
_NUMBERS = (InputRole.HYPER_PARAMETER, InputRole.HOST_VALUE)
_OF_THE_UPDATE = (OutputRole.OPTIMIZER_STATE, OutputRole.HYPER_PARAMETER, OutputRole.PENDING)
"""Outputs that are not there in the pause."""


def check_unwritten(captured: CapturedStep) -> None:
    """Check that the update leaves gradients as they are.

    Raises:
        CannotShowError: naming what writes.
    """
    graph = captured.graph_module.graph
    roots = storage_roots(graph)
    values: Any = graph.output_node().args[0]
    pairs = zip(values, captured.signature.outputs, strict=True)
    shown = {roots[value] for value, entry in pairs if entry.role is OutputRole.SHOWN_GRADIENT}
    for node in graph.nodes:
        updates = node.op == "call_function" and info_of(node).section in _UPDATE
        if updates and any(roots[written] in shown for written in written_arguments(node)):
            raise CannotShowError(f"{node.target} of the update writes into gradients")


def hide_gradients(step: ShardedStep) -> ShownGradients:
    """Take shown gradients out of the outputs of a step, which is changed, and give the recipe for them.

    Raises:
        CannotShowError: there is none.
    """
    graph = step.graph_module.graph
    output = graph.output_node()
    values: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    shown: list[tuple[fx.Node, GraphOutput]] = []
    for position, entry in enumerate(step.signature.outputs):
        if entry.role is OutputRole.SHOWN_GRADIENT:
            shown.append((values[position], entry))
            values[position] = None
    are_updated = _are_updated(graph, [node for node, _ in shown])
    made = _made_late(Dependences(graph), [node for node, _ in shown])
    recipe = _Recipe(step, made, [node for node, _ in shown])
    output.args = (tuple(values),)
    _erase_unused(graph, keep=recipe.leaves)
    for start in filter(starts_collective, graph.nodes):
        if not any(is_wait(user) for user in start.users):
            raise CannotShowError(f"{start.target} would run only to make gradients that hooks may look at")
    step.graph_module.recompile()
    entries = tuple(entry for _, entry in shown)
    return ShownGradients(entries, recipe.graph_module, len(recipe.leaves), are_updated)


def _are_updated(graph: fx.Graph, shown: Sequence[fx.Node]) -> bool:
    """Whether the update reads nothing of the rest of the iteration but the shown gradients and views of them.

    It may have reduced gradients for itself, behind arithmetic of its own (``maximize``, a first momentum buffer).
    """
    known = set(shown)
    for node in graph.nodes:
        if node.op == "call_function" and aliased_argument(node) in known:
            known.add(node)
        if node.op == "call_function" and info_of(node).section in _UPDATE:
            operands = [operand for operand in node.all_input_nodes if operand.op == "call_function"]
            if not all(operand in known for operand in operands):
                return False
            known.add(node)
    return True


def _made_late(dependences: Dependences, shown: Sequence[fx.Node]) -> list[fx.Node]:
    """The nodes between the last collectives and the gradients, in order."""
    origins = dependences.origins(shown)
    starts = [n for n in origins if starts_collective(n)]
    ends: set[fx.Node] = set()
    for start in starts:
        reached = dependences.closure(user for user in start.users if is_wait(user)) & origins
        if not any(starts_collective(n) for n in reached):
            ends |= reached
    for node in ends:
        if not is_wait(node) and (written_arguments(node) or draws_random(node)):
            raise CannotShowError(f"{node.target} stands between the last collective and a gradient")
    return sorted(ends, key=dependences.position.__getitem__)


class _Recipe:
    """The graph that computes gradients from values that exist in the pause; it marks its operands."""

    def __init__(self, step: ShardedStep, made: Sequence[fx.Node], shown: Sequence[fx.Node]) -> None:
        inside = set(made)
        operands = [operand for node in made for operand in node.all_input_nodes] + list(shown)
        self.leaves = list(dict.fromkeys(n for n in operands if n not in inside))
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for position, leaf in enumerate(self.leaves):
            leaf.meta[LEAF] = position
            copies[leaf] = graph.placeholder(f"operand_{position}")
            copies[leaf].meta["val"] = leaf.meta.get("val")
        for node in made:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            forget_writes(copies[node])
        graph.output(tuple(copies[node] for node in shown))
        self.graph_module = private.GraphModule(step.graph_module, graph)


def _erase_unused(graph: fx.Graph, keep: Sequence[fx.Node]) -> None:
    """Erase nodes that only the hidden outputs needed."""
    kept = set(keep)
    for node in reversed(graph.nodes):
        if node.op == "call_function" and not node.users and node not in kept and (is_pure(node) or is_wait(node)):
            graph.erase_node(node)


def pausing(step: ShardedStep) -> PausingStep:
    """A copy of a step that pauses before its update.

    Raises:
        CannotShowError: the update is needed for what must be there in the pause.
        VerificationError: the order of the copy is wrong.
    """
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    result = graph.graph_copy(step.graph_module.graph, copies)
    graph.output(result)
    copy = dataclasses.replace(step, graph_module=private.GraphModule(step.graph_module, graph))
    graph = copy.graph_module.graph
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    body = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
    output = graph.output_node()
    values: Any = output.args[0]
    early = [i for i, e in enumerate(copy.signature.outputs) if e.role not in _OF_THE_UPDATE and values[i] is not None]
    leaves = (n for n in [*inputs, *body] if LEAF in n.meta and TAIL not in n.meta)
    operands = sorted(leaves, key=lambda n: n.meta[LEAF])
    handed = [*(values[i] for i in early), *operands]
    late = _late(copy, [n for n in handed if isinstance(n, fx.Node)])
    first, second = ([n for n in body if (n in late) is wanted] for wanted in (False, True))
    reorder(graph, [*inputs, *first, *second, output])
    for node in graph.nodes:
        forget_writes(node)
    verify_sharded(copy)
    with graph.inserting_before(second[0] if second else output):
        node = graph.call_function(pause, tuple(handed))
    node.meta.update(val=None, info=NodeInfo(Section.COMMUNICATION))
    copy.graph_module.recompile()
    return PausingStep(copy, tuple(early))


def _late(step: ShardedStep, handed: Sequence[fx.Node]) -> set[fx.Node]:
    """The nodes after the pause: the update, and waits at the iteration's end that only the update needs.

    They are in turns, each bucket's update after its wait, while others are under way.
    """
    dependences, touches = Dependences(step.graph_module.graph), Touches(step)
    late = dependences.closure(_updates(step, touches, dependences))
    missing = [n.name for n in handed if n in late]
    if missing:
        raise CannotShowError(f"{missing[0]} is there only after the update, and hooks before it may need it")
    starts = [dependences.position[n] for n in dependences.order if starts_collective(n) and n not in late]
    end = max(starts, default=0)
    for node in dependences.order[end:]:
        if is_wait(node) and TAIL not in node.meta:
            needs = dependences.closure([node])
            buffers = any(role is InputRole.BUFFER for n in needs for role, _ in touches.of(n).writes)
            if not (buffers or needs & set(handed) or any(TAIL in n.meta for n in needs)):
                late |= needs
    return late


def _made_of(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """The nodes and all from which they are computed."""
    found, left = set[fx.Node](), list(nodes)
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left += node.all_input_nodes
    return found


def _updates(step: ShardedStep, touches: Touches, dependences: Dependences) -> list[fx.Node]:
    """The first nodes of this iteration's update; those of the update before are marked.

    A hook may write into gradients: whatever the optimizer makes of them comes after it (a copy, to begin momentum).
    What gradients are made of is there before.
    """
    graph = step.graph_module.graph
    leaves = [n for n in graph.nodes if LEAF in n.meta and TAIL not in n.meta]
    of_gradients = dependences.closure(leaves) - _made_of(leaves)
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    roles = {n: e.role for n, e in zip(placeholders, step.signature.inputs, strict=True)}
    found: list[fx.Node] = []
    for node in graph.nodes:
        if node.op != "call_function" or TAIL in node.meta:
            continue
        touch, updates = touches.of(node), info_of(node).section in _UPDATE
        reads = {role for role, _ in touch.reads | touch.writes}
        writes = {role for role, _ in touch.writes}
        numbers = any(roles.get(operand) in _NUMBERS for operand in node.all_input_nodes)
        live = updates and (reads & set(LIVE) or numbers or node in of_gradients)
        if writes & {InputRole.PARAMETER, InputRole.OPTIMIZER_STATE} or live:
            found.append(node)
    if any(draws_random(node) for node in found):
        raise CannotShowError("the update draws random numbers")
    return found
