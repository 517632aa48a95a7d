"""Graphs as Python functions: every kind of argument arrives as the graph has it, and nothing is kept too long."""

from __future__ import annotations

import math
import operator
import traceback
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from lightning_spmd import _private_api as private
from lightning_spmd.ir.source import function_of

aten = torch.ops.aten


def program(build: Any, names: tuple[str, ...]) -> Any:
    graph = fx.Graph()
    graph.output(build(graph, *[graph.placeholder(name) for name in names]))
    return function_of(private.GraphModule(nn.Module(), graph))


def seen(*args: Any, **kwargs: Any) -> Any:
    return args, kwargs


ARGUMENTS = [
    (None, True, 3, -2, 0.1, -1e-30, "it's \\ 'quoted'"),
    (math.inf, -math.inf, torch.float64, torch.device("cpu"), torch.contiguous_format),
    ((), (1,), (1, (2, [3, ()])), [], [[-1.5]], {"a": (1,), "b b": [None]}),
    (slice(None), slice(1, -1, 2), slice(None, 3)),
    (torch.Size([2, 3]), Ellipsis, complex(1, -2)),
]


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=range(len(ARGUMENTS)))
def test_arguments_arrive_as_they_are(arguments: tuple[Any, ...]) -> None:
    def build(graph: fx.Graph, x: fx.Node) -> fx.Node:
        return graph.call_function(seen, (x, *arguments), {"more": list(arguments), "other": x})

    args, kwargs = program(build, ("x",))(7)
    assert args == (7, *arguments)
    assert list(map(type, args[1:])) == [type(a) if not isinstance(a, torch.Size) else tuple for a in arguments]
    assert kwargs == {"more": list(arguments), "other": 7}


def test_not_a_number_arrives() -> None:
    args, _ = program(lambda graph, x: graph.call_function(seen, (x, math.nan)), ("x",))(1)
    assert math.isnan(args[1])


def test_a_keyword_of_python_is_an_argument_of_operators() -> None:
    def build(graph: fx.Graph, x: fx.Node) -> fx.Node:
        return graph.call_function(aten.random_.default, (x,), {"generator": None})

    def ranged(graph: fx.Graph, x: fx.Node) -> fx.Node:
        return graph.call_function(seen, (x,), {"from": 1, "to": 2, "class": x})

    assert program(build, ("x",))(torch.zeros(3)).shape == (3,)
    assert program(ranged, ("x",))(5) == ((5,), {"from": 1, "to": 2, "class": 5})


def test_signs_bind_as_functions_do() -> None:
    def build(graph: fx.Graph, a: fx.Node, b: fx.Node) -> tuple[fx.Node, ...]:
        negative = graph.call_function(operator.pow, (-2.0, a))
        minus = graph.call_function(operator.neg, (negative,))
        return (
            negative,
            minus,
            graph.call_function(operator.sub, (a, -1)),
            graph.call_function(operator.truediv, (graph.call_function(operator.add, (a, b)), b)),
            graph.call_function(operator.getitem, ((10, 20), 1)),
        )

    assert program(build, ("a", "b"))(2, 4) == (4.0, -4.0, 3, 1.5, 20)


def test_names_of_inputs_that_are_names_of_functions() -> None:
    def build(graph: fx.Graph, one: fx.Node, two: fx.Node) -> fx.Node:
        return graph.call_function(seen, (graph.call_function(aten.mul.Tensor, (one, two)), math.inf))

    args, _ = program(build, ("aten_mul_Tensor", "constant"))(torch.tensor(2.0), torch.tensor(3.0))
    assert args == (torch.tensor(6.0), math.inf)


def test_values_end_with_their_last_reader() -> None:
    alive: list[bool] = []
    kept: list[Any] = []

    def watch(x: Tensor) -> Tensor:
        kept.append(weakref.ref(x))
        return x.sum()

    def look(x: Tensor) -> Tensor:
        alive.append(kept[0]() is not None)
        return x

    def build(graph: fx.Graph, x: fx.Node) -> fx.Node:
        graph.call_function(look, (graph.call_function(watch, (graph.call_function(aten.neg.default, (x,)),)),))
        return x

    program(build, ("x",))(torch.ones(3))
    assert alive == [False]


def test_a_traceback_shows_the_line() -> None:
    def build(graph: fx.Graph, x: fx.Node) -> fx.Node:
        return graph.call_function(aten.mm.default, (x, x))

    with pytest.raises(RuntimeError) as raised:
        program(build, ("matrix",))(torch.ones(2, 3))
    assert "aten_mm_default(matrix, matrix)" in "".join(traceback.format_tb(raised.value.__traceback__))


def test_modules_are_refused() -> None:
    graph = fx.Graph()
    graph.output(graph.call_module("layer", (graph.placeholder("x"),)))
    holder = nn.Module()
    holder.layer = nn.Identity()
    with pytest.raises(ValueError, match="call_module"):
        function_of(fx.GraphModule(holder, graph))
