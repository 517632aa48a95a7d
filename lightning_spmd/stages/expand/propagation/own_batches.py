"""Local batches: along this axis every value that depends on the batch is the rank's own.

Nothing is propagated there. An operator with such an operand runs unchanged, and parameters stored in chunks are
gathered for it. Values computed from parameters alone are the same on all ranks. Capture marks values that leave for
all ranks (:class:`~lightning_spmd.ir.node_info.Term`): gradients, loss and logged values, already weighted by the
rank's share. From there on they are ordinary partial sums, as with a split batch.
"""

from __future__ import annotations

from torch import fx

from lightning_spmd.errors import ExpansionError
from lightning_spmd.ir.node_info import TERM, Term, named
from lightning_spmd.ir.placement import OWN, REPLICATE, Own, Partial
from lightning_spmd.stages.expand.call import Layout, OpCall


def layout_of_own(call: OpCall, *, updating: bool) -> Layout | None:
    """The layout of an operator on a rank's own values; None if it has no such operand.

    Args:
        call: the operator. Values created from nothing (zeros, random numbers) are the rank's own too.
        updating: whether it belongs to the update, which all ranks do alike.

    Raises:
        ExpansionError: the update reads a rank's own value.
    """
    own = [isinstance(placement, Own) for placement in call.current]
    if updating:
        if any(own):
            raise ExpansionError(
                f"{named(call.node)} is part of the update, which is the same on all ranks, and reads a value of this "
                "rank's local batch"
            )
        return None
    term: Term | None = call.node.meta.get(TERM)
    if call.operands and not any(own) and call.forced != OWN and term is None:
        return None
    result = OWN if term is None else Partial(term.op)
    inputs = tuple(OWN if mine else REPLICATE for mine in own)
    return Layout(inputs, (result,) * max(len(call.outputs), 1))


def subject_of(node: fx.Node) -> str:
    """A name for a value that is the same on ranks with other graphs: the term or input that it was made from.

    Graphs of local batches may differ, but their collectives must be the same, in the same order.
    """
    while True:
        term: Term | None = node.meta.get(TERM)
        if term is not None:
            return term.name
        if not node.all_input_nodes:
            return node.name if node.op == "placeholder" else str(node.target)
        node = node.all_input_nodes[0]
