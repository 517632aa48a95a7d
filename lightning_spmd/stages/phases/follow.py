"""The steady state: an iteration with the deferred tails of the one before it inside.

Before::

    cleanup(p1, [r1]):    update(p1, wait(r1))
    setup(p1, batch):     x = embed(batch); y = x @ p1; ...

After (``main``)::

    x = embed(batch); update(p1, wait(r1)); y = x @ p1; ...

Each tail goes in front of its first reader, and of the first value that Python reads: Python may abandon the run there,
and then nothing is pending any more and nothing of this iteration is done. The iteration may be another graph than the
one that the tails come from (the next micro-batch of an accumulation, another shape of a batch).
:func:`verify_nothing_stale` proves the result on its own: no reader of a value precedes the pending write of it.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict

from torch import fx

from lightning_spmd import _private_api as private
from lightning_spmd.errors import VerificationError
from lightning_spmd.ir.aliasing import storage_regions, written_arguments
from lightning_spmd.ir.node_info import TAIL
from lightning_spmd.ir.signature import GraphInput, InputRole, Signature
from lightning_spmd.ir.steps import ShardedStep
from lightning_spmd.ir.verify import forget_writes, verify_sharded
from lightning_spmd.stages.phases.touch import State, Touch, Touches, first_conflict


def follow(cleanup: ShardedStep, setup: ShardedStep) -> ShardedStep:
    """``setup`` with the work of ``cleanup`` in it.

    Args:
        cleanup: what the iteration before left undone.
        setup: the iteration.

    Returns:
        a step whose inputs are those of ``setup``, then those of ``cleanup`` that are not among them.

    Raises:
        VerificationError: the result would read something stale.
    """
    graph = fx.Graph()
    inputs = list(setup.signature.inputs)
    by_state: dict[State, fx.Node] = {}
    made: dict[fx.Node, fx.Node] = {}
    for node, entry in _placeholders(setup):
        made[node] = by_state[entry.role, entry.key] = graph.node_copy(node)
    for node, entry in _placeholders(cleanup):
        state = (entry.role, entry.key)
        if state not in by_state:
            by_state[state] = graph.node_copy(node)
            inputs.append(entry)
        made[node] = by_state[state]
    body = [n for n in setup.graph_module.graph.nodes if n.op not in ("placeholder", "output")]
    places = _places(cleanup, setup, body)
    for node in [*body, None]:
        for late in places.get(node, ()):
            _copy(graph, late, made)
        if node is not None:
            _copy(graph, node, made)
    output = setup.graph_module.graph.output_node()
    graph.output(fx.map_arg(output.args[0], made.__getitem__))
    module = private.GraphModule(setup.graph_module, graph)
    signature = Signature(tuple(inputs), setup.signature.outputs)
    main = dataclasses.replace(setup, graph_module=module, signature=signature)
    verify_sharded(main, stamp=True)
    verify_nothing_stale(main)
    module.recompile()
    return main


def _placeholders(step: ShardedStep) -> list[tuple[fx.Node, GraphInput]]:
    nodes = [n for n in step.graph_module.graph.nodes if n.op == "placeholder"]
    return list(zip(nodes, step.signature.inputs, strict=True))


def _copy(graph: fx.Graph, node: fx.Node, made: dict[fx.Node, fx.Node]) -> None:
    made[node] = graph.node_copy(node, made.__getitem__)
    forget_writes(made[node])  # they were counted in another graph


def _places(cleanup: ShardedStep, setup: ShardedStep, body: list[fx.Node]) -> dict[fx.Node | None, list[fx.Node]]:
    """Nodes of ``cleanup`` by the node of ``setup`` that they go in front of; None is the end."""
    late = Touches(cleanup)
    early = Touches(setup)
    tails: dict[int, list[fx.Node]] = defaultdict(list)
    for node in cleanup.graph_module.graph.nodes:
        if node.op == "call_function":
            tails[node.meta[TAIL]].append(node)
    places: dict[fx.Node | None, list[fx.Node]] = defaultdict(list)
    for nodes in tails.values():
        touch: Touch = late.of_all(nodes)
        places[first_conflict(touch, early, body)].extend(nodes)
    return places


def verify_nothing_stale(main: ShardedStep) -> None:
    """Check that no node of an iteration reads state whose pending write is still to come.

    Raises:
        VerificationError: naming the reader, the state and the write.
    """
    graph = main.graph_module.graph
    regions = storage_regions(graph)
    state = {node: entry for node, entry in _placeholders(main) if entry.role is not InputRole.PENDING}
    pending_writes: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    pending_reads: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    position = {node: i for i, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        if TAIL in node.meta:
            for operand in node.all_input_nodes:
                pending_reads[regions[operand][0]].append(node)
            for operand in written_arguments(node):
                pending_writes[regions[operand][0]].append(node)
    for node in graph.nodes:
        if TAIL in node.meta or node.op != "call_function":
            continue
        written = {regions[n][0] for n in written_arguments(node)}
        if not written and regions[node][0] is not node:
            continue  # a view reads nothing
        for root in {regions[n][0] for n in node.all_input_nodes} & state.keys():
            others = pending_writes[root] + (pending_reads[root] if root in written else [])
            late = next((n for n in others if position[n] > position[node]), None)
            if late is not None:
                raise VerificationError(
                    f"{node.name} ({node.target}) uses {state[root].name} before {late.name}, which the iteration "
                    "before it left pending, is done with it"
                )
