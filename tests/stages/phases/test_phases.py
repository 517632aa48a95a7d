"""Work that moves into the next iteration: the same bits, nothing stale, and a reason for what stays."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from lightning_spmd.errors import VerificationError
from lightning_spmd.ir.dependence import Dependences, tails
from lightning_spmd.ir.node_info import NodeInfo, Section
from lightning_spmd.ir.placement import REPLICATE
from lightning_spmd.ir.signature import InputRole, OutputRole
from lightning_spmd.ir.steps import CapturedStep, IterationGraphs, ShardedStep
from lightning_spmd.ir.verify import is_wait, starts_collective
from lightning_spmd.stages.passes import PASSES, PassState, run_passes
from lightning_spmd.stages.phases import deferrable, follow, make_phases
from lightning_spmd.stages.phases.follow import verify_nothing_stale
from lightning_spmd.stages.phases.order import MOST_SLOWED, predicted_seconds, schedule, slowed
from lightning_spmd.stages.phases.split import TAIL
from lightning_spmd.stages.phases.touch import Touches
from tests.helpers.simulate import RankInterpreter, Rendezvous, expand_all, piece
from tests.helpers.tiny_capture import capture_module
from tests.stages.expand.test_models import captured_model, clipped, sgd
from tests.stages.passes.local_programs import write

PARAMETER, BATCH = InputRole.PARAMETER, InputRole.BATCH
SMALL = 0.001
"""MiB: a bucket a layer in these models."""


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(16, 16), nn.Tanh())))


def square(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x).square().mean()


def captured_layers(rows: int = 6, update: Any = sgd) -> tuple[CapturedStep, list[Any]]:
    return capture_module(layers(), square, [torch.randn(rows, 16)], update=update)


def programs(captured: CapturedStep, split: tuple[int, ...] = (3, 3)) -> list[ShardedStep]:
    return [run_passes(step, PASSES, PassState(bucket_size_mb=SMALL)) for step in expand_all(captured, split)]


def overlapped(captured: CapturedStep, split: tuple[int, ...] = (3, 3), seconds: Any = None) -> list[IterationGraphs]:
    return [make_phases(step, overlap=True, seconds=seconds) for step in programs(captured, split)]


class Ranks:
    """State of every rank, by role and key, and the runs of programs on it."""

    def __init__(self, step: ShardedStep, live: Sequence[Any], size: int = 2) -> None:
        self.meetings = {axis.group: Rendezvous(axis.size) for axis in step.axes}
        self.state: list[dict[Any, Any]] = []
        for rank in range(size):
            axis = dataclasses.replace(step.axes[0], rank=rank)
            self.state.append(
                {
                    (e.role, e.key): piece(v, e.placements[0], axis) if isinstance(v, Tensor) else v
                    for v, e in zip(live, step.signature.inputs, strict=True)
                }
            )
        self.pending: list[list[Any]] = [[] for _ in range(size)]

    def run(self, steps: Sequence[ShardedStep]) -> list[Any]:
        """One program on every rank; pending values go from one run into the next."""
        results: list[Any] = [None] * len(steps)

        def work(rank: int) -> None:
            handed = iter(self.pending[rank])
            inputs = [
                next(handed) if e.role is InputRole.PENDING else self.state[rank][e.role, e.key]
                for e in steps[rank].signature.inputs
            ]
            with torch.no_grad():
                outputs = RankInterpreter(steps[rank], self.meetings).run(*inputs)
            leaving = list(zip(outputs, steps[rank].signature.outputs, strict=True))
            self.pending[rank] = [[v] if e.key[1] else v for v, e in leaving if e.role is OutputRole.PENDING]
            results[rank] = [v for v, e in leaving if e.role is not OutputRole.PENDING]

        threads = [threading.Thread(target=work, args=(r,)) for r in range(len(steps))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(r is not None for r in results), "a rank failed"
        return results

    def tensors(self) -> list[Tensor]:
        return [v for state in self.state for v in state.values() if isinstance(v, Tensor)]


def assert_same(a: Sequence[Tensor], b: Sequence[Tensor]) -> None:
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def writes_often(parameters: list[Tensor], gradients: list[Tensor]) -> None:
    """Three writes into a parameter, and the gradient is in the last one alone."""
    for p, gradient in zip(parameters, gradients, strict=True):
        torch.where(p < 0, p * 0.5, p, out=p).mul_(0.9).add_(gradient, alpha=-0.1)


def captured_writes() -> tuple[CapturedStep, list[Any]]:
    """Each bucket has one parameter, so that nothing is fused."""
    torch.manual_seed(0)
    module = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(16, 16, bias=False), nn.Tanh())))
    return capture_module(module, square, [torch.randn(6, 16)], update=writes_often)


MAKE: dict[str, Callable[[], tuple[CapturedStep, list[Any]]]] = {
    "layers": captured_layers,
    "several writes": captured_writes,
    "gpt": lambda: captured_model("gpt", sgd),
    "gpt_tied": lambda: captured_model("gpt_tied", sgd),
    "convnet": lambda: captured_model("convnet", sgd),
}


@pytest.mark.parametrize("model", MAKE)
def test_deferred_iterations_compute_the_same_bits_and_cleanup_may_come_at_any_moment(model: str) -> None:
    captured, live = MAKE[model]()
    plain = programs(captured)
    phases = overlapped(captured)
    setup = [p.setup for p in phases if p.setup is not None]
    cleanup = [p.cleanup for p in phases if p.cleanup is not None]
    assert len(setup) == len(cleanup) == 2
    reference, ours = Ranks(plain[0], live), Ranks(plain[0], live)
    pending = False
    for iteration in range(6):
        wanted = reference.run(plain)
        got = ours.run([p.main for p in phases] if pending else setup)
        assert_same([v for r in wanted for v in r], [v for r in got for v in r])
        pending = True
        if iteration in (0, 3, 5):  # after a setup, in mid-run, at the end
            assert any(not torch.equal(a, b) for a, b in zip(reference.tensors(), ours.tensors(), strict=True))
            ours.run(cleanup)
            assert_same(reference.tensors(), ours.tensors())
            pending = False


def test_an_iteration_may_follow_one_of_another_shape() -> None:
    """The last batch of an epoch is shorter; accumulation alternates graphs in the same way."""
    captured, live = captured_layers(6)
    other, other_live = captured_layers(4)
    plain, plain_other = programs(captured), programs(other, (2, 2))
    phases, phases_other = overlapped(captured), overlapped(other, (2, 2))
    setup = [p.setup for p in phases if p.setup is not None]
    joined = [follow(a.cleanup, b.setup) for a, b in zip(phases, phases_other, strict=True) if a.cleanup and b.setup]
    reference, ours = Ranks(plain[0], live), Ranks(plain[0], live)
    for rank in range(2):
        batch = next(k for k in reference.state[rank] if k[0] is InputRole.BATCH)
        short = other_live[-1][rank * 2 : rank * 2 + 2]
        first = reference.state[rank][batch]
        reference.state[rank]["batches"] = ours.state[rank]["batches"] = {6: first, 4: short}

    def feed(ranks: Ranks, rows: int) -> None:
        for state in ranks.state:
            batch = next(k for k in state if k[0] is InputRole.BATCH)
            state[batch] = state["batches"][rows]

    feed(reference, 6)
    reference.run(plain)
    feed(reference, 4)
    reference.run(plain_other)
    feed(ours, 6)
    ours.run(setup)
    feed(ours, 4)
    ours.run(joined)
    ours.run([p.cleanup for p in phases_other if p.cleanup is not None])
    assert_same(reference.tensors(), ours.tensors())


def test_moved_operators_lag_by_one_iteration_and_none_is_lost() -> None:
    """What the ancestor's ``test_basic_movement`` counted: not in setup, once in main and in cleanup."""
    graphs = overlapped(captured_layers()[0])[0]
    assert graphs.setup is not None
    assert graphs.cleanup is not None

    def updates(step: ShardedStep) -> int:
        return sum("_foreach_add_" in str(n.target) for n in step.graph_module.graph.nodes)

    whole = updates(programs(captured_layers()[0])[0])
    moved = whole - updates(graphs.setup)
    assert moved == len(deferrable(programs(captured_layers()[0])[0]).deferred)
    assert updates(graphs.cleanup) == moved
    assert updates(graphs.main) == whole


