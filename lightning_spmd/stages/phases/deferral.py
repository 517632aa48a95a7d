"""Which tails of an iteration may run inside the next one, and why not more.

A tail (``ir.dependence``) is the wait of a gradient bucket and the update behind it. It may be deferred when nothing in
its own iteration needs it and the next one can bring it up before its first reader.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_spmd.ir.dependence import Tail
from lightning_spmd.ir.effects import draws_random
from lightning_spmd.ir.node_info import Section, info_of
from lightning_spmd.ir.signature import InputRole
from lightning_spmd.stages.phases.touch import LIVE, State, Touch, Touches


@dataclass
class Deferral:
    """The decision for one step.

    Args:
        deferred: tails that move into the next iteration.
        reasons: for those that stay, in words for the user.
    """

    deferred: list[Tail] = field(default_factory=list[Tail])
    reasons: list[str] = field(default_factory=list[str])

    def __str__(self) -> str:
        buckets = sum(len(tail.starts) for tail in self.deferred)
        moved = f"the updates of {buckets} gradient buckets run in the next iteration" if buckets else "nothing moves"
        return "; ".join([moved, *dict.fromkeys(self.reasons)])


def choose(all_tails: Sequence[Tail], touches: Touches, guarded: frozenset[State]) -> Deferral:
    """Decide for every tail.

    Args:
        all_tails: of one graph.
        touches: of the same graph.
        guarded: state that decides which graph the next iteration uses.
    """
    decision = Deferral()
    buckets = sum(len(tail.starts) for tail in all_tails)
    for tail in all_tails:
        reason = _objection(tail, touches.of_all(tail.nodes), guarded, buckets)
        if reason is None:
            decision.deferred.append(tail)
        else:
            decision.reasons.append(reason)
    return decision


def _objection(tail: Tail, touch: Touch, guarded: frozenset[State], buckets: int) -> str | None:
    if len(tail.starts) > max(1, buckets // 2):
        clipped = any(info_of(n).section is Section.CLIP for n in tail.nodes)
        what = "clipping by the norm of all gradients" if clipped else "an operator that reads several buckets"
        return f"{what} lets no update start before {len(tail.starts)} buckets are there, so none is worth moving"
    if tail.returns:
        return "the bucket with the loss and logged values stays: they are read right after the step"
    if not any(role is InputRole.PARAMETER for role, _ in touch.writes):
        return "a part of the backward pass stays: only updates move"
    if any(role not in LIVE for role, _ in touch.writes):
        return "an update stays that writes into what does not outlive the iteration"
    if touch.writes & guarded:
        return "an update stays that changes what decides about the next iteration's graph"
    if any(draws_random(node) for node in tail.nodes):
        return "an update that draws random numbers stays"
    return None
