"""Along an axis whose ranks have batches of their own, every value that depends on one is the rank's own.

Nothing has to be propagated there: an operator with such an operand runs as it is, parameters are gathered for it where
they lie in chunks. What is made of parameters alone is the same on all ranks. Capture marks what leaves for all ranks
(:class:`~lightning_spmd.ir.node_info.Term`): gradients, loss, logged values, each rank's already weighted. From there
on they are partial sums like any other, and everything behind them is as on a batch that is split.
"""

from __future__ import annotations

from torch import fx

from lightning_spmd.errors import ExpansionError
from lightning_spmd.ir.node_info import TERM, Term, named
from lightning_spmd.ir.placement import OWN, REPLICATE, Own, Partial
from lightning_spmd.stages.expand.call import Layout, OpCall


def layout_of_own(call: OpCall, *, updating: bool) -> Layout | None:
    """The layout of an operator on what is a rank's own; None where nothing of it is.

    Args:
        call: the operator; what it makes of nothing (zeros, random numbers) is the rank's own as well.
        updating: it belongs to the update, which all ranks make alike.

    Raises:
        ExpansionError: the update looks at what is a rank's own.
    """
    own = [isinstance(placement, Own) for placement in call.current]
    if updating:
        if any(own):
            raise ExpansionError(
                f"{named(call.node)} is part of the update, which is the same on all ranks, and reads what this rank's "
                "own batch gives"
            )
        return None
    term: Term | None = call.node.meta.get(TERM)
    if call.operands and not any(own) and call.forced != OWN and term is None:
        return None
    result = OWN if term is None else Partial(term.op)
    inputs = tuple(OWN if mine else REPLICATE for mine in own)
    return Layout(inputs, (result,) * max(len(call.outputs), 1))


def subject_of(node: fx.Node) -> str:
    """What a value is, by a name that is the same on ranks with other graphs: of the term or input that it is made of.

    Graphs of ranks' own batches need not be alike, but what they exchange must be, in the same order.
    """
    while True:
        term: Term | None = node.meta.get(TERM)
        if term is not None:
            return term.name
        if not node.all_input_nodes:
            return node.name if node.op == "placeholder" else str(node.target)
        node = node.all_input_nodes[0]
