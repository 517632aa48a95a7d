"""Sums of partial sums and whole values: the partial sums are added first and reduced once.

Before (the gradient of what a post-norm block's query, key and value read; each ``+`` reduces)::

    ((residual + query) + key) + value

After::

    residual + ((query + key) + value)

Only on axes whose plan places activations (``activations``): elsewhere a whole value is kept on one rank and added
there. The order of floating-point sums changes, as splitting the products changed it already. Nothing happens where
fewer than two partial sums are in a sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import fx

from lightning_spmd.ir.aliasing import storage_roots, written_arguments
from lightning_spmd.ir.node_info import info_of
from lightning_spmd.ir.placement import Partial, Placement, ShardAxis
from lightning_spmd.ir.signature import Signature
from lightning_spmd.parallel.parallel_plan import ParallelPlan, activations_between
from lightning_spmd.stages.expand.propagation.propagate import Propagation

_add = torch.ops.aten.add.Tensor


def partial_sums_first(
    graph: fx.Graph, signature: Signature, axes: Sequence[ShardAxis], plan: ParallelPlan
) -> fx.Graph:
    """The graph, or a copy of it with sums written in another order."""
    for axis in axes:
        if activations_between(plan, axis) is None or not any(len(leaves) > 2 for _, leaves in _sums(graph)):
            continue
        outputs = Propagation(graph, signature, axis, plan, {}).run().outputs
        if any(_is_worth_it(leaves, outputs) for _, leaves in _sums(graph)):
            graph = _rewritten(graph, outputs)
    return graph


def _sums(graph: fx.Graph) -> Iterator[tuple[fx.Node, list[fx.Node]]]:
    """(last addition, everything that is added up) of every sum of tensors of one shape."""
    roots = storage_roots(graph)
    written = {roots[operand] for node in graph.nodes for operand in written_arguments(node)}

    def is_inner(node: fx.Node, section: object) -> bool:
        return _is_addition(node) and len(node.users) == 1 and info_of(node).section == section

    def leaves(node: fx.Node) -> list[fx.Node]:
        found: list[fx.Node] = []
        for operand in node.all_input_nodes:
            found += leaves(operand) if is_inner(operand, info_of(node).section) else [operand]
        return found

    for node in graph.nodes:
        (user,) = node.users if len(node.users) == 1 else (None,)
        if not _is_addition(node) or (
            user is not None and _is_addition(user) and is_inner(node, info_of(user).section)
        ):
            continue
        found = leaves(node)
        if written.isdisjoint(roots[leaf] for leaf in found):
            yield node, found


def _is_addition(node: fx.Node) -> bool:
    operands = node.all_input_nodes
    return (
        node.target is _add
        and not node.kwargs
        and len(operands) == 2
        and all(operand.meta["val"] == node.meta["val"] for operand in operands)
    )


def _is_worth_it(leaves: list[fx.Node], outputs: Mapping[fx.Node, tuple[Placement, ...]]) -> bool:
    partial = [leaf for leaf in leaves if outputs[leaf] == (Partial(),)]
    return 1 < len(partial) < len(leaves)


def _rewritten(graph: fx.Graph, outputs: Mapping[fx.Node, tuple[Placement, ...]]) -> fx.Graph:
    copies: dict[fx.Node, fx.Node] = {}
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, copies))
    for last, leaves in list(_sums(graph)):
        if not _is_worth_it(leaves, outputs):
            continue
        partial = [copies[leaf] for leaf in leaves if outputs[leaf] == (Partial(),)]
        whole = [copies[leaf] for leaf in leaves if outputs[leaf] != (Partial(),)]
        top = copies[last]
        with copy.inserting_before(top):
            top.args = (_added(copy, whole, top), _added(copy, partial, top))
    copy.eliminate_dead_code(lambda node: node.target is not _add or node.op != "call_function")
    return copy


def _added(graph: fx.Graph, values: list[fx.Node], like: fx.Node) -> fx.Node:
    total, *rest = values
    for value in rest:
        total = graph.call_function(_add, (total, value))
        total.meta.update(like.meta)
    return total
