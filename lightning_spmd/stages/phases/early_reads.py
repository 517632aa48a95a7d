"""Values that Python reads one after another are computed, and handed over, together.

    n1 = count(mask1); yield n1; h1 = expert1(x, n1); n2 = count(mask2); yield n2; h2 = expert2(x, n2)

becomes

    n1 = count(mask1); n2 = count(mask2); yield n1, n2; h1 = expert1(x, n1); h2 = expert2(x, n2)

A switch between graph and Python costs as much as a few operators. Python may take another path behind the first of
these reads; then the others were for nothing. So what moves is without effects, fails for no values, and is small.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from lightning_spmd.ir.dependence import Dependences, reorder
from lightning_spmd.ir.effects import is_pure
from lightning_spmd.ir.node_info import TensorSpec, value_of
from lightning_spmd.ir.reads import hands_over
from lightning_spmd.ir.sizes import Counts, Size, SizeFloat, mapped

MOST_BYTES = 1 << 20
"""What moves to the front of one read is held from there on; more than this would show in a step's peak memory."""


def gather_reads(graph: fx.Graph) -> None:
    """Move each hand-over, with what it needs, to the one before, where nothing forbids it. Bitwise.

    Args:
        graph: of one device.
    """
    reads = [node for node in graph.nodes if hands_over(node)]
    if len(reads) < 2:
        return
    table = Dependences(graph)
    order: list[fx.Node] = []
    placed: set[fx.Node] = set()
    for node in table.order:
        if node in placed:
            continue
        order.append(node)
        placed.add(node)
        if not hands_over(node):
            continue
        at, last, held = len(order) - 1, node, 0
        for other in (read for read in reads if read not in placed):
            needed = sorted(table.origins([other]) - placed - {other}, key=table.position.__getitem__)
            held += _bytes_of(needed, table)
            # numbers that Python sends behind a read are those that it computes with its value
            if last.users or held > MOST_BYTES or not all(is_pure(n) and _cannot_fail(n, table) for n in needed):
                break
            order[at:at] = needed
            at += len(needed)
            order.append(other)
            placed.update((*needed, other))
            last = other
    reorder(graph, order)


def _cannot_fail(node: fx.Node, table: Dependences) -> bool:
    """Whether an operator that works on these shapes works on them whatever the values are."""
    operands = [value_of(n) for n in node.all_input_nodes]
    found: list[Size | SizeFloat] = []
    mapped(found.append, (node.args, node.kwargs, operands))
    if any(isinstance(number.sizes, Counts) for number in found):
        return False
    tags = getattr(node.target, "tags", ())
    if table.regions[node][0] is not node or torch.Tag.reduction in tags:
        return True
    specs = [spec for spec in operands if isinstance(spec, TensorSpec)]
    kept = value_of(node)
    decides = isinstance(kept, TensorSpec) and kept.dtype is torch.bool  # a division of integers fails for zeros
    return torch.Tag.pointwise in tags and (decides or all(spec.dtype.is_floating_point for spec in specs))


def _bytes_of(nodes: Iterable[fx.Node], table: Dependences) -> int:
    own = [value_of(node) for node in nodes if table.regions[node][0] is node]
    return sum(value.bytes for value in own if isinstance(value, TensorSpec))
