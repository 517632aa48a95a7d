"""A graph begins while the ranks still vote; where they do something else, it has never begun."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_spmd import SPMDStrategy
from lightning_spmd import _private_api as private
from lightning_spmd.ir.node_info import NodeInfo, Section
from lightning_spmd.ir.signature import Signature
from lightning_spmd.ir.steps import ShardedStep
from lightning_spmd.stages.runtime.ahead import asking
from lightning_spmd.strategy.steps.iteration import TrainingIteration
from lightning_spmd.strategy.steps.own_batches import BatchMode
from tests.helpers.ranks import RankPool
from tests.helpers.training import Result, assert_bitwise
from tests.strategy.small import Net, rows, run

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
SIZES = [(4, 4)] * 6 + [(4, 3), (4, 4), (4, 3), (3, 4), (4, 3)] + [(4, 3)] * 3 + [(4, 4)] * 2
"""Rows of the two ranks' batches, step by step."""


class Uneven(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[Any]:
        for sizes in SIZES:
            samples = rows(sizes[torch.distributed.get_rank()])
            yield torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])


class Normed(Net):
    """Its forward pass draws numbers and changes buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.dropout(self.norm(self.first(x))))


def trained(make: type[Net], batch: BatchMode, *, ahead: bool) -> tuple[Result, list[bool], int]:
    """What came of it, whether each step ran ahead, and how many runs the random streams counted."""
    taken: list[bool] = []
    plain = TrainingIteration._run_ahead

    def watched(self: TrainingIteration, *args: Any) -> Any:
        taken.append((found := plain(self, *args) if ahead else None) is not None)
        watched.streams = self.context.streams  # type: ignore[attr-defined]
        return found

    TrainingIteration._run_ahead = watched  # type: ignore[method-assign]
    try:
        data = lambda: DataLoader(Uneven(), batch_size=None)  # noqa: E731
        result = run(make, SPMDStrategy(batch=batch), 2, data=data, max_epochs=1)
        return result, taken, watched.streams.tick  # type: ignore[attr-defined]
    finally:
        TrainingIteration._run_ahead = plain  # type: ignore[method-assign]


@pytest.mark.parametrize("batch", ["auto", "local"])
@pytest.mark.parametrize("make", [Net, Normed])
def test_steps_that_were_outvoted_leave_no_trace(two_ranks: RankPool, make: type[Net], batch: BatchMode) -> None:
    with_, without = (two_ranks.run(trained, make, batch, ahead=ahead) for ahead in (True, False))
    for (ours, taken, ticks), (plain, _, expected) in zip(with_, without, strict=True):
        assert_bitwise(ours, plain)
        assert ticks == expected == len(SIZES)
        assert 4 <= sum(taken) < len(SIZES)
    outvoted = [sizes for sizes, one, other in zip(SIZES, with_[0][1], with_[1][1], strict=True) if one != other]
    assert not outvoted or batch == "local", "both ranks run a step, or neither does"


# ---------------------------------------------------------------------- where a graph asks
def graph_of(build: Any) -> tuple[fx.Graph, list[str]]:
    """A graph, and what it calls once it asks."""
    graph = fx.Graph()
    x, state = graph.placeholder("x"), graph.placeholder("state")
    graph.output((build(graph, x, state),))
    for node in graph.nodes:
        node.meta["info"] = NodeInfo(Section.FORWARD)
    step = ShardedStep(private.GraphModule(nn.Module(), graph), Signature((), ()), ())
    asked = asking(step, lambda: None)
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


EXPECTED = {
    pure: ["mul.Tensor", "add_.Tensor", "<lambda>"],
    into_state: ["mul.Tensor", "add_.Tensor", "view.default", "<lambda>", "add_.Tensor"],
    collective: ["mul.Tensor", "add_.Tensor", "<lambda>", "all_reduce.default", "wait_tensor.default"],
    of_a_library: ["mul.Tensor", "add_.Tensor", "<lambda>", "print"],
}


@pytest.mark.parametrize("build", EXPECTED)
def test_a_graph_asks_in_front_of_its_first_effect(build: Any) -> None:
    graph, calls = graph_of(build)
    assert calls == EXPECTED[build]
    own = [n for n in graph.nodes if n.op == "call_function"]
    assert len(own) == len(calls) - 1, "the graph itself stays as it is"
