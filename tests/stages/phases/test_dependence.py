"""What must come before what."""

from __future__ import annotations

import operator

import torch
from torch import fx

from lightning_spmd.ir.dependence import Dependences

aten = torch.ops.aten


def test_pieces_of_one_split_are_independent_and_those_of_two_splits_are_not() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    first = graph.call_function(aten.split_with_sizes.default, (x, [2, 2]))
    a, b = (graph.call_function(operator.getitem, (first, i)) for i in range(2))
    second = graph.call_function(aten.split_with_sizes.default, (x, [1, 3]))
    c = graph.call_function(operator.getitem, (second, 1))
    write = graph.call_function(aten.neg_.default, (a,))
    same = graph.call_function(aten.sin.default, (b,))
    across = graph.call_function(aten.sin.default, (c,))
    graph.output((same, across))
    before = Dependences(graph).before
    assert write not in before[same]
    assert write in before[across]


def test_a_write_stays_behind_earlier_readers_and_in_front_of_later_ones() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    early = graph.call_function(aten.sin.default, (x,))
    view = graph.call_function(aten.t.default, (x,))
    write = graph.call_function(aten.neg_.default, (view,))
    late = graph.call_function(aten.cos.default, (x,))
    graph.output((early, late))
    table = Dependences(graph)
    assert early in table.before[write]
    assert write in table.before[late]
    assert late in table.closure([write])
    assert early not in table.closure([write])


def test_random_draws_stay_in_order() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    one = graph.call_function(aten.bernoulli.default, (x,))
    other = graph.call_function(aten.rand_like.default, (x,))
    graph.output((one, other))
    assert one in Dependences(graph).before[other]


def test_what_a_collective_reads_is_written_after_its_wait() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    start = graph.call_function(torch.ops._c10d_functional.all_gather_into_tensor.default, (x, 2, ""))
    wait = graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (start,))
    copied = graph.call_function(torch.ops._c10d_functional.all_reduce.default, (x, "sum", ""))
    reduced = graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (copied,))
    write = graph.call_function(aten.neg_.default, (x,))
    graph.output((wait, reduced, write))
    before = Dependences(graph).before[write]
    assert wait in before
    assert reduced not in before  # an all-reduce works in a copy
