"""ShardedStep → IterationGraphs: setup, main and cleanup.

``deferral.py`` decides what may move into the next iteration, ``order.py`` when collectives start, ``split.py`` cuts
the iteration in two, ``follow.py`` joins the end of one iteration with the next one::

    setup       an iteration without the deferred work, run where none is pending (first step, after a cleanup)
    main        the deferred work of the iteration before, each part in front of its first reader, and an iteration
    cleanup     the deferred work alone: may run at any moment, and leaves the model as an undeferred run would

The ancestor is ``IterGraphModule`` of PyTorch's former ``torch.distributed._spmd``; unlike it, nothing here needs to
know how many iterations there will be, and reading a weight too early is an error when the graph is made.
"""

from __future__ import annotations

from lightning_spmd.ir.dependence import Dependences, tails
from lightning_spmd.ir.steps import IterationGraphs, ShardedStep
from lightning_spmd.ir.verify import verify_sharded
from lightning_spmd.stages.phases.deferral import Deferral, choose
from lightning_spmd.stages.phases.follow import follow
from lightning_spmd.stages.phases.order import Seconds, arrange, predicted_seconds, schedule, slowed
from lightning_spmd.stages.phases.split import split
from lightning_spmd.stages.phases.touch import State, Touches

__all__ = ["Deferral", "arrange_undeferred", "deferrable", "follow", "make_phases"]

WORTH_MOVING = 0.03
"""Predicted gain, as a part of the step, below which ``"auto"`` moves nothing: an update in the middle of the forward
pass finds colder caches."""


def deferrable(step: ShardedStep, guarded: frozenset[State] = frozenset()) -> Deferral:
    """The part of a step that may move into the next iteration, and why it is not more."""
    return choose(tails(Dependences(step.graph_module.graph)), Touches(step), guarded)


def arrange_undeferred(step: ShardedStep, *, as_written: bool = False) -> ShardedStep:
    """Order a step's collectives and updates within the iteration: each starts, and runs, as soon as it can.

    Args:
        step: after the passes.
        as_written: collectives start in the order in which they stand there.
    """
    return make_phases(step, overlap=False, as_written=as_written).main


def make_phases(
    step: ShardedStep,
    *,
    overlap: bool | str,
    seconds: Seconds | None = None,
    whole: float | None = None,
    guarded: frozenset[State] = frozenset(),
    as_written: bool = False,
) -> IterationGraphs:
    """Make the graphs that run.

    Args:
        step: after the passes; its nodes are put into their order of execution.
        overlap: whether work may move into the next iteration; ``"auto"``: if by the measured times that is faster.
        seconds: measured time of every node, by name; without it collectives start as their operands become ready.
        whole: measured seconds of an iteration with nothing deferred, whose collectives start as they become ready.
        guarded: state that decides which graph the next iteration uses.
        as_written: collectives start in the order in which they stand in the step.

    Raises:
        VerificationError: a graph broke an invariant, or would read something stale.
    """
    graph = step.graph_module.graph
    dependences, touches = Dependences(graph), Touches(step)
    found = tails(dependences)
    times = seconds or {}
    if times and whole is not None:
        times = slowed(times, schedule(dependences, found, (), touches, {}, as_written=as_written), whole)
    decision = choose(found, touches, guarded) if overlap else Deferral()
    chosen = schedule(dependences, found, decision.deferred, touches, times, as_written=as_written)
    notes = str(decision) if overlap else ""
    if decision.deferred and times:
        plain = schedule(dependences, found, (), touches, times)
        before, after = (1e3 * predicted_seconds(p, times) for p in (plain, chosen))
        notes += f" (a step of {after:.1f} ms instead of {before:.1f} by the measured times)"
        if overlap == "auto" and after > (1 - WORTH_MOVING) * before:
            decision, chosen = Deferral(), plain
            notes = (
                f"nothing moves, the network is fast enough: {before:.1f} ms a step by the measured times, and "
                f"{after:.1f} if it did"
            )
    arrange(graph, dependences, chosen)
    verify_sharded(step)
    step.graph_module.recompile()
    if not decision.deferred:
        return IterationGraphs(main=step, notes=notes)
    setup, cleanup = split(step, chosen.deferred)
    return IterationGraphs(main=follow(cleanup, setup), setup=setup, cleanup=cleanup, notes=notes)
