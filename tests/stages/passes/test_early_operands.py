"""Operands of collectives are there before the updates begin."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_spmd.errors import VerificationError
from lightning_spmd.ir.steps import CapturedStep, ShardedStep
from lightning_spmd.ir.verify import collectives
from lightning_spmd.stages.passes import PassState, bucket_collectives, early_operands, run_passes
from lightning_spmd.stages.passes.contract import GraphPass
from tests.helpers.ranks import RankPool
from tests.helpers.simulate import expand_all, run_ranks
from tests.helpers.tiny_capture import capture_module
from tests.helpers.training import TrainingCase, assert_bitwise, assert_compiled, train_on
from tests.stages.expand.test_models import sgd
from tests.stages.phases.test_phases import layers, square


def ascend(parameters: list[Tensor], gradients: list[Tensor]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.add_(-gradient, alpha=0.1)


def captured(update: Any) -> tuple[CapturedStep, list[Any]]:
    return capture_module(layers(), square, [torch.randn(6, 16)], update=update)


def programs(step: CapturedStep, passes: list[GraphPass]) -> list[ShardedStep]:
    return [run_passes(s, passes, PassState()) for s in expand_all(step, (3, 3))]


def count(step: ShardedStep) -> int:
    return sum(1 for _ in collectives(step.graph_module.graph))


def test_negated_gradients_share_a_bucket() -> None:
    step, live = captured(ascend)
    without = programs(step, [bucket_collectives.PASS])
    ours = programs(step, [early_operands.PASS, bucket_collectives.PASS])
    assert count(without[0]) == 8
    assert count(ours[0]) == 1
    for a, b in zip(run_ranks(ours, live), run_ranks(without, live), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_nothing_moves_where_operands_are_complete() -> None:
    step, _ = captured(sgd)
    before, after = programs(step, []), programs(step, [early_operands.PASS])
    assert [str(n) for n in before[0].graph_module.graph.nodes] == [str(n) for n in after[0].graph_module.graph.nodes]


def test_the_verifier_catches_an_operand_moved_too_far() -> None:
    def broken(step: ShardedStep, state: PassState) -> None:
        graph = step.graph_module.graph
        start = next(iter(collectives(graph)))
        next(n for n in graph.nodes if n.op == "call_function").prepend(start)

    step, _ = captured(ascend)
    with pytest.raises(VerificationError, match="pass 'broken' broke the graph"):
        programs(step, [GraphPass("broken", broken)])


@pytest.mark.parametrize("optimizer", [pytest.param("sgd_maximize", marks=pytest.mark.long), "adam_amsgrad"])
def test_training_keeps_every_bit(two_ranks: RankPool, optimizer: str) -> None:
    case = TrainingCase("mlp", optimizer, batches=6)
    plain = train_on(two_ranks, case, {"passes": []})
    ours = train_on(two_ranks, case, {"passes": ["early_operands"]})
    assert_compiled(*plain, *ours)
    for a, b in zip(ours, plain, strict=True):
        assert_bitwise(a, b)
