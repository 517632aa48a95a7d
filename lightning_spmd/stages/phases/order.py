"""In which order collectives start and updates run: by when their results are needed.

The network serves one collective after the other. When it is the bottleneck, first come first served is the wrong
order: the first layer's gradient is ready last and needed first. So the iteration is simulated with the measured times:
whenever the network falls idle, the ready collective with the earliest deadline is next (earliest deadline first,
Jackson 1955; for gradients see ByteScheduler, SOSP 2019). The graph then starts collectives in that order, each as
early as its operand and its predecessors allow; whatever the times turn out to be, only speed depends on them.

What is under way takes memory (``bounds.py``), so some of the waits come early.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from lightning_spmd.ir.dependence import Dependences, Tail, reorder
from lightning_spmd.ir.verify import is_wait
from lightning_spmd.stages.phases.bounds import bounded
from lightning_spmd.stages.phases.touch import Touches, first_conflict

MOST_SLOWED = 1.5
"""More is noise, or an iteration that something else delays."""
Seconds = Mapping[str, float]
"""By node name: how long a node takes; for the start of a collective, how long the whole collective does."""


@dataclass(frozen=True)
class _Job:
    start: fx.Node
    ready: float
    duration: float
    deadline: float


@dataclass(frozen=True)
class Schedule:
    """A step's parts and the order of its collectives.

    Args:
        body: computation, in order; without tails and their collectives.
        queue: the collectives that start tails, in the order in which they start.
        program: the body with these in it, each as early as its operand and its predecessors allow, and early waits.
        kept: tails that run at the end of the iteration, in order of arrival, without the early waits.
        readers: for each deferred tail, without them, the node of ``body`` that it must come before, or None.
    """

    body: list[fx.Node]
    queue: list[fx.Node]
    program: list[fx.Node]
    kept: list[Tail]
    readers: list[tuple[Tail, fx.Node | None]]

    @property
    def deferred(self) -> list[Tail]:
        """The tails that run in the next iteration."""
        return [tail for tail, _ in self.readers]


def schedule(
    dependences: Dependences,
    all_tails: Sequence[Tail],
    deferred: Sequence[Tail],
    touches: Touches,
    seconds: Seconds,
    *,
    as_written: bool = False,
) -> Schedule:
    """The order of a step's parts.

    Args:
        dependences: of the graph.
        all_tails: of the graph.
        deferred: those that run in the next iteration.
        touches: of the graph.
        seconds: measured times; empty: collectives start as they become ready.
        as_written: collectives start in the order in which they stand in the graph, which is that of all ranks.
    """
    in_tails = {node for tail in all_tails for node in tail.nodes}
    starts = {start for tail in all_tails for start in tail.starts}
    body = [n for n in dependences.order if n not in in_tails and n not in starts and n.op != "output"]
    readers = [(t, first_conflict(touches.of_all(t.nodes), touches, body)) for t in deferred]
    queue = _issue_order(body, dependences, all_tails, readers, seconds, as_written)
    arrival = {start: index for index, start in enumerate(queue)}
    by_arrival = sorted(all_tails, key=lambda t: max(arrival[s] for s in t.starts))
    kept = [t for t in by_arrival if t not in deferred]
    program = bounded(_with_starts(body, queue, dependences), kept, dependences)
    done = set(program)
    kept = [_without(t, done) for t in kept]
    return Schedule(body, queue, program, kept, [(_without(t, done), reader) for t, reader in readers])


def _without(tail: Tail, done: Collection[fx.Node]) -> Tail:
    return replace(tail, nodes=tuple(n for n in tail.nodes if n not in done))


def arrange(graph: fx.Graph, dependences: Dependences, chosen: Schedule) -> None:
    """Put the graph into its order of execution: computation with collectives in it, then the tails as they arrive."""
    rest = [n for tail in chosen.kept for n in tail.nodes] + [n for tail, _ in chosen.readers for n in tail.nodes]
    reorder(graph, [*chosen.program, *rest, dependences.order[-1]])


def _with_starts(body: Sequence[fx.Node], collectives: Sequence[fx.Node], dependences: Dependences) -> list[fx.Node]:
    """The body with every collective as early as its operand and its predecessors in the queue allow."""
    queue = list(collectives)
    order: list[fx.Node] = []
    emitted: set[fx.Node] = set()

    def emit(node: fx.Node) -> None:
        order.append(node)
        emitted.add(node)
        while queue and dependences.before[queue[0]] <= emitted:
            emit(queue.pop(0))

    for node in body:
        emit(node)
    return order


def predicted_seconds(chosen: Schedule, seconds: Seconds, iterations: int = 4) -> float:
    """Time of an iteration in the steady state: one thread computes, the network serves one collective at a time."""
    late: dict[fx.Node | None, list[Tail]] = {}
    for tail, reader in chosen.readers:
        late.setdefault(reader, []).append(tail)
    arrives: dict[fx.Node, float] = {}
    now = network = begin = 0.0

    def finish(tail: Tail, arrives: Mapping[fx.Node, float]) -> None:
        nonlocal now
        now = max([now, *(arrives.get(start, 0.0) for start in tail.starts)])
        now += sum(seconds.get(n.name, 0.0) for n in tail.nodes)

    queued = set(chosen.queue)
    for _ in range(iterations):
        begin = now
        before, arrives = arrives, {}
        for node in chosen.program:
            for tail in late.get(node, ()):
                finish(tail, before)
            if node in queued:
                network = max(network, now) + seconds.get(node.name, 0.0)
                arrives[node] = network
                continue
            if is_wait(node):
                now = max(now, arrives.get(node.all_input_nodes[0], 0.0))
            now += seconds.get(node.name, 0.0)
        for tail in chosen.kept:
            finish(tail, arrives)
        for tail in late.get(None, ()):
            finish(tail, before)
    return now - begin


def slowed(seconds: Seconds, chosen: Schedule, whole: float) -> Seconds:
    """The times with collectives as slow as they are in an iteration: one behind the other, and beside computation.

    By itself each is faster: it has the cores, and what a link lets through in a burst.

    Args:
        seconds: measured times of every node by itself.
        chosen: a schedule.
        whole: measured seconds of an iteration in this order.
    """

    def with_factor(factor: float) -> dict[str, float]:
        return dict(seconds) | {start.name: factor * seconds.get(start.name, 0.0) for start in chosen.queue}

    factor, step = 1.0, (MOST_SLOWED - 1.0) / 2
    while step > 1e-3:  # the largest factor with which the iteration is no longer than it was
        if predicted_seconds(chosen, with_factor(factor + step)) <= whole:
            factor += step
        step /= 2
    return with_factor(factor)


def _issue_order(
    body: Sequence[fx.Node],
    dependences: Dependences,
    all_tails: Sequence[Tail],
    readers: Sequence[tuple[Tail, fx.Node | None]],
    seconds: Seconds,
    as_written: bool,
) -> list[fx.Node]:
    clock: dict[fx.Node, float] = {}
    begins: dict[fx.Node, float] = {}
    now = 0.0
    for node in body:
        begins[node] = now
        now += seconds.get(node.name, 0.0)
        clock[node] = now
    needed_by = dict(readers)
    kept = (tail for tail in all_tails if tail not in needed_by)
    finish = now + sum(seconds.get(n.name, 0.0) for tail in kept for n in tail.nodes)
    position = {node: i for i, node in enumerate(body)}
    jobs: list[tuple[int, _Job]] = []
    for tail in all_tails:
        deadline = now
        if tail in needed_by:
            reader = needed_by[tail]
            deadline = finish + (finish if reader is None else begins[reader])
        for start in tail.starts:
            needs = [n for n in dependences.before[start] if n in position]
            ready = max((clock[n] for n in needs), default=0.0)
            place = max((position[n] for n in needs), default=0)
            jobs.append((place, _Job(start, ready, seconds.get(start.name, 0.0), deadline)))
    if as_written:
        written = {node: i for i, node in enumerate(dependences.order)}
        return sorted((job.start for _, job in jobs), key=written.__getitem__)
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
