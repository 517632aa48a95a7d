"""Gather sharded parameters again for the backward pass instead of keeping them since the forward pass.

Before::

    w = wait(all_gather(p)); wt = t(w); y = mm(x, wt)  ...  dx = mm(dy, t(wt))

After::

    w = wait(all_gather(p)); wt = t(w); y = mm(x, wt)  ...  w2 = wait(all_gather(p)); wt2 = t(w2); dx = mm(dy, t(wt2))

So a whole parameter lives while one layer works, as FSDP's ``reshard_after_forward`` has it, for one more gather. What
is computed from the parameter alone (transposes, casts) is computed again too. Bitwise.

Does nothing for a parameter that one pass alone reads, or whose last reader in the forward pass and first in the
backward pass have no reader of another gathered parameter in between (the last layer): freeing it would free nothing.
Does nothing to parameters that are not sharded, nor to one that is updated before the backward pass reads it.

FSDP: arXiv:2304.11277; ZeRO stage 3: arXiv:1910.02054.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import fx

from lightning_spmd.ir.aliasing import written_arguments
from lightning_spmd.ir.effects import is_pure
from lightning_spmd.ir.node_info import Section, info_of
from lightning_spmd.ir.signature import InputRole
from lightning_spmd.ir.steps import ShardedStep
from lightning_spmd.stages.passes.contract import GraphPass, PassState
from lightning_spmd.stages.passes.flat_buffers import Memory

_GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default  # noqa: SLF001 - functional collectives


def regather_parameters(step: ShardedStep, state: PassState) -> None:
    """Gather again; see the module docstring for when."""
    graph = step.graph_module.graph
    position = {node: i for i, node in enumerate(graph.nodes)}
    parameters = {
        node
        for node, entry in zip(graph.find_nodes(op="placeholder"), step.signature.inputs, strict=True)
        if entry.role is InputRole.PARAMETER
    }
    chains = [_chain(graph, node, position) for node in graph.nodes if _gathers(node, parameters)]
    spans = [_span(chain, position) for chain in chains]
    memory = Memory(graph)
    done = 0
    for chain, span in zip(chains, spans, strict=True):
        if span is None or memory.next_write(_parameter(chain), position[chain[0]]) < span[1]:
            continue
        if not any(other is not chain and _works_between(other, span, position) for other in chains):
            continue
        _again(graph, chain, position)
        done += 1
    if done:
        state.notes["regather_parameters"] = f"{done} of {len(chains)} parameters are gathered again"


def _gathers(node: fx.Node, parameters: set[fx.Node]) -> bool:
    if node.target is not _GATHER:
        return False
    return any(value in parameters for made in (node, *_operands(node)) for value in made.all_input_nodes)


def _operands(gather: fx.Node) -> list[fx.Node]:
    """What pads or copies the gathered input for this gather alone."""
    found, value = list[fx.Node](), gather.all_input_nodes[0]
    while value.op != "placeholder" and len(value.all_input_nodes) == 1 and is_pure(value):
        found.append(value)
        value = value.all_input_nodes[0]
    return found if value.op == "placeholder" else []


def _chain(graph: fx.Graph, gather: fx.Node, position: dict[fx.Node, int]) -> list[fx.Node]:
    """The gather, what pads its operand, and all that is computed from the gathered parameter alone, in order."""
    found = {gather, *_operands(gather)}
    todo = [gather]
    while todo:
        for user in todo.pop().users:
            if user.op == "output" or user in found or any(n not in found for n in user.all_input_nodes):
                continue
            waits = "wait_tensor" in str(user.target)
            if (waits or is_pure(user)) and info_of(user).section in (Section.FORWARD, Section.COMMUNICATION):
                found.add(user)
                todo.append(user)
    return sorted(found, key=position.__getitem__)


def _parameter(chain: Sequence[fx.Node]) -> fx.Node:
    return chain[0].all_input_nodes[0]


def _readers(chain: Sequence[fx.Node], *sections: Section) -> list[fx.Node]:
    inside = set(chain)
    return [u for n in chain for u in n.users if u not in inside and info_of(u).section in sections]


def _span(chain: Sequence[fx.Node], position: dict[fx.Node, int]) -> tuple[int, int] | None:
    """(position of the last reader in the forward pass, of the first in the backward pass)."""
    forward, backward = _readers(chain, Section.FORWARD), _readers(chain, Section.BACKWARD)
    writers = [u for u in (*forward, *backward) if any(n in chain for n in written_arguments(u))]
    if not forward or not backward or writers:
        return None
    return max(map(position.__getitem__, forward)), min(map(position.__getitem__, backward))


def _works_between(chain: Sequence[fx.Node], span: tuple[int, int], position: dict[fx.Node, int]) -> bool:
    first, last = span
    return any(first < position[u] < last for u in _readers(chain, Section.FORWARD, Section.BACKWARD))


def _again(graph: fx.Graph, chain: Sequence[fx.Node], position: dict[fx.Node, int]) -> None:
    """Copy what the backward pass reads in front of its first reader there."""
    readers = _readers(chain, Section.BACKWARD)
    inside, needed = set(chain), set[fx.Node]()
    todo = [n for reader in readers for n in reader.all_input_nodes if n in inside]
    while todo:
        node = todo.pop()
        if node not in needed:
            needed.add(node)
            todo += [n for n in node.all_input_nodes if n in inside]
    copies: dict[fx.Node, fx.Node] = {}
    with graph.inserting_before(min(readers, key=position.__getitem__)):
        for node in chain:
            if node in needed:
                copies[node] = copy = graph.node_copy(node, lambda n: copies.get(n, n))
                if info_of(node).section is Section.FORWARD:  # else buckets would join the two gathers
                    copy.meta["info"] = replace(info_of(node), section=Section.BACKWARD)
    for reader in readers:
        for node, copy in copies.items():
            reader.replace_input_with(node, copy)


PASS = GraphPass("regather_parameters", regather_parameters, after=frozenset({"common_subexpressions", "dead_code"}))
"""Before ``bucket_collectives``; a later common-subexpression pass would undo it."""
