"""Stacks of experts split over an axis: one device's numbers, a rank's share of the work, what is moved.

Ranks of a tensor axis share tokens, and reduce once; those of a data axis exchange theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_spmd.cost.operators import work_of
from lightning_spmd.errors import ConfigurationError
from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.ir.placement import CHUNK, Shard
from lightning_spmd.ir.steps import ShardedStep
from lightning_spmd.ir.verify import starts_collective
from lightning_spmd.parallel.context_parallel import ContextParallelPlan
from lightning_spmd.parallel.parallel_plan import (
    ExpertParallelPlan,
    MeshPlan,
    ParallelPlan,
    ReplicatedPlan,
    ShardedStatePlan,
)
from lightning_spmd.stages.expand import expand
from lightning_spmd.stages.expand.auto_plan import find_plan
from tests.helpers import zoo
from tests.helpers.simulate import assert_equals_one_device, axes_for
from tests.helpers.tiny_capture import capture_module
from tests.stages.expand.test_chosen import Chooses
from tests.stages.expand.test_sharded_state import UPDATES
from tests.stages.expand.test_tensor_parallel import tensor_plan

TOKENS, CHOSEN, WIDTH = 4 * zoo.LENGTH, 2, 32
STYLE = {"*mlp.experts": "experts"}


def _captured(name: str, experts: str = "grouped_mm") -> tuple[nn.Module, Any, Any]:
    model, batch = zoo.build(name, 4)
    model.set_experts_implementation(experts)
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


@pytest.mark.parametrize(
    ("data", "rows"),
    [(ReplicatedPlan(), (1, 3)), (ReplicatedPlan(), (0, 4)), (ShardedStatePlan(parameters=True), (1, 3))],
    ids=["replicate", "a rank without rows", "zero3"],
)
@pytest.mark.parametrize("name", ["gpt_oss", pytest.param("deepseek_v3", marks=pytest.mark.long)])
def test_rows_of_each_data_rank_are_sorted_there(name: str, data: Any, rows: tuple[int, ...]) -> None:
    model, captured, live = _captured(name)
    plan = MeshPlan({**tensor_plan(model, STYLE, 2).axes, "data_parallel": data})
    mesh = {"tensor_parallel": (1, 1), "data_parallel": rows}
    steps = assert_equals_one_device(captured, live, mesh, plan=plan, floor=0.1)
    # a kernel of grouped products takes no empty operands: where a rank has no rows, they are gathered
    assert 0 in rows or steps[0].fallbacks == []


@pytest.mark.parametrize("name", ["gpt_oss", pytest.param("mixtral", marks=pytest.mark.long)])
def test_beside_other_styles_and_pieces_of_the_sequence(name: str) -> None:
    model, captured, live = _captured(name)
    found = find_plan(captured, 2)
    assert {path for path, style in found.items() if style == "experts"} == {
        path for path, _ in model.named_modules() if path.endswith("mlp.experts")
    }
    assert "colwise" in found.values()
    plan = tensor_plan(model, found, 2, sequence=True)
    steps = assert_equals_one_device(captured, live, {"tensor_parallel": (1, 1)}, plan=plan, floor=0.1)
    assert steps[0].fallbacks == []


@pytest.mark.parametrize("name", ["gpt_oss", pytest.param("mixtral", marks=pytest.mark.long)])
def test_weights_that_each_row_chooses_are_found_and_split(name: str) -> None:
    """Hugging Face's ``batched_mm``: ``w[ids]`` of a rank's share of the experts, and no product less."""
    _, captured, live = _captured(name, "batched_mm")
    found = {path: style for path, style in find_plan(captured, 2).items() if style == "experts"}
    assert set(found) == {f"model.layers.{n}.mlp.experts" for n in range(2)}
    model, _ = zoo.build(name, 4)
    plan = tensor_plan(model, found, 2)
    steps = assert_equals_one_device(captured, live, {"tensor_parallel": (1, 1)}, plan=plan, floor=0.1)
    assert _moved(steps[0]) == sorted([TOKENS * WIDTH, TOKENS * WIDTH, TOKENS * CHOSEN] * 2)


# ---------------------------------------------------------------- ranks with tokens of their own
REPLICATED = ReplicatedPlan()


def _exchange_plan(module: nn.Module, data: ParallelPlan = REPLICATED) -> ExpertParallelPlan:
    stacks = {n: tuple(p.shape) for n, p in module.named_parameters() if "experts." in n and "shared" not in n}
    return ExpertParallelPlan(data, stacks)


def _exchanged(step: ShardedStep) -> list[int]:
    """Elements that each exchange of rows sends, its own included."""
    nodes = step.graph_module.graph.find_nodes(
        op="call_function", target=torch.ops._c10d_functional.all_to_all_single.default
    )
    return sorted(node.args[0].meta["val"].numel for node in nodes)


@pytest.mark.parametrize("name", zoo.EXPERTS)
def test_a_layer_exchanges_its_rows_four_times(name: str) -> None:
    """Rows and their outputs forward, gradients of both backward; a number a row for the router, and ids for biases."""
    model, captured, live = _captured(name)
    steps = assert_equals_one_device(captured, live, (2, 2), plan=_exchange_plan(model), floor=0.1)
    layers, own = 1 if name == "deepseek_v3" else 2, TOKENS * CHOSEN // 2
    numbers = [own] * (3 if name == "gpt_oss" else 2)
    assert _exchanged(steps[0]) == sorted([own * WIDTH] * 4 * layers + numbers * layers)
    assert steps[0].fallbacks == []
    placed = {e.name: e for e in steps[0].signature.inputs}
    split = [e for n, e in placed.items() if "experts." in n and "shared" not in n and isinstance(e.value, TensorSpec)]
    assert split
    assert all(e.placements == (CHUNK,) and e.value.shape[0] == 2 for e in split)


@pytest.mark.parametrize(
    ("data", "rows", "among"),
    [
        (ReplicatedPlan(), (1, 1, 1, 1), 2),
        (ReplicatedPlan(), (1, 3, 0, 0), 2),
        (ReplicatedPlan(), (0, 4), 2),
        (ShardedStatePlan(parameters=False), (2, 0, 1, 1), 2),
        (ShardedStatePlan(parameters=True), (1, 1, 1, 1), 4),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["gpt_oss", pytest.param("mixtral", marks=pytest.mark.long)])
def test_rows_go_to_neighbours_alone(name: str, data: Any, rows: tuple[int, ...], among: int) -> None:
    model, captured, live = _captured(name)
    shard = None if among == len(rows) else among
    steps = assert_equals_one_device(captured, live, rows, plan=_exchange_plan(model, data), floor=0.1, shard=shard)
    assert steps[0].fallbacks == []


@pytest.mark.parametrize("axis", ["tensor_parallel", "sequence_parallel", "context_parallel"])
def test_rows_are_exchanged_beside_another_axis(axis: str) -> None:
    model, captured, live = _captured("mixtral")
    if axis == "context_parallel":
        other = {axis: ContextParallelPlan()}
    else:
        layers = {"*.[qkv]_proj": "colwise", "*.o_proj": "rowwise"}
        other = tensor_plan(model, layers, 2, sequence=axis == "sequence_parallel").axes
    plan = MeshPlan({**other, "data_parallel": _exchange_plan(model)})
    mesh = {next(iter(other), ""): (1, 1), "data_parallel": (2, 2)}
    step = assert_equals_one_device(captured, live, mesh, plan=plan, floor=0.1)[0]
    own = TOKENS * CHOSEN // (4 if axis == "context_parallel" else 2)
    assert _exchanged(step) == sorted([own * WIDTH] * 8 + [own] * 4)


def test_experts_that_are_multiplied_otherwise_are_gathered_and_named() -> None:
    model, captured, live = _captured("mixtral", "batched_mm")
    with pytest.warns(UserWarning, match=r"reads 'model.layers.0.mlp.experts.gate_up_proj' where no rows"):
        steps = assert_equals_one_device(captured, live, (2, 2), plan=_exchange_plan(model), floor=0.1)
    assert len(steps[0].fallbacks) == 4
    assert _exchanged(steps[0]) == []


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
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order))
    return y[inverse]


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


USES = [
    _activated,
    _not_zero_at_zero,
    _mean_of_all,
    _by_another_order,
    _written_within,
    _written_row,
    _running_sum,
    _softmax_over_features,
]


@pytest.mark.parametrize("function", USES)
@pytest.mark.parametrize("busy", [EXPERTS, 1], ids=["spread", "one_expert"])
def test_any_use_of_rows_by_expert_equals_one_device(function: Any, busy: int) -> None:
    batch = [torch.randn(ROWS, 8), torch.randint(0, busy, (ROWS,)) + (2 if busy == 1 else 0)]
    module = Layer(function)
    captured, live = capture_module(module, lambda m, x, ids: m(x, ids), batch, update=UPDATES["lists"])
    plan = tensor_plan(module, {"experts": "experts"}, 2)
    assert_equals_one_device(captured, live, {"tensor_parallel": (1, 1)}, plan=plan)


@pytest.mark.parametrize("function", USES)
@pytest.mark.parametrize(("rows", "among"), [((12, 12), 2), ((12, 4, 0, 8), 2)], ids=str)
@pytest.mark.parametrize("busy", [EXPERTS, 1], ids=["spread", "one_expert"])
def test_any_use_of_exchanged_rows_equals_one_device(function: Any, rows: Any, among: int, busy: int) -> None:
    batch = [torch.randn(ROWS, 8), torch.randint(0, busy, (ROWS,)) + (2 if busy == 1 else 0)]
    module = Layer(function)
    captured, live = capture_module(module, lambda m, x, ids: m(x, ids), batch, update=UPDATES["lists"])
    shard = None if among == len(rows) else among
    steps = assert_equals_one_device(captured, live, rows, plan=_exchange_plan(module), shard=shard)
    assert bool(_exchanged(steps[0])) == (function in (_activated, _not_zero_at_zero))


class Dropping(Layer):
    """The same where tokens may have no expert: masked before and after, because the product leaves them undefined."""

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        ordered, order = ids.sort()
        dropped = (ordered >= EXPERTS).unsqueeze(1)
        ends = torch.histc(ordered.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0, dtype=torch.int32)
        x = (x * self.scale)[order].masked_fill(dropped, 0.0)
        y = torch._grouped_mm(x, self.experts["weight"], offs=ends).masked_fill(dropped, 0.0)
        return _back(y.cos() * x, order).square().mean()


def test_rows_of_no_expert_come_back() -> None:
    module = Dropping(_activated)
    batch = [torch.randn(ROWS, 8), torch.randint(0, EXPERTS + 2, (ROWS,))]
    captured, live = capture_module(module, lambda m, x, ids: m(x, ids), batch, update=UPDATES["lists"])
    steps = assert_equals_one_device(captured, live, (12, 12), plan=_exchange_plan(module))
    assert _exchanged(steps[0])


def test_every_rank_multiplies_its_own_experts_alone() -> None:
    module = Layer(_activated)
    batch = [torch.randn(ROWS, 8), torch.randint(0, EXPERTS, (ROWS,))]
    captured, _ = capture_module(module, lambda m, x, ids: m(x, ids), batch)
    step = expand(captured, (axes_for((1, 1), "tensor_parallel")[1],), tensor_plan(module, {"experts": "experts"}, 2))
    products = [n for n in step.graph_module.graph.nodes if n.target is torch.ops.aten._grouped_mm.default]
    assert len(products) == 3
    assert {product.args[2].meta["val"].shape for product in products} == {(EXPERTS // 2,)}
    assert {work_of(product).flops for product in products} == {2 * ROWS * 8 * 8 / 2}


# ---------------------------------------------------------------- experts that are chosen one by one
class Loop(nn.Module):
    """Experts multiplied in turn, in one of several ways.

    Args:
        way: a function of tokens, weights of each token's experts by expert, and the stacked parameters.
    """

    def __init__(self, way: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way = way
        self.scale, self.router = nn.Parameter(torch.randn(8)), nn.Linear(8, EXPERTS)
        self.experts = nn.ParameterDict(
            {
                "up": nn.Parameter(torch.randn(EXPERTS, 8, 16)),
                "bias": nn.Parameter(torch.randn(EXPERTS, 16)),
                "down": nn.Parameter(torch.randn(EXPERTS, 16, 8)),
            }
        )

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        x = x * self.scale
        weights, ids = self.router(x).softmax(-1).topk(CHOSEN, -1)
        return (self.way(x, weights, ids, self.experts) + other).square().mean()


def _every_expert_on_all_tokens(x: Tensor, weights: Tensor, ids: Tensor, own: Any) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        share = (weights * (ids == e)).sum(-1, keepdim=True)
        out = out + share * ((x @ own["up"][e] + own["bias"][e]).relu() @ own["down"][e])
    return out


def _added_in_place(x: Tensor, weights: Tensor, ids: Tensor, own: Any) -> Tensor:
    out, rows = torch.zeros_like(x), torch.arange(ROWS)
    for e in range(-EXPERTS, 0):
        share = (weights * (ids == e + EXPERTS)).sum(-1, keepdim=True)
        out.index_add_(0, rows, share * ((x @ own["up"][e] + own["bias"][e]).cos() @ own["down"][e]))
    return out


def _weights_of_each_token(x: Tensor, weights: Tensor, ids: Tensor, own: Any) -> Tensor:
    flat = ids.flatten()
    y = torch.bmm(x.repeat_interleave(CHOSEN, 0).unsqueeze(1), own["up"][flat]).squeeze(1) + own["bias"][flat]
    y = torch.bmm(y.cos().unsqueeze(1), own["down"][flat]).squeeze(1) * weights.flatten().unsqueeze(1)
    return y.view(ROWS, CHOSEN, 8).sum(1)


def _numbers_from_the_end(x: Tensor, weights: Tensor, ids: Tensor, own: Any) -> Tensor:
    return _weights_of_each_token(x, weights, ids - EXPERTS, own)


def _one_expert_for_all(x: Tensor, weights: Tensor, ids: Tensor, own: Any) -> Tensor:
    best = ids.flatten()[5]
    return (x @ own["up"][best[None]][0]).relu() @ own["down"][best[None]][0] + own["bias"][best[None]].sum()


def _all_at_once(x: Tensor, weights: Tensor, ids: Tensor, own: Any) -> Tensor:
    shares = torch.zeros(ROWS, EXPERTS).scatter(1, ids, weights)
    y = torch.bmm(x.expand(EXPERTS, ROWS, 8), own["up"]).add(own["bias"][:, None]).cos()
    return (torch.bmm(y, own["down"]) * shares.t().unsqueeze(-1)).sum(0)


@pytest.mark.parametrize(
    "way",
    [
        _every_expert_on_all_tokens,
        _added_in_place,
        _weights_of_each_token,
        _numbers_from_the_end,
        _one_expert_for_all,
        _all_at_once,
    ],
)
def test_other_ways_to_write_experts_equal_one_device(way: Any) -> None:
    batch = [torch.randn(ROWS, 8), torch.randn(ROWS, 8)]
    module = Loop(way)
    captured, live = capture_module(module, lambda m, x, other: m(x, other), batch, update=UPDATES["lists"])
    for ranks in (2, 4):
        plan = tensor_plan(module, {"experts": "experts"}, ranks)
        step = assert_equals_one_device(captured, live, {"tensor_parallel": (1,) * ranks}, plan=plan)[0]
        weights = {16 * 8 * EXPERTS, 16 * EXPERTS}
        assert weights.isdisjoint(_moved(step)), "weights are gathered"
        assert _moved(step).count(ROWS * 8) <= 2, "tokens are reduced more than once each way"


# ---------------------------------------------------------------- experts in a list
class Gated(nn.Module):
    """An expert with a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def _two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 12, bias=False), nn.GELU(), nn.Linear(12, 8, bias=False))


