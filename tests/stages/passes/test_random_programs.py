"""Random programs after the passes, with activations made again: the bits of the program as it was captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

from lightning_spmd.parallel.parallel_plan import ShardedStatePlan
from lightning_spmd.stages import BuildOptions, build
from lightning_spmd.stages.passes import PASSES, PassState, run_passes
from lightning_spmd.stages.runtime.agreement.same_graphs import describe
from tests.helpers.simulate import expand_all, run_ranks
from tests.stages.passes.random_programs import captured_program

LONG = pytest.mark.long
ZERO_3 = ShardedStatePlan(parameters=True)


def run(graph_module: fx.GraphModule, live: list[Tensor]) -> list[Any]:
    inputs = [v.clone() if isinstance(v, Tensor) else v for v in live]
    torch.manual_seed(7)
    with torch.no_grad():
        return [*fx.Interpreter(graph_module).run(*inputs), *inputs]


def assert_same(got: Any, wanted: Any) -> None:
    for a, b in zip(got, wanted, strict=True):
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b


@pytest.mark.parametrize("seeds", [range(6), pytest.param(range(6, 300), marks=LONG)])
def test_on_one_device(seeds: range) -> None:
    worked = 0
    for seed in seeds:
        captured, live = captured_program(seed)
        wanted = run(captured.graph_module, live)
        for share in (None, 0.3, 1.0):
            graphs = build(captured, (), BuildOptions(rematerialize=share))
            assert_same(run(graphs.main.graph_module, live), wanted)
            worked += bool(graphs.remarks)
    assert worked == 2 * len(seeds), "there was nothing to make again"


@pytest.mark.parametrize("seeds", [range(1), *(pytest.param(range(s, s + 8), marks=LONG) for s in range(1, 49, 8))])
@pytest.mark.parametrize(("split", "plan"), [((1, 3, 2), None), ((2, 4), ZERO_3)], ids=["replicate", "zero3"])
def test_on_ranks_with_uneven_rows(seeds: range, split: tuple[int, ...], plan: Any) -> None:
    for seed in seeds:
        captured, live = captured_program(seed, ranks=True)
        found = []
        for share in (None, 0.6):
            steps = expand_all(captured, split, plan)
            for step in steps:
                run_passes(step, PASSES, PassState(bucket_size_mb=0.001, rematerialize=share))
            lines = [describe(step) for step in steps]
            assert all(line == lines[0] for line in lines), "the ranks took different decisions"
            found.append([*(x for part in run_ranks(steps, live) for x in part)])
        assert_same(*found)
