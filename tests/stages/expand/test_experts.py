"""Stacks of experts split over a tensor axis: one device's numbers, a rank's share of the work, one reduction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.ir.placement import Shard
from lightning_spmd.ir.steps import ShardedStep
from lightning_spmd.ir.verify import starts_collective
from lightning_spmd.parallel.parallel_plan import MeshPlan, ReplicatedPlan, ShardedStatePlan
from lightning_spmd.stages.expand import expand
from lightning_spmd.stages.expand.auto_plan import find_plan
from tests.helpers import zoo
from tests.helpers.simulate import assert_equals_one_device, axes_for
from tests.helpers.tiny_capture import capture_module
from tests.stages.expand.test_sharded_state import UPDATES
from tests.stages.expand.test_tensor_parallel import tensor_plan

TOKENS, CHOSEN, WIDTH = 4 * zoo.LENGTH, 2, 32
STYLE = {"*mlp.experts": "experts"}


def _captured(name: str) -> tuple[nn.Module, Any, Any]:
    model, batch = zoo.build(name, 4)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:  # the usual 0.02 would hide what experts give
                parameter.normal_(0, 0.1)
    captured, live = capture_module(
        model,
        lambda m, ids, labels: m(input_ids=ids, labels=labels).loss,
        [batch["input_ids"], batch["labels"]],
        update=UPDATES["lists"],
    )
    return model, captured, live


def _moved(step: ShardedStep) -> list[int]:
    """Elements of each collective of more than a few numbers."""
    nodes = [node for node in step.graph_module.graph.nodes if starts_collective(node)]
    return sorted(node.args[0].meta["val"].numel for node in nodes if node.args[0].meta["val"].numel > 8)


@pytest.mark.parametrize("name", zoo.EXPERTS)
def test_a_layer_moves_its_tokens_once_each_way_and_the_weights_gradient(name: str) -> None:
    model, captured, live = _captured(name)
    for ranks in (2, 4):
        plan = tensor_plan(model, STYLE, ranks)
        steps = assert_equals_one_device(captured, live, {"tensor_parallel": (1,) * ranks}, plan=plan, floor=0.1)
        layers = 1 if name == "deepseek_v3" else 2
        assert _moved(steps[0]) == sorted([TOKENS * WIDTH, TOKENS * WIDTH, TOKENS * CHOSEN] * layers)
        assert steps[0].fallbacks == []
        placed = {e.name: e for e in steps[0].signature.inputs}
        split = [
            e for n, e in placed.items() if "experts." in n and "shared" not in n and isinstance(e.value, TensorSpec)
        ]
        assert split
        assert all(e.placements == (Shard(0),) and e.value.shape[0] == 4 // ranks for e in split)


@pytest.mark.parametrize("data", [ReplicatedPlan(), ShardedStatePlan(parameters=True)], ids=["replicate", "zero3"])
@pytest.mark.parametrize("name", ["gpt_oss", pytest.param("deepseek_v3", marks=pytest.mark.long)])
def test_rows_of_each_data_rank_are_sorted_there(name: str, data: Any) -> None:
    model, captured, live = _captured(name)
    plan = MeshPlan({**tensor_plan(model, STYLE, 2).axes, "data_parallel": data})
    mesh = {"tensor_parallel": (1, 1), "data_parallel": (1, 3)}
    steps = assert_equals_one_device(captured, live, mesh, plan=plan, floor=0.1)
    assert steps[0].fallbacks == []


@pytest.mark.parametrize("name", ["gpt_oss", pytest.param("mixtral", marks=pytest.mark.long)])
def test_beside_other_styles_and_pieces_of_the_sequence(name: str) -> None:
    model, captured, live = _captured(name)
    found = find_plan(captured, 2)
    assert {path for path, style in found.items() if style == "experts"} == {
        path for path, _ in model.named_modules() if path.endswith("mlp.experts")
    }
    assert "colwise" in found.values()
    plan = tensor_plan(model, found, 2, sequence=True)
    assert_equals_one_device(captured, live, {"tensor_parallel": (1, 1)}, plan=plan, floor=0.1)


# ---------------------------------------------------------------- what lies around grouped products
ROWS, EXPERTS = 24, 4


class Layer(nn.Module):
    """Experts with one matrix and one bias each, of which the given function makes something."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.scale = nn.Parameter(torch.randn(8))
        self.experts = nn.ParameterDict(
            {"weight": nn.Parameter(torch.randn(EXPERTS, 8, 8)), "bias": nn.Parameter(torch.randn(EXPERTS, 8))}
        )

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        ordered, order = ids.sort()
        counts = torch.histc(ordered.float(), EXPERTS, 0, EXPERTS - 1)
        x = (x * self.scale)[order]
        ends = counts.cumsum(0, dtype=torch.int32)
        return self.function(torch._grouped_mm(x, self.experts["weight"], offs=ends), x, ordered, order, self.experts)


