"""Move the operands of collectives in front of the updates.

Before, an optimizer that negates each gradient (``maximize=True``) right before it uses it::

    n1 = neg(g1); r1 = wait(all_reduce(n1)); update(p1, r1); n2 = neg(g2); r2 = wait(all_reduce(n2)); update(p2, r2)

After, the collectives are free to share a bucket::

    n1 = neg(g1); n2 = neg(g2); r1 = wait(all_reduce(n1)); update(p1, r1); r2 = wait(all_reduce(n2)); update(p2, r2)

What a collective's operand needs moves in front of the first operator of the CLIP or OPTIMIZER section that no operand
needs, in the same order. Bitwise. Does nothing where operands are complete by then, as most are.
"""

from __future__ import annotations

from lightning_spmd.ir.dependence import Dependences, reorder
from lightning_spmd.ir.node_info import Section, info_of
from lightning_spmd.ir.steps import ShardedStep
from lightning_spmd.ir.verify import starts_collective
from lightning_spmd.stages.passes.contract import GraphPass, PassState


def early_operands(step: ShardedStep, state: PassState) -> None:
    """Move operands of collectives forward; see the module docstring for what it does and when it does nothing."""
    graph = step.graph_module.graph
    table = Dependences(graph)
    updating = (Section.CLIP, Section.OPTIMIZER)
    first = next(
        (i for i, n in enumerate(table.order) if n.op != "placeholder" and info_of(n).section in updating), None
    )
    if first is None:
        return
    needed = table.origins(operand for n in table.order if starts_collective(n) for operand in n.all_input_nodes)
    rest = table.order[first:]
    early = [n for n in rest if n in needed]
    if early == rest[: len(early)]:
        return
    reorder(graph, [*table.order[:first], *early, *(n for n in rest if n not in needed)])
    state.notes["early_operands"] = f"{len(early)} operators in front of the updates"


PASS = GraphPass("early_operands", early_operands)
"""Before ``bucket_collectives``."""
