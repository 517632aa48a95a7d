"""One pass at work: on programs of simulated ranks, and in training on a pool of ranks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from lightning_spmd.ir.steps import ShardedStep
from lightning_spmd.stages.passes import GraphPass, PassState, run_passes
from lightning_spmd.stages.runtime.agreement.same_graphs import describe
from tests.helpers.ranks import RankPool
from tests.helpers.simulate import run_ranks
from tests.helpers.training import Result, TrainingCase, assert_bitwise, assert_compiled


def targets(step: ShardedStep) -> list[str]:
    """The graph's operators in order, without inputs and output."""
    nodes: Sequence[fx.Node] = list(step.graph_module.graph.nodes)
    return [getattr(n.target, "__name__", str(n.target)) for n in nodes if n.op == "call_function"]


def apply(current: GraphPass, steps: Sequence[ShardedStep]) -> PassState:
    """Run and verify the pass on every rank's program; the ranks must agree on the result."""
    state = PassState()
    for step in steps:
        run_passes(step, [current], state)
    if len({tuple(axis.split) for step in steps for axis in step.axes}) == 1:
        lines = [describe(step) for step in steps]
        assert all(line == lines[0] for line in lines), "the ranks took different decisions"
    return state


def assert_same_bits(before: Sequence[ShardedStep], after: Sequence[ShardedStep], live: Sequence[Any]) -> None:
    """Outputs and inputs afterwards are the same."""
    wanted, got = run_ranks(before, live), run_ranks(after, live)
    for want, have in zip((*wanted[0], *wanted[1]), (*got[0], *got[1]), strict=True):
        assert torch.equal(want, have) if isinstance(want, Tensor) else want == have


def train_with(case: TrainingCase, ranks: int, passes: Sequence[Any], folder: Path | None = None) -> Result:
    """In a rank of a pool: train ``case`` with these passes and nothing else."""
    from lightning_spmd import SPMDStrategy
    from tests.helpers.training import train

    return train(case, SPMDStrategy(passes=list(passes), dump_dir=folder), ranks)


@functools.cache
def _plain(pool: RankPool, case: TrainingCase) -> list[Result]:
    return pool.run(train_with, case, pool.size, ())


def assert_training_is_unchanged(pool: RankPool, case: TrainingCase, name: str, folder: Path) -> None:
    """With the pass alone and with none: the same bits, and the pass had something to do."""
    results = pool.run(train_with, case, pool.size, (name,), folder)
    assert_compiled(*results)
    for ours, plain in zip(results, _plain(pool, case), strict=True):
        assert_bitwise(ours, plain)
    diffs = list(folder.glob(f"*_{name}.diff"))
    assert diffs, "the pass ran in no graph"
    assert any(d.read_text() for d in diffs), "the pass had nothing to do"
