"""Parameters that lie in memory in any order: every rank's graph gives what one device gives, by every optimizer."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_spmd.errors import VerificationError
from lightning_spmd.ir.first import first
from lightning_spmd.ir.layout import row_major, walked
from lightning_spmd.ir.node_info import Section, TensorSpec, info_of, spec_of
from lightning_spmd.ir.placement import CHUNK, REPLICATE, Shard
from lightning_spmd.ir.verify import collectives, verify_sharded
from lightning_spmd.parallel.parallel_plan import MeshPlan, data_parallel_plan
from lightning_spmd.parallel.pieces import local_spec
from lightning_spmd.parallel.tensor_parallel import TensorParallelPlan, resolve_plan
from lightning_spmd.stages import BuildOptions
from tests.helpers.modules import OPTIMIZERS
from tests.helpers.odd_layouts import OddLayouts, batches
from tests.helpers.simulate import meshes_for
from tests.helpers.simulated_training import SimulatedTraining, largest_difference, train_eagerly

PLANS = ("replicate", "zero2", "zero3")
FUSED = {"adamw_fused", "sgd_fused", "adagrad_fused", "adamw_amsgrad_fused", "adamw_tensor_lr"}
NO_NUMBER = {"rprop"}
"""Its steps read the sign of a parameter of one number in Python."""
_SHORT = {
    *(("adamw_fused", plan) for plan in PLANS),
    *(("sgd_fused", plan) for plan in PLANS),
    ("adagrad_fused", "zero2"),
    ("adamw", "zero3"),
    ("adam_foreach", "zero2"),
    ("sgd", "replicate"),
}
CLIPS = {
    "norm": lambda o: torch.nn.utils.clip_grad_norm_(o.param_groups[0]["params"], 0.05),
    "value": lambda o: torch.nn.utils.clip_grad_value_(o.param_groups[0]["params"], 0.01),
}


def _module(optimizer: str) -> tuple[nn.Module, Any]:
    module = OddLayouts(optimizer, gaps=optimizer not in FUSED, scale=optimizer not in NO_NUMBER)
    return module, module.configure_optimizers()


@functools.cache
def _eager(optimizer: str, clip: str | None, accumulate: int) -> tuple[nn.Module, Any]:
    module, made = _module(optimizer)
    train_eagerly(module, made, batches(4), CLIPS.get(clip or ""), accumulate)
    return module, made


def _train(
    optimizer: str, plan: Any, clip: str | None = None, accumulate: int = 1, **settings: Any
) -> SimulatedTraining:
    """Four batches on simulated ranks and on one device: the same but for rounding in float64."""
    module, made = _module(optimizer)
    training = SimulatedTraining(module, made, plan=plan, clip=CLIPS.get(clip or ""), accumulate=accumulate, **settings)
    for batch in batches(4):
        training.train(batch)
    found = largest_difference(module, made, *_eager(optimizer, clip, accumulate))
    assert float(found.split()[0]) < 1e-12, found
    return training


def _cases() -> list[object]:
    pairs = [(optimizer, plan) for optimizer in OPTIMIZERS for plan in PLANS]
    return [pytest.param(*pair, marks=() if pair in _SHORT else pytest.mark.long) for pair in pairs]


@pytest.mark.parametrize(("optimizer", "plan"), _cases())
def test_every_optimizer_equals_one_device(optimizer: str, plan: str) -> None:
    _train(optimizer, plan)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("optimizer", ["adamw_fused", pytest.param("adam_foreach", marks=pytest.mark.long)])
@pytest.mark.parametrize("clip", ["norm", pytest.param("value", marks=pytest.mark.long)])
def test_clipping_and_accumulation_equal_one_device(optimizer: str, plan: str, clip: str) -> None:
    _train(optimizer, plan, clip, accumulate=2)


@pytest.mark.parametrize(
    "options",
    [BuildOptions(bucket_size_mb=1e-4), BuildOptions(passes=())],
    ids=["small buckets", "no passes"],
)
@pytest.mark.parametrize("plan", [pytest.param("replicate", marks=pytest.mark.long), "zero2"])
@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("sgd_fused", marks=pytest.mark.long)])
def test_no_pass_changes_what_comes_out(optimizer: str, plan: str, options: BuildOptions) -> None:
    _train(optimizer, plan, options=options)


@pytest.mark.parametrize("split", [(1, 3), pytest.param((3, 1), marks=pytest.mark.long), (1, 1, 1, 1)])
@pytest.mark.parametrize(
    "plan", [pytest.param(plan, marks=() if plan == "zero2" else pytest.mark.long) for plan in PLANS]
)
def test_any_split_of_the_batch_equals_one_device(plan: str, split: tuple[int, ...]) -> None:
    _train("adamw_fused", plan, split=split)


LAYERS = {"first": "colwise", "second": "rowwise"}
MESHES = {
    "tp2": ({"data_parallel": (4,), "tensor_parallel": (1, 1)}, "replicate"),
    "dp2 tp2": ({"tensor_parallel": (1, 1), "data_parallel": (2, 2)}, "replicate"),
    "zero2 tp2": ({"tensor_parallel": (1, 1), "data_parallel": (2, 2)}, "zero2"),
    "zero3 tp2": ({"tensor_parallel": (1, 1), "data_parallel": (1, 3)}, "zero3"),
}


class Layers(nn.Module):
    """Two linear layers with weights that lie column by column, as ``nn.Parameter(w.t())`` leaves them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 8).double(), nn.Linear(8, 3).double()
        for layer in (self.first, self.second):
            layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return (self.second(self.first(x.flatten(1)[:, :3]).tanh()) - y).square().mean()


