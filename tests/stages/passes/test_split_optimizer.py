"""List operators of the optimizer are split along communication buckets, for any optimizer, and keep every bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from lightning_spmd.errors import VerificationError
from lightning_spmd.ir.dependence import Dependences, tails
from lightning_spmd.ir.steps import CapturedStep, ShardedStep
from lightning_spmd.stages.passes import PassState, bucket_collectives, run_passes
from lightning_spmd.stages.passes.contract import GraphPass
from lightning_spmd.stages.passes.optimizer import split_optimizer
from lightning_spmd.stages.passes.optimizer.split_optimizer import list_length
from tests.helpers.ranks import RankPool
from tests.helpers.simulate import expand_all, run_ranks
from tests.helpers.tiny_capture import capture_module
from tests.helpers.training import TrainingCase, assert_bitwise, assert_compiled, train_on
from tests.stages.expand.test_models import captured_model, clipped, sgd
from tests.stages.phases.test_phases import layers, square

BUCKETS = [bucket_collectives.PASS]
BOTH = [bucket_collectives.PASS, split_optimizer.PASS]
SMALL = 0.001


def lion(parameters: list[Tensor], gradients: list[Tensor]) -> None:
    """Out-of-place lists, scalars and a list operator that reads no gradient."""
    torch._foreach_mul_(parameters, 0.99)
    signs = torch._foreach_sign(gradients)
    torch._foreach_add_(parameters, torch._foreach_mul(signs, 0.5), alpha=-0.1)


def captured(update: Any) -> tuple[CapturedStep, list[Any]]:
    return capture_module(layers(), square, [torch.randn(6, 16)], update=update)


def programs(step: CapturedStep, passes: list[GraphPass], size: float | str = SMALL) -> list[ShardedStep]:
    return [run_passes(s, passes, PassState(bucket_size_mb=size)) for s in expand_all(step, (3, 3))]


def lists(step: ShardedStep) -> list[fx.Node]:
    return [n for n in step.graph_module.graph.nodes if list_length(n) is not None]


def separate(step: ShardedStep) -> list[int]:
    """Collectives by tail."""
    return [len(tail.starts) for tail in tails(Dependences(step.graph_module.graph))]


@pytest.mark.parametrize("update", [sgd, lion])
def test_an_update_needs_its_own_bucket_alone(update: Callable[..., None]) -> None:
    step, live = captured(update)
    before, after = programs(step, BUCKETS), programs(step, BOTH)
    buckets = sum(separate(before[0]))
    assert separate(before[0]) == [buckets]
    assert separate(after[0]) == [1] * buckets
    assert buckets == 4
    assert len(lists(after[0])) == buckets * len(lists(before[0]))
    for ours, theirs in zip(run_ranks(after, live), run_ranks(before, live), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_one_bucket_is_not_split() -> None:
    step, _ = captured(sgd)
    before, after = programs(step, BUCKETS, 25.0), programs(step, BOTH, 25.0)
    assert len(lists(after[0])) == len(lists(before[0]))


def test_clipping_by_norm_splits_the_norms_and_not_the_update() -> None:
    """Every update needs all norms; a bucket's norms need the bucket alone."""
    step, live = captured(clipped)
    before, after = programs(step, BUCKETS), programs(step, BOTH)
    names = [n.target.__name__ for n in lists(after[0])]
    assert names.count("_foreach_norm.Scalar") == 4
    assert names.count("_foreach_add_.List") == 1
    for ours, theirs in zip(run_ranks(after, live), run_ranks(before, live), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_without_list_operators_nothing_changes() -> None:
    step, _ = captured_model("mlp")
    before, after = programs(step, BUCKETS), programs(step, BOTH)
    assert [str(n) for n in before[0].graph_module.graph.nodes] == [str(n) for n in after[0].graph_module.graph.nodes]


def test_the_verifier_catches_an_update_in_front_of_its_gradient() -> None:
    def broken(step: ShardedStep, state: PassState) -> None:
        split_optimizer.split_optimizer(step, state)
        graph = step.graph_module.graph
        next(n for n in graph.nodes if n.op == "call_function").prepend(lists(step)[0])

    step, _ = captured(sgd)
    with pytest.raises(VerificationError, match="pass 'broken' broke the graph"):
        programs(step, [bucket_collectives.PASS, GraphPass("broken", broken)])


@pytest.mark.parametrize(
    "optimizer",
    [
        "adamw_fused",
        "adamw_amsgrad_foreach",
        pytest.param("sgd_foreach", marks=pytest.mark.long),
        pytest.param("adagrad_fused", marks=pytest.mark.long),
    ],
)
def test_training_keeps_every_bit(two_ranks: RankPool, optimizer: str) -> None:
    case = TrainingCase("mlp", optimizer, batches=6, groups=True)
    without = {"passes": ["bucket_collectives"], "bucket_size_mb": SMALL, "overlap_iterations": False}
    split = {**without, "passes": ["bucket_collectives", "split_optimizer"]}
    plain, ours = train_on(two_ranks, case, without), train_on(two_ranks, case, split)
    assert_compiled(*plain, *ours)
    for a, b in zip(ours, plain, strict=True):
        assert_bitwise(a, b)