def test_gradients_are_not_kept_beyond_their_update() -> None:
    """Or a step would hold two sets of them: those of the iteration before until its end."""
    captured, live = captured_layers()
    phases = overlapped(captured)
    ranks = Ranks(programs(captured)[0], live)
    ranks.run([p.setup for p in phases if p.setup is not None])
    boxes = [value for value in ranks.pending[0] if isinstance(value, list)]
    assert [len(box) for box in boxes] == [1] * len(deferrable(programs(captured)[0]).deferred)
    ranks.run([p.main for p in phases])
    assert [len(box) for box in boxes] == [0] * len(boxes)


def test_every_bucket_but_the_one_with_the_loss_moves_and_runs_before_its_first_reader() -> None:
    captured, _ = captured_layers()
    step = programs(captured)[0]
    found = tails(Dependences(step.graph_module.graph))
    decision = deferrable(step)
    assert len(decision.deferred) == len(found) - 1 >= 3
    assert "the bucket with the loss and logged values stays" in str(decision)
    main = make_phases(step, overlap=True).main
    body = [n for n in main.graph_module.graph.nodes if n.op == "call_function"]
    waits = [i for i, n in enumerate(body) if is_wait(n) and TAIL in n.meta]
    computed = [i for i, n in enumerate(body) if "tanh" in str(n.target) and TAIL not in n.meta]
    assert waits[0] < computed[0] < waits[1]  # not all of them at the beginning
    verify_nothing_stale(main)


