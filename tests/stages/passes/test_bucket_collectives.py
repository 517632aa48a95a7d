"""All-reduces fused into buckets: fewer collectives, the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

from lightning_spmd.errors import VerificationError
from lightning_spmd.ir.node_info import spec_of
from lightning_spmd.ir.steps import ShardedStep
from lightning_spmd.ir.verify import collectives
from lightning_spmd.stages.passes import PassState, bucket_collectives, run_passes
from lightning_spmd.stages.passes.contract import GraphPass
from tests.helpers.ranks import RankPool
from tests.helpers.simulate import expand_all, run_ranks
from tests.helpers.training import TrainingCase, assert_bitwise, train_on
from tests.stages.expand.test_models import MODELS, captured_model, clipped, sgd

PASS = bucket_collectives.PASS


def fused(captured: Any, split: tuple[int, ...], size: float | str = "auto") -> tuple[list[ShardedStep], PassState]:
    state = PassState(bucket_size_mb=size)
    return [run_passes(step, [PASS], state) for step in expand_all(captured, split)], state


def starts(step: ShardedStep) -> list[fx.Node]:
    return list(collectives(step.graph_module.graph))


@pytest.mark.parametrize("update", [None, sgd, clipped])
@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_compute_the_same_bits_with_and_without_buckets(name: str, update: Any) -> None:
    captured, live = captured_model(name, update)
    plain = run_ranks(expand_all(captured, (3, 3)), live)
    for size in ("auto", 0.01):
        steps, _ = fused(captured, (3, 3), size)
        for want, got in zip((*plain[0], *plain[1]), [v for part in run_ranks(steps, live) for v in part], strict=True):
            assert torch.equal(want, got) if isinstance(want, Tensor) else want == got


def test_gradients_and_loss_share_one_collective_and_the_token_count_keeps_its_own() -> None:
    captured, _ = captured_model("gpt", sgd)
    (step, *_), state = fused(captured, (3, 3))
    count, bucket = starts(step)
    assert spec_of(count).numel == 1
    assert spec_of(bucket).numel > 1000
    assert "in 2 buckets" in state.notes["bucket_collectives"]


def test_a_bucket_starts_when_its_last_member_is_ready_and_is_waited_at_its_first_reader() -> None:
    captured, _ = captured_model("gpt", sgd)
    (step, *_), _ = fused(captured, (3, 3), 0.02)
    order = {node: i for i, node in enumerate(step.graph_module.graph.nodes)}
    buckets = [n for n in starts(step) if spec_of(n).numel > 1]
    assert len(buckets) > 2
    for start in buckets[:-1]:
        (wait,) = start.users
        assert order[wait] - order[start] > 20, "nothing runs while the bucket is under way"
    assert [order[n] for n in buckets] == sorted(order[n] for n in buckets)


def test_the_cap_counts_real_bytes() -> None:
    captured, _ = captured_model("gpt", sgd)
    (step, *_), _ = fused(captured, (3, 3), 0.02)
    largest_parameter = max(e.value.bytes for e in step.signature.inputs if e.role == "parameter")
    assert max(spec_of(n).bytes for n in starts(step)) <= max(0.02 * 2**20, largest_parameter)


def test_a_graph_without_reductions_is_left_alone() -> None:
    captured, _ = captured_model("mlp")  # gradients leave as partial sums: only the loss is reduced
    (step, *_) = expand_all(captured, (3, 3))
    for start in starts(step):
        (wait,) = start.users
        wait.replace_all_uses_with(start.all_input_nodes[0])
        step.graph_module.graph.erase_node(wait)
        step.graph_module.graph.erase_node(start)
    before = [n.name for n in step.graph_module.graph.nodes]
    state = PassState()
    bucket_collectives.bucket_collectives(step, state)
    assert [n.name for n in step.graph_module.graph.nodes] == before
    assert state.notes == {}


def test_the_verifier_catches_a_bucket_that_is_read_too_early() -> None:
    def break_it(step: ShardedStep, state: PassState) -> None:
        bucket_collectives.bucket_collectives(step, state)
        start = next(n for n in starts(step) if spec_of(n).numel > 1)
        start.append(next(n for n in step.graph_module.graph.nodes if n.op == "output").prev)

    captured, _ = captured_model("gpt", clipped)
    (step, *_) = expand_all(captured, (3, 3))
    with pytest.raises(VerificationError, match="'broken' broke the graph"):
        run_passes(step, [GraphPass("broken", break_it)], PassState())


def test_training_on_two_ranks_is_bitwise_the_same_with_and_without_buckets(two_ranks: RankPool) -> None:
    case = TrainingCase("gpt", "adamw_fused", "clip_norm", batches=20, dropout=0.1)
    with_buckets = train_on(two_ranks, case)
    without = two_ranks.run(_train_without_passes, case)
    for ours, plain in zip(with_buckets, without, strict=True):
        assert_bitwise(ours, plain)


def _train_without_passes(case: TrainingCase) -> Any:
    from lightning_spmd import SPMDStrategy
    from tests.helpers.training import train

    return train(case, SPMDStrategy(passes=[]), torch.distributed.get_world_size())
