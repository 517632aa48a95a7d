"""ZeRO: state in chunks gives what one device gives, and moves what the formula says."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_spmd.ir.placement import CHUNK, REPLICATE
from lightning_spmd.ir.signature import InputRole
from lightning_spmd.ir.steps import ShardedStep
from lightning_spmd.ir.verify import collectives, is_wait
from lightning_spmd.parallel.parallel_plan import MeshPlan, ReplicatedPlan, ShardedStatePlan
from lightning_spmd.parallel.tensor_parallel import TensorParallelPlan, resolve_plan
from lightning_spmd.stages.expand import expand
from tests.helpers.simulate import assert_equals_one_device, axes_for, meshes_for
from tests.helpers.tiny_capture import capture_module

STAGES = {"zero2": ShardedStatePlan(parameters=False), "zero3": ShardedStatePlan(parameters=True)}
SPLITS = [(3, 3), (2, 2, 2, 2), (1, 3, 2)]


def _lists(ps: list[Tensor], gs: list[Tensor]) -> None:
    norms = torch.stack(torch._foreach_norm(gs, 2))
    scale = (0.1 / torch.linalg.vector_norm(norms)).clamp(max=1.0)
    torch._foreach_mul_(gs, scale)
    torch._foreach_add_(ps, gs, alpha=-0.1)


def _one_by_one(ps: list[Tensor], gs: list[Tensor]) -> None:
    total = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gs]))
    for p, g in zip(ps, gs, strict=True):
        g.mul_((0.1 / total).clamp(max=1.0))
        p.mul_(0.99)
        p.add_(g, alpha=-0.1)


def _state_born_here(ps: list[Tensor], gs: list[Tensor]) -> None:
    for p, g in zip(ps, gs, strict=True):
        average = torch.zeros_like(p).lerp_(g, 0.1)
        p.addcdiv_(average, average.square().sqrt_().add_(1e-3), value=-0.1)


def _whole_matrix(ps: list[Tensor], gs: list[Tensor]) -> None:
    """What needs all rows at once (Muon, Shampoo) is gathered."""
    for p, g in zip(ps, gs, strict=True):
        p.sub_(g if g.ndim < 2 else (g @ g.t() @ g).mul_(0.01))


UPDATES: dict[str, Callable[[list[Tensor], list[Tensor]], None]] = {
    "lists": _lists,
    "one by one": _one_by_one,
    "state born here": _state_born_here,
    "whole matrix": _whole_matrix,
}


class Net(nn.Module):
    """Sizes that no number of ranks divides, a tied weight, a frozen layer, a buffer, a scale of one number."""

    def __init__(self, hidden: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.norm = nn.BatchNorm1d(5)
        self.hidden = nn.Linear(5, hidden)
        self.back = nn.Linear(hidden, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.frozen(self.embedding(x)))
        return self.head(self.back(self.hidden(h).tanh()) * self.scale)


def net_step(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(m(x), y)


def captured_net(rows: int, update: Callable[..., Any], hidden: int = 3) -> Any:
    torch.manual_seed(0)
    batch = [torch.randint(0, 7, (rows,)), torch.randint(0, 7, (rows,))]
    return capture_module(Net(hidden), net_step, batch, update=update)


def targets(step: ShardedStep) -> list[str]:
    """Names of the collectives, in order."""
    started = [n.args[0] for n in step.graph_module.graph.nodes if is_wait(n)]
    return [str(n.target).split(".")[1] for n in started]


def _pairs(third: Iterable[Any]) -> list[object]:
    """(stage, update, third): every pair of two of them by default, every triple in the long matrix."""
    return [
        pytest.param(stage, update, value, marks=() if (s + u + t) % 2 == 0 else pytest.mark.long)
        for s, stage in enumerate(STAGES)
        for u, update in enumerate(UPDATES)
        for t, value in enumerate(third)
    ]


@pytest.mark.parametrize(("stage", "update", "split"), _pairs(SPLITS), ids=str)
def test_equals_one_device(stage: str, update: str, split: tuple[int, ...]) -> None:
    captured, live = captured_net(sum(split), UPDATES[update])
    steps = assert_equals_one_device(captured, live, split, plan=STAGES[stage])
    stored = [e.placements for _, e in steps[0].signature.inputs_of(InputRole.PARAMETER) if e.value.shape]
    assert set(stored) == {(CHUNK,) if stage == "zero3" else (REPLICATE,)}


@pytest.mark.parametrize("ranks", [2, 8, 1024])
def test_one_gather_and_one_scatter_a_parameter(ranks: int) -> None:
    captured, _ = captured_net(ranks, _lists)
    # Of the eight trained ones one is a number, and batch norm's two gradients come out of its own reduction, whole.
    scattered, trained, stored = 5, 7, 9
    plain = targets(_first(captured, ranks, ReplicatedPlan()))
    for stage, gathers in (("zero2", trained), ("zero3", stored)):
        found = targets(_first(captured, ranks, STAGES[stage]))
        assert found.count("reduce_scatter_tensor") == scattered
        assert found.count("all_gather_into_tensor") == gathers
        # instead of a reduction a parameter; one more for the norms of chunks
        assert found.count("all_reduce") == plain.count("all_reduce") - scattered + 1


def _first(captured: Any, ranks: int, plan: Any) -> ShardedStep:
    return expand(captured, (axes_for((1,) * ranks)[0],), plan)


HYBRID = {"3x2 uneven": ((1, 3, 2, 2, 1, 1), 2), "2x3": ((1, 1, 1, 1, 1, 1), 3)}


@pytest.mark.parametrize(("stage", "update", "mesh"), _pairs(HYBRID))
def test_hybrid_sharding_equals_one_device(stage: str, update: str, mesh: str) -> None:
    """Chunks lie within neighbourhoods, which are replicas; the simulation compares the replicas bitwise."""
    split, shard = HYBRID[mesh]
    captured, live = captured_net(sum(split), UPDATES[update])
    assert_equals_one_device(captured, live, split, plan=STAGES[stage], shard=shard)


@pytest.mark.parametrize("ranks", [4, 8, 1024])
def test_hybrid_sharding_moves_whole_tensors_among_neighbours_alone(ranks: int) -> None:
    """As ZeRO within a row, and one all-reduce of a chunk of each gradient across the rows."""
    captured, _ = captured_net(ranks, _lists)
    plain = targets(_first(captured, ranks, STAGES["zero3"]))
    axes = meshes_for({"data_parallel": (1,) * ranks}, shard=2)[0]
    step = expand(captured, axes, STAGES["zero3"])
    found = targets(step)
    scattered = plain.count("reduce_scatter_tensor")
    for kind, more in (("reduce_scatter_tensor", 0), ("all_gather_into_tensor", 0), ("all_reduce", scattered)):
        assert found.count(kind) == plain.count(kind) + more
    within, across = axes[0].within, axes[0].across
    groups = [n.args[-1] for n in collectives(step.graph_module.graph)]
    assert within is not None
    assert across is not None
    assert groups.count(within.group) == scattered + found.count("all_gather_into_tensor") + 1  # the norms of chunks
    assert groups.count(across.group) == scattered


@pytest.mark.parametrize("function", ["sum", "mean", "amax"])
def test_reductions_of_chunks_count_each_of_them_once(function: str) -> None:
    def update(ps: list[Tensor], gs: list[Tensor]) -> None:
        for p, g in zip(ps, gs, strict=True):
            p.sub_(getattr(torch, function)(g.mul(g)))

    captured, live = captured_net(8, update)
    assert_equals_one_device(captured, live, (2, 2, 2, 2), plan=STAGES["zero3"], shard=2)


def test_layers_and_hybrid_sharding() -> None:
    """Three axes: two ranks share each layer, two hold the chunks of a shard, two hold the same."""
    captured, live = captured_net(8, _lists, hidden=4)
    layers = TensorParallelPlan(resolve_plan(Net(hidden=4), {"hidden": "colwise", "back": "rowwise"}, 2))
    plan = MeshPlan({"tensor_parallel": layers, "data_parallel": STAGES["zero3"]})
    mesh = {"tensor_parallel": (1, 1), "data_parallel": (2, 2, 2, 2)}
    assert_equals_one_device(captured, live, mesh, plan=plan, shard=2)
