"""A graph begins while the ranks still vote; where they do something else, it has never begun."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_spmd import SPMDStrategy
from lightning_spmd import _private_api as private
from lightning_spmd.ir.node_info import TAIL, NodeInfo, Section
from lightning_spmd.ir.signature import Signature
from lightning_spmd.ir.steps import ShardedStep
from lightning_spmd.stages.runtime.ahead import asking
from lightning_spmd.stages.runtime.executor import Executable
from lightning_spmd.strategy.steps.iteration import TrainingIteration
from lightning_spmd.strategy.steps.meeting import Done
from lightning_spmd.strategy.steps.own_batches import BatchMode
from tests.helpers.ranks import RankPool
from tests.helpers.training import Result, assert_bitwise
from tests.strategy.small import Net, rows, run

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
SIZES = [(4, 4)] * 6 + [(4, 3), (4, 4), (4, 3), (3, 4), (4, 3)] + [(4, 3)] * 3 + [(4, 4)] * 2
"""Rows of the two ranks' batches, step by step."""


class Uneven(IterableDataset):  # type: ignore[type-arg]
    def __init__(self, sizes: Sequence[tuple[int, int]]) -> None:
        self.sizes = sizes

    def __iter__(self) -> Iterator[Any]:
        for sizes in self.sizes:
            samples = rows(sizes[torch.distributed.get_rank()])
            yield torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])


class Normed(Net):
    """Its forward pass draws numbers and changes buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.dropout(self.norm(self.first(x))))


class Deep(Net):
    """Its gradients are in several buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Sequential(*(nn.Linear(10, 10) for _ in range(3)), self.dropout)


