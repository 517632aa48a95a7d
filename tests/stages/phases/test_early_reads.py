"""Which values that Python reads are handed over together, and that all values stay what they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from lightning_spmd.ir.dependence import Dependences
from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.ir.reads import HandOver, hands_over
from lightning_spmd.ir.source import function_of
from lightning_spmd.stages.phases import early_reads
from lightning_spmd.stages.phases.early_reads import gather_reads

aten = torch.ops.aten
X = torch.linspace(-1, 1, 24).view(4, 6)
Graph = Callable[[fx.Graph, fx.Node, list[Any]], Any]


class Seen(fx.Interpreter):
    """Keeps the spec of each value."""

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        n.meta["val"] = TensorSpec.of(value) if isinstance(value, Tensor) else value
        return value


def _graph_of(program: Graph) -> fx.GraphModule:
    graph = fx.Graph()
    reads: list[Any] = []
    result = program(graph, graph.placeholder("x"), reads)
    graph.output((*reads, result))
    module = fx.GraphModule({}, graph)
    Seen(module).run(X.clone())
    return module


def _read(graph: fx.Graph, value: fx.Node, reads: list[Any], sent: tuple[float, ...] = ()) -> fx.Node:
    number = sum(map(hands_over, graph.nodes))
    reads.append(value)
    return graph.call_function(HandOver(number, lambda: sent), (value,))


def _values_of(module: fx.GraphModule, sent: tuple[float, ...] = (2.0,)) -> tuple[list[list[list[Any]]], Any]:
    """What a run hands over, by the times that it waits for Python, and what it returns."""
    run = function_of(module, talks=True)(X.clone())
    found: list[list[list[Any]]] = []
    numbers: Any = None
    while True:
        try:
            handed = run.send(numbers)
        except StopIteration as end:
            return found, end.value
        found.append([[v.tolist() for v in values] for values in handed])
        numbers = sent


def _counts_in_a_loop(graph: fx.Graph, x: fx.Node, reads: list[Any]) -> Any:
    total = x
    for row in range(4):
        mask = graph.call_function(aten.gt.Scalar, (graph.call_function(aten.select.int, (x, 0, row)), 0))
        _read(graph, graph.call_function(aten.count_nonzero.default, (mask,)), reads)
        total = graph.call_function(aten.mul.Tensor, (total, x))
    return total


def _of_what_the_number_makes(graph: fx.Graph, x: fx.Node, reads: list[Any]) -> Any:
    sent = _read(graph, graph.call_function(aten.sum.default, (x,)), reads, (2.0,))
    number = graph.call_function(_first, (sent,))
    scaled = graph.call_function(aten.mul.Tensor, (x, number))
    _read(graph, graph.call_function(aten.sum.default, (scaled,)), reads)
    return scaled


def _first(numbers: Any) -> Any:
    return numbers[0]


def _that_may_fail(graph: fx.Graph, x: fx.Node, reads: list[Any]) -> Any:
    """Python that sees no rows reads no row."""
    _read(graph, graph.call_function(aten.sum.default, (x,)), reads)
    where = graph.call_function(aten.argmax.default, (graph.call_function(aten.select.int, (x, 0, 0)),))
    row = graph.call_function(aten.index_select.default, (x, 1, graph.call_function(aten.view.default, (where, [1]))))
    _read(graph, graph.call_function(aten.sum.default, (row,)), reads)
    return row


def _of_integers_that_are_divided(graph: fx.Graph, x: fx.Node, reads: list[Any]) -> Any:
    whole = graph.call_function(aten.count_nonzero.dim_IntList, (x, [1]))
    _read(graph, graph.call_function(aten.sum.default, (whole,)), reads)
    rest = graph.call_function(aten.remainder.Tensor, (whole, whole))
    _read(graph, graph.call_function(aten.sum.default, (rest,)), reads)
    return rest


def _behind_a_write(graph: fx.Graph, x: fx.Node, reads: list[Any]) -> Any:
    _read(graph, graph.call_function(aten.sum.default, (x,)), reads)
    graph.call_function(aten.mul_.Tensor, (x, 3))
    _read(graph, graph.call_function(aten.sum.default, (x,)), reads)
    return x


def _drawn(graph: fx.Graph, x: fx.Node, reads: list[Any]) -> Any:
    _read(graph, graph.call_function(aten.sum.default, (x,)), reads)
    drawn = graph.call_function(aten.bernoulli.p, (x, 0.5))
    _read(graph, graph.call_function(aten.sum.default, (drawn,)), reads)
    return x


@pytest.mark.parametrize(
    ("program", "together"),
    [
        (_counts_in_a_loop, [4]),
        (_of_what_the_number_makes, [1, 1]),
        (_that_may_fail, [1, 1]),
        (_of_integers_that_are_divided, [1, 1]),
        (_behind_a_write, [1, 1]),
        (_drawn, [1, 1]),
    ],
)
def test_what_is_handed_over_together(program: Graph, together: list[int]) -> None:
    module = _graph_of(program)
    torch.manual_seed(1)
    before, expected = _values_of(module)
    gather_reads(module.graph)
    torch.manual_seed(1)
    after, found = _values_of(module)
    assert [len(handed) for handed in after] == together
    assert [v for handed in after for v in handed] == [v for handed in before for v in handed]
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


def test_what_is_large_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    module = _graph_of(_counts_in_a_loop)
    monkeypatch.setattr(early_reads, "MOST_BYTES", 40)  # a mask and its count have 14
    gather_reads(module.graph)
    assert [len(handed) for handed in _values_of(module)[0]] == [3, 1]


def test_what_a_read_needs_is_looked_for_once_or_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    def many(graph: fx.Graph, x: fx.Node, reads: list[Any]) -> Any:
        for _ in range(10):
            _counts_in_a_loop(graph, x, reads)
            x = graph.call_function(aten.index_select.default, (x, 0, graph.call_function(aten.arange.default, (4,))))
        return x

    asked: list[Any] = []
    origins = Dependences.origins
    monkeypatch.setattr(Dependences, "origins", lambda self, ends: origins(self, asked.append(ends) or ends))
    gather_reads(_graph_of(many).graph)
    assert len(asked) <= 80
