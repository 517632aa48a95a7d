"""Bounds what is in flight: some collectives are waited for earlier than their results are needed, to free memory.

A reduce-scatter holds its operand, whole gradients, until it is waited, and gives a rank's share of it. Waited at the
end of the backward pass all of them would be in memory at once, which is what sharding is there to avoid. Three buckets
may be: two reduce-scatters under way and one that is filled; under ZeRO 3, whose backward pass has a gathered bucket in
use and one on its way, a single one. So each is waited before the next but one, or the next one, is packed.

The gathers at the end of ZeRO 2 make whole parameters: what copies one into its place runs before the next but one.

An all-reduce works in place and holds nothing that must not be kept anyway: it is waited at the end. The network serves
one collective after the other, so waiting for one before the next but one starts costs time only where the network is
behind anyway.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from torch import fx

from lightning_spmd.ir.dependence import Dependences, Tail
from lightning_spmd.ir.first import first
from lightning_spmd.ir.node_info import Section, info_of
from lightning_spmd.ir.verify import is_wait, starts_collective

UNDER_WAY = 2
"""Buckets that nothing computes with."""


def bounded(order: Sequence[fx.Node], kept: Sequence[Tail], dependences: Dependences) -> list[fx.Node]:
    """The order with early waits in it.

    Args:
        order: of computation and collectives.
        kept: tails that run behind it, in order of arrival.
        dependences: of the graph.
    """
    due: defaultdict[fx.Node, list[fx.Node]] = defaultdict(list)
    scatters = [node for node in order if _starts(node, "reduce_scatter")]
    limit = UNDER_WAY - 1 if any(_is_gathered_for_backward(node) for node in order) else UNDER_WAY
    for start, later in zip(scatters, scatters[limit:], strict=False):
        for place in (_packing(later, order), later):
            due[place] += [user for user in start.users if is_wait(user)]
    gathers = [tail for tail in kept if len(tail.starts) == 1 and _starts(tail.starts[0], "all_gather")]
    for tail, later in zip(gathers, gathers[UNDER_WAY:], strict=False):
        due[later.starts[0]] += tail.nodes
    result: dict[fx.Node, None] = {}
    for node in order:
        for early in due.get(node, ()):
            if dependences.before[early] <= result.keys():
                result.setdefault(early)
        result.setdefault(node)
    return list(result)


def _starts(node: fx.Node, name: str) -> bool:
    return starts_collective(node) and name in str(node.target)


def _is_gathered_for_backward(node: fx.Node) -> bool:
    """Whether a gather's result is used in the backward pass first."""
    if not _starts(node, "all_gather"):
        return False
    todo = list(node.users)
    while todo:
        reader = todo.pop()
        section = info_of(reader).section
        if section is not Section.COMMUNICATION:
            return section is Section.BACKWARD
        todo += reader.users
    return False


def _packing(start: fx.Node, order: Sequence[fx.Node]) -> fx.Node:
    """The first of the nodes that pack what a collective sends."""
    todo, packing = [start], {start}
    while todo:
        for operand in todo.pop().all_input_nodes:
            packs = operand.op == "call_function" and info_of(operand).section is Section.COMMUNICATION
            if packs and operand not in packing and not is_wait(operand):
                packing.add(operand)
                todo.append(operand)
    return first((node for node in order if node in packing), "packing")
