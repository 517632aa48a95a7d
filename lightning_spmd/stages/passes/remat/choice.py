"""Which storages are given up: cheapest first, by the bytes that they free for what making them again costs.

1. Every storage that the backward pass reads is a candidate with the chain of operators that makes it again from the
   others. What chains share (one product whose result is split into queries, keys and values) costs each its part.
2. They are given up in the order of bytes by cost, the earliest first among equals: it is idle for longest. The
   shortest beginning of that list that is enough is taken; what is alive is counted node by node for each attempt.
3. What is recomputed at the top of the remaining memory, right after the forward pass, frees nothing there, so the
   storages with the shortest idle time are kept after all, as many as the limit allows.
4. Where no beginning is enough the best one is taken, and one storage after the other is added that lowers the peak:
   that way a deep network keeps a few values between its blocks, and makes longer chains where more room is.

After Chen et al., "Training Deep Nets with Sublinear Memory Cost" (arXiv:1604.06174), and Checkmate (arXiv:1910.02653),
which solves for the optimum; here a few dozen attempts have to do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import fx

from lightning_spmd.stages.passes.remat.plan import Plan, Planner, chain
from lightning_spmd.stages.passes.remat.values import Values

SMALLEST = 4096
"""What is smaller than this part of the activations is left alone."""
ATTEMPTS = 64
"""Storages that are tried one by one where no beginning of the list is enough."""
_LOOKS = 16


def choose(values: Values, planner: Planner, limit: int) -> Plan:
    """The plan for at most ``limit`` bytes of activations, or as few as can be."""
    ranked = ranking(values, planner.plan(()).peak // SMALLEST)
    plan = _beginning(planner, ranked, limit)
    if plan.peak > limit:
        plan = _with_more(planner, plan, ranked, limit)
    return _keep_what_frees_nothing(values, planner, plan, max(limit, plan.peak))


def ranking(values: Values, smallest: int) -> list[fx.Node]:
    """What may be given up, cheapest first."""
    candidates = [r for r in values.activations if _may_be_given_up(values, r) and values.size(r) > smallest]
    chains = {root: chain(values, {root}) for root in candidates}
    shared = Counter(node for again, _ in chains.values() for node in again)

    def worth(root: fx.Node) -> float:
        again, kept = chains[root]
        freed = values.size(root) - sum(map(values.size, kept)) - sum(values.packed_size(n) for n in again)
        # integers summed before one division: the same on every rank
        cost = sum((values.costs[n] or 0) * 1024 // shared[n] for n in sorted(again, key=values.position.__getitem__))
        return freed / max(cost, 1)

    worths = {root: worth(root) for root in candidates}
    ranked = sorted(candidates, key=lambda root: (-worths[root], values.position[root]))
    return [root for root in ranked if worths[root] > 0]


def _may_be_given_up(values: Values, root: fx.Node) -> bool:
    readers = values.late_readers.get(root, ())
    return root in values.repeatable and bool(readers) and values.position[readers[0][0]] <= values.end


def _beginning(planner: Planner, ranked: Sequence[fx.Node], limit: int) -> Plan:
    """The shortest beginning of the list with which the peak is within the limit; if none is, the best one.

    The peak falls with the length up to some point. Behind it values between blocks are given up as well, and what is
    made again reaches through the whole network. So lengths are tried closer and closer around the best one so far.
    """
    low, high, best = 0, len(ranked), planner.plan(())
    while high > low:
        step = max(1, (high - low) // _LOOKS)
        for length in range(low, high + 1, step):
            plan = planner.plan(ranked[:length])
            if plan.peak <= limit:
                return _shortest(planner, ranked, limit, max(low, length - step), plan)
            if plan.peak < best.peak:
                best = plan
        if step == 1:
            break
        low, high = max(0, len(best.dropped) - step), min(len(ranked), len(best.dropped) + step)
    return best


def _shortest(planner: Planner, ranked: Sequence[fx.Node], limit: int, low: int, enough: Plan) -> Plan:
    """The shortest beginning that is enough, longer than ``low`` and at most as long as one that is, by halving."""
    high = len(enough.dropped) - 1
    while low <= high:
        middle = (low + high) // 2
        plan = planner.plan(ranked[:middle])
        if plan.peak <= limit:
            enough, high = plan, middle - 1
        else:
            low = middle + 1
    return enough


def _with_more(planner: Planner, best: Plan, ranked: Sequence[fx.Node], limit: int) -> Plan:
    """The plan, and whatever else lowers its peak, one storage after the other."""
    others = sorted((r for r in ranked if r not in best.dropped), key=planner.values.position.__getitem__)
    for root in others[:ATTEMPTS]:
        if best.peak <= limit:
            break
        plan = planner.plan((*best.dropped, root))
        best = plan if plan.peak < best.peak else best
    return best


def _keep_what_frees_nothing(values: Values, planner: Planner, plan: Plan, limit: int) -> Plan:
    """Keep as many of the storages with the shortest idle time as the limit allows, found by halving."""

    def idle(root: fx.Node) -> tuple[int, int]:
        return min(values.position[reader] for reader, _ in values.late_readers[root]) - values.position[root], (
            values.position[root]
        )

    by_idle = sorted(plan.dropped, key=idle)
    low, high = 1, len(by_idle)
    while low <= high:
        middle = (low + high) // 2
        attempt = planner.plan(by_idle[middle:])
        if attempt.peak <= limit:
            plan, low = attempt, middle + 1
        else:
            high = middle - 1
    return plan
