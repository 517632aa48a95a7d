"""A clock between the lines of a graph's function: what it computes stays the same, and each line has its time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn

from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.ir.signature import Signature
from lightning_spmd.ir.steps import ShardedStep
from lightning_spmd.stages.runtime.lowering import as_python
from lightning_spmd.stages.runtime.stopwatch import Stopwatch
from lightning_spmd.stages.runtime.trial_runs.profile import HostClock
from lightning_spmd.stages.runtime.waiting import WaitMeter

aten = torch.ops.aten


def _step() -> ShardedStep:
    """``sin(x) * 3`` into ``x``, and its sum."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    product = graph.call_function(aten.mul.Tensor, (graph.call_function(aten.sin.default, (x,)), 3.0))
    graph.call_function(aten.copy_.default, (x, product))
    graph.output((graph.call_function(aten.sum.default, (x,)),))
    for node in graph.nodes:
        node.meta["val"] = TensorSpec((5,), (1,), torch.float32, torch.device("cpu"))
    return ShardedStep(fx.GraphModule(nn.Module(), graph), Signature((), ()), ())


def _timed(watch: Stopwatch) -> Any:
    meter = WaitMeter()
    meter.stopwatch = watch
    return meter.timing(as_python, "whole")(_step())


def test_what_a_graph_gives_and_writes_is_bitwise_the_same() -> None:
    torch.manual_seed(0)
    values = torch.randn(5)
    one, other = values.clone(), values.clone()
    (plain,), (timed,) = as_python(_step())(one), _timed(Stopwatch())(other)
    assert torch.equal(plain, timed)
    assert torch.equal(one, other)
    assert not torch.equal(one, values)


def test_each_line_has_the_median_of_its_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock whose n-th look is n squared: the lines of a run take 1, 3, 5, 7 more than the run's begin does."""
    watch, ticks = Stopwatch(), itertools.count()
    monkeypatch.setattr(HostClock, "mark", lambda _: float(next(ticks) ** 2))
    step = _timed(watch)
    step(torch.ones(5))
    watch.begin()
    for _ in range(3):  # looks 5 to 9, 10 to 14, 15 to 19
        step(torch.ones(5))
    (found,) = watch.results()
    assert (found.name, found.runs) == ("whole", 3)
    assert dict(found.seconds) == {
        "sin_default": 21.0, "mul_tensor": 23.0, "copy__default": 25.0, "sum_default": 27.0,
    }  # fmt: skip
    assert (found.computing, found.waiting, found.after) == (96.0, 0.0, (19 + 29) / 2)
    assert not found.alone


def test_a_run_that_was_abandoned_does_not_count() -> None:
    watch = Stopwatch()
    step = _timed(watch)
    with pytest.raises(AttributeError, match="sin"):
        step(None)
    step(torch.ones(5))
    assert watch.results() == [], "and one run is too few"
    step(torch.ones(5))
    assert watch.results()[0].runs == 2


def test_a_collective_alone_has_the_sizes_of_the_last_run(group: str) -> None:
    """Values decide how many rows experts exchange: the graph knows neither the sizes nor the tensor's shape."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    sizes = graph.call_function(_rows, (x,))
    functional = torch.ops._c10d_functional
    sent = graph.call_function(functional.all_to_all_single.default, (x, sizes, sizes, group))
    graph.output((graph.call_function(functional.wait_tensor.default, (sent,)),))
    for node in graph.nodes:
        node.meta["val"] = TensorSpec((5,), (1,), torch.float32, torch.device("cpu"))
    sizes.meta["val"] = [5]
    watch, meter = Stopwatch(), WaitMeter()
    meter.stopwatch = watch
    step = meter.timing(as_python, "whole")(ShardedStep(fx.GraphModule(nn.Module(), graph), Signature((), ()), ()))
    for rows in (5, 3, 2):
        (found,) = step(torch.ones(rows))
        assert found.tolist() == [1.0] * rows
    assert list(watch.results()[0].alone) == ["all_to_all_single_default"]


def _rows(x: torch.Tensor) -> list[int]:
    return [len(x)]


@pytest.fixture
def group() -> Iterator[str]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # pyright: ignore
    yield dist.group.WORLD.group_name  # pyright: ignore[reportOptionalMemberAccess]
    dist.destroy_process_group()


def test_nobody_asked_and_the_graph_is_the_one_there_was() -> None:
    assert WaitMeter().timing(as_python, "whole") is as_python