class ReadsAlone(Deep):
    """One rank reads the loss of some steps by itself; the other has begun its graph by then."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.global_rank == 0 and batch_idx % 4 == 3:
            loss.item()
        return loss


class Hooks(L.Callback):
    """Hooks between the backward pass and the update: iterations pause for them."""

    def on_after_backward(self, *_: Any) -> None:
        """Nothing."""


@dataclass
class Trained:
    """What came of a training.

    Args:
        result: its numbers.
        taken: for each step, whether it ran ahead.
        took_over: for each step, whether something of the one before it was left to do.
        runs: that the random streams counted.
        abandoned: steps that had begun.
    """

    result: Result
    taken: list[bool]
    took_over: list[bool]
    runs: int
    abandoned: int


def trained(
    make: type[Net],
    batch: BatchMode,
    overlap: bool | str = "auto",
    callbacks: Sequence[type[L.Callback]] = (),
    sizes: Sequence[tuple[int, int]] = SIZES,
    *,
    ahead: bool,
) -> Trained:
    """Train on batches of these sizes, with steps that run ahead or without."""
    taken, took_over, abandoned, begun = list[bool](), list[bool](), list[bool](), list[bool]()
    plain, asks = TrainingIteration._run_ahead, Executable._ask

    def asked(self: Executable, done: bool) -> None:
        if self._question is not None:
            begun.append(done)
        asks(self, done)

    def watched(self: TrainingIteration, *args: Any) -> Any:
        took_over.append(self._pending is not None)
        begun.clear()
        taken.append((found := plain(self, *args) if ahead else None) is not None)
        abandoned.append(bool(begun) and found is None)
        watched.streams = self.context.streams  # type: ignore[attr-defined]
        return found

    TrainingIteration._run_ahead, Executable._ask = watched, asked  # type: ignore[method-assign]
    try:
        result = run(
            make,
            SPMDStrategy(batch=batch, overlap_iterations=overlap, bucket_size_mb=0.0005),
            2,
            data=lambda: DataLoader(Uneven(sizes), batch_size=None),
            max_epochs=1,
            callbacks=lambda: [kind() for kind in callbacks],
        )
        return Trained(result, taken, took_over, watched.streams.tick, sum(abandoned))  # type: ignore[attr-defined]
    finally:
        TrainingIteration._run_ahead, Executable._ask = plain, asks  # type: ignore[method-assign]


@pytest.mark.parametrize("batch", ["auto", "local"])
@pytest.mark.parametrize("make", [Net, Normed])
def test_steps_that_were_outvoted_leave_no_trace(two_ranks: RankPool, make: type[Net], batch: BatchMode) -> None:
    with_, without = (two_ranks.run(trained, make, batch, ahead=ahead) for ahead in (True, False))
    for ours, plain in zip(with_, without, strict=True):
        assert_bitwise(ours.result, plain.result)
        assert ours.runs == plain.runs == len(SIZES)
        assert 4 <= sum(ours.taken) < len(SIZES)
    outvoted = [sizes for sizes, a, b in zip(SIZES, with_[0].taken, with_[1].taken, strict=True) if a != b]
    assert not outvoted or batch == "local", "both ranks run a step, or neither does"


@pytest.mark.parametrize("make", [Deep, ReadsAlone])
@pytest.mark.parametrize("callbacks", [(), (Hooks,)], ids=["", "hooks"])
def test_steps_run_ahead_with_what_the_one_before_left(
    two_ranks: RankPool, make: type[Net], callbacks: tuple[type[L.Callback], ...]
) -> None:
    sizes = [(4, 4)] * 10 + [(4, 3)] * 6 + [(4, 4)] * 4
    args = (make, "auto", True, callbacks, sizes)
    with_, without = (two_ranks.run(trained, *args, ahead=ahead) for ahead in (True, False))
    for ours, plain in zip(with_, without, strict=True):
        assert_bitwise(ours.result, plain.result)
        assert ours.runs == plain.runs
        both = [ahead for ahead, took_over in zip(ours.taken, ours.took_over, strict=True) if took_over]
        assert sum(both) >= 4, both
        assert ours.abandoned >= (2 if make is ReadsAlone and ours is with_[1] else 0)


class Ended(RuntimeError):
    """A step ends in the middle."""


def ended_in_a_step(when: str) -> str | None:
    """Why no checkpoint may be written after a step that took over another's rest and ended then."""
    plain, asks, result = TrainingIteration._run_ahead, Executable._ask, Done.result
    took_over, asked_now, problem = list[bool](), list[bool](), list[str | None]()

    def ahead(self: TrainingIteration, *args: Any) -> Any:
        took_over.append(self._pending is not None)
        found = plain(self, *args)
        asked_now.clear()
        return found

    def answered(self: Done) -> Any:
        if when == "unanswered" and asked_now and took_over[-1]:
            raise Ended
        return result(self)

    def asked(self: Executable, done: bool) -> None:
        asked_now[:] = [True] * (self._question is not None)
        asks(self, done)
        if asked_now and took_over[-1]:
            raise Ended

    class Asks(L.Callback):
        def on_exception(self, trainer: L.Trainer, pl_module: Any, exception: BaseException) -> None:
            problem.append(trainer.strategy._training.iteration.context.whole.problem(trainer))  # type: ignore[attr-defined]

    TrainingIteration._run_ahead, Executable._ask, Done.result = ahead, asked, answered  # type: ignore[method-assign]
    try:
        strategy = SPMDStrategy(overlap_iterations=True, bucket_size_mb=0.0005)
        run(Deep, strategy, 2, callbacks=lambda: [Asks()], max_epochs=3)
    except Ended:
        return problem[0]
    finally:
        TrainingIteration._run_ahead, Executable._ask, Done.result = plain, asks, result  # type: ignore[method-assign]
    raise AssertionError("no step ran ahead")


@pytest.mark.parametrize(("when", "broken"), [("unanswered", False), ("answered", True)])
def test_weights_are_whole_until_the_question_is_answered(two_ranks: RankPool, when: str, broken: bool) -> None:
    for problem in two_ranks.run(ended_in_a_step, when):
        assert (problem is not None) == broken, problem


