"""In which order collectives start and updates run: by when their results are needed.

The network serves one collective after the other. When it is the bottleneck, first come first served is the wrong
order: the first layer's gradient is ready last and needed first. So the iteration is simulated with the measured times:
whenever the network falls idle, the ready collective with the earliest deadline is next (earliest deadline first,
Jackson 1955; for gradients see ByteScheduler, SOSP 2019). The graph then starts collectives in that order, each as
early as its operand and its predecessors allow; whatever the times turn out to be, only speed depends on them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from lightning_spmd.ir.dependence import Dependences, Tail, reorder
from lightning_spmd.stages.phases.touch import Touches, first_conflict

Seconds = Mapping[str, float]
"""By node name: how long a node takes; for the start of a collective, how long the whole collective does."""


@dataclass(frozen=True)
class _Job:
    start: fx.Node
    ready: float
    duration: float
    deadline: float


def arrange(
    graph: fx.Graph,
    dependences: Dependences,
    all_tails: Sequence[Tail],
    deferred: Sequence[Tail],
    touches: Touches,
    seconds: Seconds,
) -> None:
    """Put the graph into its order of execution: computation with collectives in it, then the tails as they arrive.

    Args:
        graph: changed in place.
        dependences: of the graph.
        all_tails: of the graph.
        deferred: those that run in the next iteration.
        touches: of the graph.
        seconds: measured times; empty: collectives start as they become ready.
    """
    in_tails = {node for tail in all_tails for node in tail.nodes}
    starts = {start for tail in all_tails for start in tail.starts}
    body = [n for n in dependences.order if n not in in_tails and n not in starts and n.op != "output"]
    queue = issue_order(body, dependences, all_tails, deferred, touches, seconds)
    arrival = {start: index for index, start in enumerate(queue)}
    order: list[fx.Node] = []
    emitted: set[fx.Node] = set()

    def emit(node: fx.Node) -> None:
        order.append(node)
        emitted.add(node)
        while queue and dependences.before[queue[0]] <= emitted:
            emit(queue.pop(0))

    for node in body:
        emit(node)
    for tail in sorted(all_tails, key=lambda t: max(arrival[s] for s in t.starts)):
        order.extend(tail.nodes)
    reorder(graph, [*order, dependences.order[-1]])


def issue_order(
    body: Sequence[fx.Node],
    dependences: Dependences,
    all_tails: Sequence[Tail],
    deferred: Sequence[Tail],
    touches: Touches,
    seconds: Seconds,
) -> list[fx.Node]:
    """The collectives that start tails, in the order in which they should start."""
    clock: dict[fx.Node, float] = {}
    now = 0.0
    begins: dict[fx.Node, float] = {}
    for node in body:
        begins[node] = now
        now += seconds.get(node.name, 0.0)
        clock[node] = now
    finish = now
    for tail in all_tails:
        if tail not in deferred:
            finish += sum(seconds.get(n.name, 0.0) for n in tail.nodes)
    position = {node: i for i, node in enumerate(body)}
    jobs: list[tuple[int, _Job]] = []
    for tail in all_tails:
        deadline = now
        if tail in deferred:
            reader = first_conflict(touches.of_all(tail.nodes), touches, body)
            deadline = finish + (begins[reader] if reader is not None else finish)
        for start in tail.starts:
            needs = [n for n in dependences.before[start] if n in position]
            ready = max((clock[n] for n in needs), default=0.0)
            place = max((position[n] for n in needs), default=0)
            jobs.append((place, _Job(start, ready, seconds.get(start.name, 0.0), deadline)))
    in_order = [job for _, job in sorted(jobs, key=lambda pair: pair[0])]
    return [job.start for job in (_earliest_deadline_first(in_order) if seconds else in_order)]


def _earliest_deadline_first(jobs: Sequence[_Job]) -> list[_Job]:
    waiting = list(jobs)
    now = 0.0
    result: list[_Job] = []
    while waiting:
        now = max(now, min(job.ready for job in waiting))
        chosen = min((job for job in waiting if job.ready <= now), key=lambda job: job.deadline)
        waiting.remove(chosen)
        result.append(chosen)
        now += chosen.duration
    return result