def test_clipping_by_norm_moves_nothing_and_says_why() -> None:
    captured, live = captured_layers(update=clipped)
    steps = programs(captured)
    decision = deferrable(steps[0])
    assert decision.deferred == []
    assert "lets no update start before" in str(decision)
    phases = [make_phases(step, overlap=True) for step in steps]
    assert all(p.setup is None and p.cleanup is None for p in phases)
    reference, ours = Ranks(steps[0], live), Ranks(steps[0], live)
    reference.run(programs(captured))
    ours.run([p.main for p in phases])
    assert_same(reference.tensors(), ours.tensors())


def test_state_that_decides_about_the_next_graph_is_not_deferred() -> None:
    step = programs(captured_layers()[0])[0]
    weights = [(e.role, e.key) for e in step.signature.inputs if e.role is InputRole.PARAMETER]
    free = deferrable(step)
    bound = deferrable(step, frozenset(weights))
    assert free.deferred != []
    assert bound.deferred == []
    assert "decides about the next iteration's graph" in str(bound)


def test_the_verifier_catches_an_update_that_comes_too_late() -> None:
    graphs = overlapped(captured_layers()[0])[0]
    graph = graphs.main.graph_module.graph
    output = next(iter(reversed(graph.nodes)))
    late = [n for n in graph.nodes if n.meta.get(TAIL) == 0]
    for node in late:
        output.prepend(node)
    with pytest.raises(VerificationError, match="left pending"):
        verify_nothing_stale(graphs.main)


def test_a_collective_that_is_neither_waited_nor_handed_on_is_an_error() -> None:
    graphs = overlapped(captured_layers()[0])[0]
    setup = graphs.setup
    assert setup is not None
    handed = [e for e in setup.signature.outputs if e.role is OutputRole.PENDING]
    assert len(handed) >= 3
    output = next(iter(reversed(setup.graph_module.graph.nodes)))
    values: Any = output.args[0]
    start = next(v for v in values if starts_collective(v))
    from lightning_spmd.ir.verify import verify_sharded

    with setup.graph_module.graph.inserting_before(output):
        reader = setup.graph_module.graph.call_function(torch.ops.aten.neg.default, (start,))
    reader.meta.update(val=start.meta["val"], info=start.meta["info"])
    with pytest.raises(VerificationError, match="waited for exactly once, or handed on"):
        verify_sharded(setup)


# ---------------------------------------------------------------- order
def _orders(seconds: Callable[[fx.Node], float]) -> tuple[list[int], list[int]]:
    """(readiness, order of starting) of the deferred buckets of ``layers``, as indices of the layers' need."""
    step = programs(captured_layers()[0])[0]
    graph = step.graph_module.graph
    dependences, touches = Dependences(graph), Touches(step)
    found = tails(dependences)
    deferred = deferrable(step).deferred
    times = {n.name: seconds(n) for n in graph.nodes if n.op == "call_function"}
    ready = schedule(dependences, found, deferred, touches, {}).queue
    timed = schedule(dependences, found, deferred, touches, times).queue
    return [ready.index(s) for s in ready], [ready.index(s) for s in timed]


def test_a_fast_network_serves_buckets_as_they_become_ready() -> None:
    ready, timed = _orders(lambda n: 0.0 if starts_collective(n) else 1.0)
    assert timed == ready


def test_a_slow_network_serves_what_is_needed_first() -> None:
    """While the first bucket (with the loss) is under way all others become ready; the last of them is needed first."""
    ready, timed = _orders(lambda n: 1000.0 if starts_collective(n) else 1.0)
    assert timed == [ready[0], *reversed(ready[1:])]


def _automatic(collective: float) -> IterationGraphs:
    step = programs(captured_layers()[0])[0]
    nodes = [n for n in step.graph_module.graph.nodes if n.op == "call_function"]
    seconds = {n.name: collective if starts_collective(n) else 0.001 for n in nodes}
    return make_phases(step, overlap="auto", seconds=seconds)


