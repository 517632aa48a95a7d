"""Which results take the memory of an operand, and that all values stay what they were."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from lightning_spmd.ir.in_place import ALONE, in_place, written_by
from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.ir.source import function_of
from lightning_spmd.stages.runtime.trial_runs.first_run import LayoutCheck

aten = torch.ops.aten


class Seen(fx.Interpreter):
    """Keeps the spec of each value."""

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        n.meta["val"] = TensorSpec.of(value) if isinstance(value, Tensor) else value
        return value


def graph_of(program: Callable[[fx.Graph, list[fx.Node]], Any], inputs: Sequence[Tensor]) -> fx.GraphModule:
    """A graph after its first run.

    Args:
        program: adds the nodes for these inputs, and gives what the graph returns.
        inputs: their values.
    """
    graph = fx.Graph()
    graph.output(program(graph, [graph.placeholder(f"x{i}") for i in range(len(inputs))]))
    module = fx.GraphModule({}, graph)
    Seen(module).run(*(x.clone() for x in inputs))
    check = LayoutCheck(module)
    check.run(*(x.clone() for x in inputs))
    for node in graph.nodes:
        node.meta.update(check.seen.get(node.name, {}))
    return module


X, Y = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)), torch.linspace(-1, 1, 24).view(4, 6)


def _sum_of_dying(graph: fx.Graph, x: list[fx.Node]) -> Any:
    product = graph.call_function(aten.mul.Tensor, (x[0], x[1]))
    return graph.call_function(aten.add.Tensor, (product, x[0]))


def _rows_into_zeros(graph: fx.Graph, x: list[fx.Node]) -> Any:
    zeros = graph.call_function(aten.new_zeros.default, (x[0], [4, 6]))
    rows = graph.call_function(aten.index.Tensor, (x[1], [x[2]]))
    return graph.call_function(aten.index_put.default, (zeros, [x[2]], rows, True))


def _through_a_view(graph: fx.Graph, x: list[fx.Node]) -> Any:
    product = graph.call_function(aten.mul.Tensor, (x[0], x[1]))
    flat = graph.call_function(aten.view.default, (product, [24]))
    return graph.call_function(aten.neg.default, (flat,))


def _the_other_operand(graph: fx.Graph, x: list[fx.Node]) -> Any:
    return graph.call_function(aten.add.Tensor, (x[0], graph.call_function(aten.mul.Tensor, (x[0], x[1]))))


def _the_other_operand_does_not_commute(graph: fx.Graph, x: list[fx.Node]) -> Any:
    return graph.call_function(aten.sub.Tensor, (x[0], graph.call_function(aten.mul.Tensor, (x[0], x[1]))))


def _scaled(graph: fx.Graph, x: list[fx.Node]) -> Any:
    return graph.call_function(aten.add.Tensor, (x[0], graph.call_function(aten.neg.default, (x[1],))), {"alpha": 2})


def _of_fewer_dimensions(graph: fx.Graph, x: list[fx.Node]) -> Any:
    total = graph.call_function(aten.sum.default, (x[0],))
    return graph.call_function(aten.add.Tensor, (total, x[1]))


def _read_later(graph: fx.Graph, x: list[fx.Node]) -> Any:
    product = graph.call_function(aten.mul.Tensor, (x[0], x[1]))
    total = graph.call_function(aten.add.Tensor, (product, x[0]))
    return total, graph.call_function(aten.sum.default, (product,))


def _returned(graph: fx.Graph, x: list[fx.Node]) -> Any:
    product = graph.call_function(aten.mul.Tensor, (x[0], x[1]))
    return graph.call_function(aten.add.Tensor, (product, x[0])), product


def _a_view_is_read_later(graph: fx.Graph, x: list[fx.Node]) -> Any:
    product = graph.call_function(aten.mul.Tensor, (x[0], x[1]))
    row = graph.call_function(aten.select.int, (product, 0, 1))
    return graph.call_function(aten.add.Tensor, (product, x[0])), graph.call_function(aten.sum.default, (row,))


def _a_view_is_the_other_operand(graph: fx.Graph, x: list[fx.Node]) -> Any:
    product = graph.call_function(aten.mul.Tensor, (x[0], x[1]))
    flipped = graph.call_function(aten.select.int, (product, 0, 0))
    return graph.call_function(aten.add.Tensor, (product, flipped))


def _of_the_input(graph: fx.Graph, x: list[fx.Node]) -> Any:
    return graph.call_function(aten.add.Tensor, (x[0], x[1]))


def _of_a_view_of_the_input(graph: fx.Graph, x: list[fx.Node]) -> Any:
    return graph.call_function(aten.neg.default, (graph.call_function(aten.view.default, (x[0], [24])),))


def _of_another_size(graph: fx.Graph, x: list[fx.Node]) -> Any:
    row = graph.call_function(aten.sum.dim_IntList, (x[0], [0]))
    return graph.call_function(aten.add.Tensor, (row, x[1]))


def _of_another_dtype(graph: fx.Graph, x: list[fx.Node]) -> Any:
    larger = graph.call_function(aten.gt.Tensor, (x[0], x[1]))
    return graph.call_function(aten.mul.Tensor, (larger, x[0]))


def _of_another_order(graph: fx.Graph, x: list[fx.Node]) -> Any:
    product = graph.call_function(aten.mul.Tensor, (x[0], x[1]))
    turned = graph.call_function(aten.t.default, (product,))
    square = graph.call_function(aten.mm.default, (x[0], turned))
    return graph.call_function(aten.add.Tensor, (square, square))


def _of_a_part(graph: fx.Graph, x: list[fx.Node]) -> Any:
    product = graph.call_function(aten.mul.Tensor, (x[0], x[1]))
    part = graph.call_function(aten.slice.Tensor, (product, 0, 0, 2))
    return graph.call_function(aten.neg.default, (part,))


def _expanded(graph: fx.Graph, x: list[fx.Node]) -> Any:
    total = graph.call_function(aten.sum.default, (x[0],))
    return graph.call_function(aten.neg.default, (graph.call_function(aten.expand.default, (total, [4, 6])),))


def _zeros_without_memory(graph: fx.Graph, x: list[fx.Node]) -> Any:
    zeros = graph.call_function(aten._efficientzerotensor.default, ([4, 6],))
    return graph.call_function(aten.add.Tensor, (zeros, graph.call_function(aten.neg.default, (x[0],))))


@pytest.mark.parametrize(
    ("program", "found"),
    [
        (_sum_of_dying, [aten.add_.Tensor]),
        (_rows_into_zeros, [aten.index_put_.default]),
        (_through_a_view, [aten.neg_.default]),
        (_the_other_operand, [aten.add_.Tensor]),
        (_the_other_operand_does_not_commute, []),
        (_scaled, []),
        (_read_later, []),
        (_returned, []),
        (_a_view_is_read_later, []),
        (_a_view_is_the_other_operand, []),
        (_of_the_input, []),
        (_of_a_view_of_the_input, []),
        (_of_another_size, []),
        (_of_fewer_dimensions, []),
        (_of_another_dtype, []),
        (_of_another_order, []),
        (_of_a_part, []),
        (_expanded, []),
        (_zeros_without_memory, [aten.add_.Tensor]),
    ],
)
def test_who_writes_into_an_operand(program: Any, found: list[Any]) -> None:
    inputs = [X, Y, torch.tensor([2, 0, 2])]
    module = graph_of(program, inputs)
    assert [target for target, _ in in_place(module.graph).values()] == found
    _assert_the_same(module, inputs)


def test_memory_that_something_else_has_too_stays() -> None:
    module = graph_of(_sum_of_dying, [X, Y])
    for node in module.graph.nodes:
        node.meta.pop(ALONE, None)  # as of a kernel that gave its operand
    assert not in_place(module.graph)


def test_what_a_function_of_python_has_read_stays() -> None:
    def reads(value: Tensor) -> Tensor:
        return value

    def program(graph: fx.Graph, x: list[fx.Node]) -> Any:
        product = graph.call_function(aten.mul.Tensor, (x[0], x[1]))
        graph.call_function(reads, (product,))
        return graph.call_function(aten.add.Tensor, (product, x[0]))

    assert not in_place(graph_of(program, [X, Y]).graph)


_TABLES: list[Tensor] = []


@torch.library.custom_op("test_in_place::table", mutates_args=())
def _table(x: Tensor) -> Tensor:
    """Keeps what it gives: the same tensor, so that its memory has one holder."""
    _TABLES[:] = _TABLES or [torch.full_like(x, 0.3)]
    return _TABLES[0]


@torch.library.custom_op("test_in_place::two_tables", mutates_args=())
def _two_tables(x: Tensor) -> tuple[Tensor, Tensor]:
    _TABLES[:] = _TABLES or [torch.full_like(x, 0.3)]
    return _TABLES[0], x + 1


@pytest.mark.parametrize("has_two", [False, True])
def test_what_an_operator_of_others_may_keep_stays(*, has_two: bool) -> None:
    def program(graph: fx.Graph, x: list[fx.Node]) -> Any:
        made = graph.call_function(
            getattr(torch.ops.test_in_place, "two_tables" if has_two else "table").default, (x[0],)
        )
        if has_two:
            made = graph.call_function(operator.getitem, (made, 0))
        return graph.call_function(aten.mul.Tensor, (made, x[1]))

    _TABLES.clear()
    module = graph_of(program, [X, Y])
    assert not in_place(module.graph)
    _assert_the_same(module, [X, Y])
    assert torch.equal(_TABLES[0], torch.full_like(X, 0.3))


def test_products_of_complex_numbers_keep_their_order() -> None:
    x, y = torch.complex(X, Y), torch.complex(Y, X)
    module = graph_of(_product_with_dying, [x, y])
    assert not in_place(module.graph)
    _assert_the_same(module, [x, y])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_that_torch_rounds_otherwise_in_place_have_memory_of_their_own(dtype: torch.dtype) -> None:
    def program(graph: fx.Graph, x: list[fx.Node]) -> Any:
        dying = graph.call_function(aten.neg.default, (x[0],))
        scaled = graph.call_function(aten.mul.Scalar, (dying, 0.3))
        return graph.call_function(aten.mul.Tensor, (x[1], graph.call_function(aten.neg.default, (scaled,))))

    for values in (torch.randn(64, generator=torch.Generator().manual_seed(0)), torch.zeros(64)):  # zeros show nothing
        inputs = [values.to(dtype), torch.tensor(12.0) ** -0.5]
        module = graph_of(program, inputs)
        assert [target for target, _ in in_place(module.graph).values()] == [aten.neg_.default]
        _assert_the_same(module, inputs)


def _product_with_dying(graph: fx.Graph, x: list[fx.Node]) -> Any:
    return graph.call_function(aten.mul.Tensor, (x[0], graph.call_function(aten.sub.Tensor, (x[0], x[1]))))


@pytest.mark.parametrize(
    ("target", "found"),
    [
        (aten.add.Tensor, aten.add_.Tensor),
        (aten.masked_fill.Scalar, aten.masked_fill_.Scalar),
        (aten.mm.default, None),
        (aten.view.default, None),
        (aten.squeeze.dim, None),
        (aten.add_.Tensor, None),
        (aten.native_dropout.default, None),
    ],
)
def test_the_operator_that_writes(target: Any, found: Any) -> None:
    assert written_by(target) is found


def _assert_the_same(module: fx.GraphModule, inputs: Sequence[Tensor]) -> None:
    before = [x.clone() for x in inputs]
    expected, found = fx.Interpreter(module).run(*inputs), function_of(module)(*inputs)
    expected, found = (each if isinstance(each, tuple) else (each,) for each in (expected, found))
    for one, other in zip((*expected, *before), (*found, *inputs), strict=True):
        assert torch.equal(one, other)
        assert one.stride() == other.stride()


_UNARY = (aten.neg.default, aten.sigmoid.default, aten.t.default, aten.clone.default, aten.abs.default)
_BINARY = (aten.add.Tensor, aten.mul.Tensor, aten.sub.Tensor, aten.mm.default, aten.maximum.default)


def _drawn(seed: int) -> Callable[[fx.Graph, list[fx.Node]], Any]:
    """A program of thirty calls, with views that live longer or shorter than what they show."""

    def program(graph: fx.Graph, x: list[fx.Node]) -> Any:
        draw, values = random.Random(seed), list(x)
        for _ in range(30):
            kind = draw.random()
            one, other = draw.choice(values[-5:]), draw.choice(values[-8:])
            if kind < 0.35:
                made = graph.call_function(draw.choice(_UNARY), (one,))
            elif kind < 0.45:
                made = graph.call_function(aten.view.default, (graph.call_function(aten.clone.default, (one,)), [5, 5]))
            elif kind < 0.55:
                made = graph.call_function(aten.add_.Tensor, (graph.call_function(aten.clone.default, (one,)), other))
            else:
                made = graph.call_function(draw.choice(_BINARY), (one, other))
            values.append(made)
        return tuple(draw.sample(values[2:], 4))

    return program


def test_drawn_programs_give_the_same() -> None:
    inputs, written = [torch.randn(5, 5), torch.randn(5, 5)], 0
    for seed in range(60):
        module = graph_of(_drawn(seed), inputs)
        written += len(in_place(module.graph))
        _assert_the_same(module, inputs)
    assert written > 200