def _back(y: Tensor, order: Tensor) -> Tensor:
    return torch.zeros_like(y).index_add(0, order, y)


def _activated(y: Tensor, x: Tensor, ids: Tensor, order: Tensor, own: Any) -> Tensor:
    return _back((y + own["bias"][ids]).relu() * x, order).square().mean()


def _not_zero_at_zero(y: Tensor, x: Tensor, ids: Tensor, order: Tensor, own: Any) -> Tensor:
    return _back(y.cos() / (y.abs() + 1e-3), order).square().mean()


def _mean_of_all(y: Tensor, x: Tensor, ids: Tensor, order: Tensor, own: Any) -> Tensor:
    return y.exp().mean()


def _by_another_order(y: Tensor, x: Tensor, ids: Tensor, order: Tensor, own: Any) -> Tensor:
    return (own["bias"][ids.flip(0)] * y).square().mean()


def _written_within(y: Tensor, x: Tensor, ids: Tensor, order: Tensor, own: Any) -> Tensor:
    y = y.clone()
    y[:, :4] *= 2
    y[:, 4:].relu_()
    return y.square().mean()


def _written_row(y: Tensor, x: Tensor, ids: Tensor, order: Tensor, own: Any) -> Tensor:
    y = y.clone()
    y[3] = 1.0
    return y.square().mean()


def _running_sum(y: Tensor, x: Tensor, ids: Tensor, order: Tensor, own: Any) -> Tensor:
    return y.cumsum(0).square().mean()


def _softmax_over_features(y: Tensor, x: Tensor, ids: Tensor, order: Tensor, own: Any) -> Tensor:
    return (y.softmax(-1) * y.view(ROWS, 2, 4).sum(1).repeat(1, 2)).square().mean()


@pytest.mark.parametrize(
    "function",
    [
        _activated,
        _not_zero_at_zero,
        _mean_of_all,
        _by_another_order,
        _written_within,
        _written_row,
        _running_sum,
        _softmax_over_features,
    ],
)
@pytest.mark.parametrize("busy", [EXPERTS, 1], ids=["spread", "one_expert"])
def test_any_use_of_rows_by_expert_equals_one_device(function: Any, busy: int) -> None:
    batch = [torch.randn(ROWS, 8), torch.randint(0, busy, (ROWS,)) + (2 if busy == 1 else 0)]
    module = Layer(function)
    captured, live = capture_module(module, lambda m, x, ids: m(x, ids), batch, update=UPDATES["lists"])
    plan = tensor_plan(module, {"experts": "experts"}, 2)
    assert_equals_one_device(captured, live, {"tensor_parallel": (1, 1)}, plan=plan)


def test_every_rank_multiplies_its_own_experts_alone() -> None:
    module = Layer(_activated)
    batch = [torch.randn(ROWS, 8), torch.randint(0, EXPERTS, (ROWS,))]
    captured, _ = capture_module(module, lambda m, x, ids: m(x, ids), batch)
    step = expand(captured, (axes_for((1, 1), "tensor_parallel")[1],), tensor_plan(module, {"experts": "experts"}, 2))
    products = [n for n in step.graph_module.graph.nodes if n.target is torch.ops.aten._grouped_mm.default]
    assert len(products) == 3
    assert {product.args[2].meta["val"].shape for product in products} == {(EXPERTS // 2,)}