# ---------------------------------------------------------------------- where a graph asks
def graph_of(build: Any) -> tuple[fx.Graph, list[str]]:
    """A graph, and what it calls once it asks."""
    graph = fx.Graph()
    x, state = graph.placeholder("x"), graph.placeholder("state")
    graph.output((build(graph, x, state),))
    for node in graph.nodes:
        node.meta["info"] = NodeInfo(Section.FORWARD)
    step = ShardedStep(private.GraphModule(nn.Module(), graph), Signature((), ()), ())
    asked = asking(step, lambda _done: None)
    return graph, [n.target.__name__ for n in asked.graph_module.graph.nodes if n.op == "call_function"]


def pure(graph: fx.Graph, x: fx.Node, state: fx.Node) -> fx.Node:
    fresh = graph.call_function(aten.mul.Tensor, (x, state))
    return graph.call_function(aten.add_.Tensor, (fresh, 1))


def into_state(graph: fx.Graph, x: fx.Node, state: fx.Node) -> fx.Node:
    made = pure(graph, x, state)
    view = graph.call_function(aten.view.default, (state, [-1]))
    graph.call_function(aten.add_.Tensor, (view, 1))
    return made


def collective(graph: fx.Graph, x: fx.Node, state: fx.Node) -> fx.Node:
    begun = graph.call_function(c10d.all_reduce.default, (pure(graph, x, state), "sum", "0"))
    return graph.call_function(c10d.wait_tensor.default, (begun,))


def of_a_library(graph: fx.Graph, x: fx.Node, state: fx.Node) -> fx.Node:
    return graph.call_function(print, (pure(graph, x, state),))


def tail(graph: fx.Graph, state: fx.Node) -> None:
    """What the iteration before left to do."""
    graph.call_function(aten.sub_.Tensor, (state, 1)).meta[TAIL] = 0


def behind_a_tail(graph: fx.Graph, x: fx.Node, state: fx.Node) -> fx.Node:
    begun = graph.call_function(c10d.all_reduce.default, (pure(graph, x, x), "sum", "0"))
    tail(graph, state)
    made = pure(graph, x, state)
    return graph.call_function(aten.add.Tensor, (graph.call_function(c10d.wait_tensor.default, (begun,)), made))


def a_wait_before_a_tail(graph: fx.Graph, x: fx.Node, state: fx.Node) -> fx.Node:
    made = collective(graph, x, x)
    tail(graph, state)
    return made


def a_write_before_a_tail(graph: fx.Graph, x: fx.Node, state: fx.Node) -> fx.Node:
    sent = pure(graph, x, x)
    graph.call_function(c10d.all_reduce.default, (sent, "sum", "0"))
    graph.call_function(aten.add_.Tensor, (sent, 1))
    tail(graph, state)
    return sent


ASKS = "<lambda>"
EXPECTED = {
    behind_a_tail: [
        *("mul.Tensor", "add_.Tensor", "sub_.Tensor", "mul.Tensor", "add_.Tensor"),
        *(ASKS, "all_reduce.default", "wait_tensor.default", "add.Tensor"),
    ],
    a_wait_before_a_tail: [
        *("mul.Tensor", "add_.Tensor", ASKS, "all_reduce.default", "wait_tensor.default", "sub_.Tensor"),
    ],
    a_write_before_a_tail: [
        *("mul.Tensor", "add_.Tensor", ASKS, "all_reduce.default", "add_.Tensor", "sub_.Tensor"),
    ],
    pure: ["mul.Tensor", "add_.Tensor", ASKS],
    into_state: ["mul.Tensor", "add_.Tensor", "view.default", ASKS, "add_.Tensor"],
    collective: ["mul.Tensor", "add_.Tensor", ASKS, "all_reduce.default", "wait_tensor.default"],
    of_a_library: ["mul.Tensor", "add_.Tensor", ASKS, "print"],
}


@pytest.mark.parametrize("build", EXPECTED)
def test_a_graph_asks_in_front_of_its_first_effect(build: Any) -> None:
    graph, calls = graph_of(build)
    assert calls == EXPECTED[build]
    own = [n for n in graph.nodes if n.op == "call_function"]
    assert len(own) == len(calls) - 1, "the graph itself stays as it is"