def test_auto_moves_work_where_the_network_is_slow_and_says_what_it_expects() -> None:
    graphs = _automatic(0.02)
    assert graphs.cleanup is not None
    assert "ms instead of" in graphs.notes


def test_auto_moves_nothing_where_the_network_is_fast() -> None:
    graphs = _automatic(0.0001)
    assert graphs.cleanup is None
    assert "the network is fast enough" in graphs.notes


@pytest.mark.parametrize(("really", "taken"), [(1.2, 1.2), (0.8, 1.0), (3.0, MOST_SLOWED)])
def test_collectives_are_as_slow_as_a_whole_iteration_shows(really: float, taken: float) -> None:
    step = programs(captured_layers()[0])[0]
    dependences, touches = Dependences(step.graph_module.graph), Touches(step)
    plain = schedule(dependences, tails(dependences), (), touches, {})
    seconds = {n.name: 1.0 for n in step.graph_module.graph.nodes if n.op == "call_function"}
    starts = {n.name for n in plain.queue}
    seconds |= dict.fromkeys(starts, 100.0)
    whole = predicted_seconds(plain, seconds | dict.fromkeys(starts, 100.0 * really))
    found = slowed(seconds, plain, whole)
    assert {name: found[name] for name in starts} == pytest.approx(dict.fromkeys(starts, 100.0 * taken), rel=0.01)
    assert all(found[name] == 1.0 for name in seconds.keys() - starts)


def test_deferred_work_waits_for_collectives_of_its_own_iteration() -> None:
    """One of its two collectives starts again, behind others, before the deferred update of the first weight runs."""

    def body(writer: Any, first: fx.Node, middle: fx.Node, last: fx.Node, x: fx.Node) -> Any:
        rows = writer.reduce(x)
        hidden = x
        for weight in (first, middle, last):
            hidden = writer.call(torch.ops.aten.mm.default, hidden, weight)
        gradients = [writer.reduce(writer.call(torch.ops.aten.mul.Tensor, hidden, n)) for n in (1.0, 2.0, 3.0)]
        writer.update(first, writer.call(torch.ops.aten.mul.Tensor, rows, gradients[0]))
        writer.update(middle, gradients[1])
        writer.update(last, gradients[2])
        return [(hidden, REPLICATE)]

    inputs = [(torch.zeros(4, 4), REPLICATE, role) for role in (PARAMETER, PARAMETER, PARAMETER, BATCH)]
    step = write(body, inputs)[0]
    dependences, touches = Dependences(step.graph_module.graph), Touches(step)
    seconds = {n.name: 1.0 for n in step.graph_module.graph.nodes if n.target is torch.ops.aten.mm.default}
    *_, long = filter(starts_collective, step.graph_module.graph.nodes)
    seconds[long.name] = 1.5
    chosen = schedule(dependences, tails(dependences), deferrable(step).deferred, touches, seconds)
    assert len(chosen.deferred) == 3
    assert predicted_seconds(chosen, seconds) == pytest.approx(3.0)  # the long one is over before the third product


def test_what_may_be_written_into_before_the_next_iteration_is_copied() -> None:
    """A deferred update reads the batch itself, which is another one by the time that it runs."""

    def body(writer: Any, weight: fx.Node, x: fx.Node) -> Any:
        loss = writer.call(torch.ops.aten.sum.default, x)
        total = writer.reduce(writer.call(torch.ops.aten.mm.default, x, x))
        writer.info = NodeInfo(Section.OPTIMIZER)
        writer.update(weight, writer.call(torch.ops.aten.mul.Tensor, total, x))
        return [(loss, REPLICATE)]

    live = [torch.zeros(4, 4), torch.randn(4, 4)]
    inputs = [(live[0], REPLICATE, InputRole.PARAMETER), (live[1], REPLICATE, InputRole.BATCH)]
    plain, phases = write(body, inputs), [make_phases(step, overlap=True) for step in write(body, inputs)]
    reference, ours = Ranks(plain[0], live), Ranks(plain[0], live)
    reference.run(plain)
    ours.run([p.setup for p in phases if p.setup is not None])
    for state in ours.state:
        state[InputRole.BATCH, ("input 1",)].zero_()
    ours.run([p.cleanup for p in phases if p.cleanup is not None])
    key = (InputRole.PARAMETER, ("input 0",))
    assert_same([state[key] for state in reference.state], [state[key] for state in ours.state])
