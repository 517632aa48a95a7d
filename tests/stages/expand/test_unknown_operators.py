"""Operators without a rule of ours: DTensor's registry first, then replication, named once; never a hang."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from lightning_spmd.stages.expand.expand import ReplicationWarning
from tests.helpers.simulate import assert_equals_one_device
from tests.helpers.tiny_capture import capture_function


@torch.library.custom_op("spmd_tests::centre_rows", mutates_args=())
def centre_rows(x: Tensor, factor: float) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) * factor


@torch.library.custom_op("spmd_tests::centre_columns", mutates_args=())
def centre_columns(x: Tensor, factor: float) -> Tensor:
    return (x - x.mean(0, keepdim=True)) * factor


for _op in (centre_rows, centre_columns):
    _op.register_fake(lambda x, factor: torch.empty_like(x))
    _op.register_autograd(lambda ctx, grad: (grad, None))


@register_sharding(torch.ops.spmd_tests.centre_rows.default)
def _rows(x: Any, factor: float) -> list[Any]:
    return [([Replicate()], [Replicate(), None]), ([Shard(0)], [Shard(0), None])]


def _step(op: Any) -> Any:
    def function(p: dict[str, Tensor], _: Any, x: Tensor) -> Tensor:
        return op(x * p["w"], 2.0).square().mean()

    return capture_function(function, {"w": torch.ones(5).requires_grad_()}, {}, [torch.randn(6, 5)])


def test_register_sharding_of_a_custom_operator_is_honoured(recwarn: pytest.WarningsRecorder) -> None:
    captured, live = _step(centre_rows)
    steps = assert_equals_one_device(captured, live, (3, 3))
    assert steps[0].fallbacks == []
    assert not [w for w in recwarn if w.category is ReplicationWarning]


def test_an_unknown_operator_runs_on_gathered_inputs_and_is_named() -> None:
    captured, live = _step(centre_columns)
    with pytest.warns(ReplicationWarning, match=r"spmd_tests.centre_columns.default .*60 bytes|120 bytes"):
        steps = assert_equals_one_device(captured, live, (1, 3, 2))
    assert len(steps[0].fallbacks) == 1
    assert "test_unknown_operators.py" in steps[0].fallbacks[0]


def test_attention_on_the_cpu_expands_at_once() -> None:
    """DTensor's own propagator searches decompositions of this operator without end: this test would hang."""

    def function(p: dict[str, Tensor], _: Any, x: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(x * p["w"], x, x).sum()

    captured, live = capture_function(function, {"w": torch.ones(8).requires_grad_()}, {}, [torch.randn(4, 2, 6, 8)])
    assert_equals_one_device(captured, live, (2, 2))