class Listed(nn.Module):
    """Experts in a list, in one of several ways.

    Args:
        way: a function of tokens, weights of each token's experts, their numbers, the list, and ``torch.where``.
        expert: makes one.
    """

    def __init__(self, way: Callable[..., Tensor], expert: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way, self.where = way, Chooses()
        self.norm, self.router = nn.LayerNorm(8), nn.Linear(8, EXPERTS)
        self.experts = nn.ModuleList(expert() for _ in range(EXPERTS))

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        x = self.norm(x)
        weights, ids = self.router(x).softmax(-1).topk(CHOSEN, -1)
        return (self.way(x, weights, ids, self.experts, self.where) + other).square().mean()


def _all_tokens(x: Tensor, weights: Tensor, ids: Tensor, experts: Any, where: Any) -> Tensor:
    out = torch.zeros_like(x)
    for e, expert in enumerate(experts):
        out = out + (weights * (ids == e)).sum(-1, keepdim=True) * expert(x)
    return out


def _all_tokens_in_place(x: Tensor, weights: Tensor, ids: Tensor, experts: Any, where: Any) -> Tensor:
    out = x.new_zeros(x.shape)
    for e, expert in enumerate(experts):
        out += (weights * (ids == e)).sum(-1, keepdim=True) * expert(x)
    return out


def _stacked(x: Tensor, weights: Tensor, ids: Tensor, experts: Any, where: Any) -> Tensor:
    shares = torch.zeros(ROWS, EXPERTS).scatter(1, ids, weights)
    return (torch.stack([expert(x) for expert in experts], 1) * shares.unsqueeze(-1)).sum(1)


def _found_rows(x: Tensor, weights: Tensor, ids: Tensor, experts: Any, where: Any) -> Tensor:
    out, mask = torch.zeros_like(x), F.one_hot(ids, EXPERTS).permute(2, 1, 0)
    for e, expert in enumerate(experts):
        places, rows = where(mask[e])
        out.index_add_(0, rows, expert(x[rows]) * weights[rows, places, None])
    return out


def _sum_read_on_the_way(x: Tensor, weights: Tensor, ids: Tensor, experts: Any, where: Any) -> Tensor:
    out = torch.zeros_like(x)
    for e, expert in enumerate(experts):
        out = out + (weights * (ids == e)).sum(-1, keepdim=True) * expert(x) + 1e-2 * out.cos()
    return out


@pytest.mark.parametrize(
    ("way", "expert", "most"),
    [
        (_all_tokens, Gated, 2),
        (_all_tokens_in_place, _two_layers, 2),
        (_stacked, Gated, 2),
        (_found_rows, _two_layers, 4),
        (_sum_read_on_the_way, _two_layers, 2),
    ],
)
def test_a_list_of_experts_moves_its_tokens_once_each_way(way: Any, expert: Any, most: int) -> None:
    module, batch = Listed(way, expert), [torch.randn(ROWS, 8), torch.randn(ROWS, 8)]
    module(*batch)
    module.where.known = [int(mask.sum()) for mask in module.where.masks]
    captured, live = capture_module(module, lambda m, x, other: m(x, other), batch, update=UPDATES["lists"])
    found = find_plan(captured, 2)
    assert set(found.values()) == {"colwise", "rowwise"}
    assert len(found) == EXPERTS * (3 if expert is Gated else 2)
    for ranks in (2, most):
        plan, same = (tensor_plan(module, p, ranks) for p in ({"experts": "experts"}, found))
        placements = [p.axes["tensor_parallel"].resolved.placements for p in (plan, same)]  # type: ignore[union-attr]
        assert placements[0] == placements[1]
        step = assert_equals_one_device(captured, live, {"tensor_parallel": (1,) * ranks}, plan=plan)[0]
        tokens = 2 * ROWS * 8 if way is not _sum_read_on_the_way else 5 * ROWS * 8
        assert sum(size for size in _moved(step) if size % (ROWS * 8) == 0) == tokens
        assert step.fallbacks == []
        kept = [e.value.numel for e in step.signature.inputs if e.name.startswith("experts.") and "weight" in e.name]
        assert set(kept) == {8 * 12 // ranks}


def test_other_lists_name_the_layer() -> None:
    for expert, message in (
        (lambda: nn.Linear(8, 12), "expert '0' has no linear layers from the width of the model to hidden features"),
        (lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), "layer '0.0' takes 8 and gives 8 features"),
        (lambda: nn.Sequential(nn.Linear(8, 9), nn.Linear(9, 8)), "its 9 output features .* cannot be divided by 2"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            tensor_plan(Listed(_all_tokens, expert), {"experts": "experts"}, 2)