@pytest.mark.parametrize("mesh", MESHES)
def test_split_layers_with_transposed_weights_equal_one_device(mesh: str) -> None:
    split, data = MESHES[mesh]
    module, twin = Layers(), Layers()
    layers = TensorParallelPlan(resolve_plan(module, LAYERS, 2))
    plan = MeshPlan({"tensor_parallel": layers, "data_parallel": data_parallel_plan(data, reduce_gradients=False)})
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=0.1, fused=True) for m in (module, twin))
    training = SimulatedTraining(module, ours, split, plan)
    train_eagerly(twin, theirs, batches(4))
    for batch in batches(4):
        training.train(batch)
    found = largest_difference(module, ours, twin, theirs)
    assert float(found.split()[0]) < 1e-12, found


class Factorized(nn.Module):
    """A flow's mixing matrix as ``torch.linalg.qr`` leaves it, column by column, and what factorizes it."""

    def __init__(self) -> None:
        super().__init__()
        self.mixing = nn.Parameter(torch.linalg.qr(torch.arange(16.0).view(4, 4).sin().double())[0])
        assert not self.mixing.is_contiguous()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].flatten(1)[:, :4]
        logarithm, determinant = torch.linalg.slogdet(self.mixing)[1], torch.linalg.det(self.mixing * 2)
        inverse = torch.linalg.solve_ex(self.mixing, torch.eye(4).double())[0]
        return (x @ inverse).square().mean() + logarithm + determinant * 0.1


def test_what_factorizes_a_transposed_parameter_equals_one_device() -> None:
    module, twin = Factorized(), Factorized()
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (module, twin))
    training = SimulatedTraining(module, ours, plan="zero3")
    train_eagerly(twin, theirs, batches(4))
    for batch in batches(4):
        training.train(batch)
    found = largest_difference(module, ours, twin, theirs)
    assert float(found.split()[0]) < 1e-12, found


def test_gradients_travel_in_memory_order_without_a_copy_and_during_the_backward_pass() -> None:
    training = _train("adamw_fused", "replicate", options=BuildOptions(bucket_size_mb=1e-3))
    (_, _, (step, _)) = training.graphs[0]
    order = list(step.graph_module.graph.nodes)
    starts = [order.index(n) for n in collectives(step.graph_module.graph)]
    backward = [i for i, n in enumerate(order) if info_of(n).section is Section.BACKWARD]
    assert len(starts) > 3
    assert sum(start < backward[-1] for start in starts) > 2
    copies = [n for n in order[backward[0] :] if n.target is torch.ops.aten.clone.default]
    assert all(info_of(n).section is Section.BACKWARD and info_of(n).source for n in copies)  # the module's own


@pytest.mark.parametrize("plan", PLANS)
def test_reduce_dtype_reaches_gradients_that_travel_permuted(plan: str) -> None:
    module, made = _module("adamw_fused")
    training = SimulatedTraining(module, made, plan=plan, options=BuildOptions(reduce_dtype="bf16"))
    training.train(batches(1)[0])
    (_, _, (step, _)) = training.graphs[0]
    reductions = [n for n in collectives(step.graph_module.graph) if "all_gather" not in str(n.target)]
    moved = {spec_of(n).dtype: 0 for n in reductions}
    for node in reductions:
        moved[spec_of(node).dtype] += spec_of(node.all_input_nodes[0]).numel
    # the loss and the statistics of batch norm stay what they are
    assert moved[torch.float64] < 50 < 300 < moved[torch.bfloat16]


CHANNELS_LAST = TensorSpec((4, 3, 2, 2), (12, 1, 6, 3), torch.float32, torch.device("cpu"))
TRANSPOSED = TensorSpec((4, 6), (1, 4), torch.float32, torch.device("cpu"))


def test_a_piece_lies_as_the_whole_and_a_chunk_with_its_dimension_outermost() -> None:
    axes = meshes_for({"tensor_parallel": (1, 1), "data_parallel": (2, 2)})[0]
    assert local_spec(CHANNELS_LAST, (REPLICATE, CHUNK), axes).stride == (12, 1, 6, 3)
    assert local_spec(TRANSPOSED, (REPLICATE, CHUNK), axes) == dataclasses.replace(
        TRANSPOSED, shape=(2, 6), stride=(6, 1)
    )
    assert local_spec(TRANSPOSED, (Shard(0), REPLICATE), axes).stride == (1, 2)
    assert local_spec(TRANSPOSED, (Shard(1), REPLICATE), axes).stride == (1, 4)
    assert local_spec(TRANSPOSED, (Shard(1), CHUNK), axes).stride == (3, 1)


def test_the_verifier_refuses_lists_that_lie_differently_and_names_the_parameter() -> None:
    module, made = _module("adamw_fused")
    training = SimulatedTraining(module, made, plan="zero2")
    training.train(batches(1)[0])
    (_, _, (step, _)) = training.graphs[0]
    pairs = [pair for node in step.graph_module.graph.nodes for pair in walked(node)]
    gradient = first((g for p, g, *_ in pairs if spec_of(p).shape == (3, 3, 3, 3)), "the convolution's gradient")
    spec = spec_of(gradient)
    assert spec.stride != row_major(spec.shape)
    gradient.meta["val"] = dataclasses.replace(spec, stride=row_major(spec.shape))
    with pytest.raises(
        VerificationError, match=r"_fused_adamw_.* conv.weight of shape \[3, 3, 3, 3\] has strides .* while"
    ):
        verify_sharded(step)
