"""Every parallel plan gives what one device gives on the global batch."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_spmd import SPMDStrategy
from tests.helpers.modules import OPTIMIZERS, samples
from tests.helpers.ranks import RankError, RankPool
from tests.helpers.training import (
    InOrder,
    TrainingCase,
    assert_bitwise,
    assert_compiled,
    assert_equals_one_device,
    fit,
    one_device,
    train_on,
)

MODELS = ("gpt_tied", "gpt_llama", "conv", "mlp")
RUNS = [(model, "accumulate_clip") for model in MODELS] + [("gpt_tied", "plain")]
PLANS: dict[str, dict[str, Any]] = {
    "zero2": {"data_parallel": "zero2"},
    "zero3": {"data_parallel": "zero3"},
}
HYBRIDS: dict[str, dict[str, Any]] = {
    "hybrid zero2": {"data_parallel": "zero2", "data_parallel_shard_size": 2},
    "hybrid zero3": {"data_parallel": "zero3", "data_parallel_shard_size": 2},
}
"""On four ranks: two rows of two neighbours."""
LAYERS: dict[str, dict[str, Any]] = {
    "gpt_tied": {
        "tokens": "embedding",
        "blocks.*.qkv": {"style": "colwise", "parts": 3},
        "blocks.*.projection": "rowwise",
        "blocks.*.mlp.0": "colwise",
        "blocks.*.mlp.2": "rowwise",
        "head": "loss",
    },
    "gpt_llama": {
        "blocks.*.[qkv]": "colwise",
        "blocks.*.o": "rowwise",
        "blocks.*.gate": "colwise",
        "blocks.*.up": "colwise",
        "blocks.*.down": "rowwise",
    },
    "conv": {"net.0": "colwise", "net.1": "colwise", "net.4": "rowwise"},
    "mlp": {"net.0": "colwise", "net.3": "rowwise"},
}
TENSOR_PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {}),
    "tp2 sequence": (2, {"sequence_parallel": True}),
    "dp2 tp2": (4, {}),
    "zero2 tp2": (4, {"data_parallel": "zero2"}),
    "zero3 tp2": (4, {"data_parallel": "zero3"}),
    "dp2 tp2 sequence": (4, {"sequence_parallel": True}),
}
"""Number of ranks and options; two ranks share each layer."""
_OPTIMIZERS = {"gpt_tied": "adamw_fused", "gpt_llama": "adamw", "conv": "sgd", "mlp": "adamw"}
_SHORT = {
    ("zero2", 2, "gpt_tied", "plain"),
    ("zero2", 2, "conv", "accumulate_clip"),
    ("zero3", 2, "gpt_tied", "plain"),
    ("zero3", 2, "gpt_llama", "accumulate_clip"),
    ("zero3", 4, "conv", "accumulate_clip"),
}


def _cases() -> list[object]:
    return [
        pytest.param(
            plan, ranks, model, option, marks=() if (plan, ranks, model, option) in _SHORT else pytest.mark.long
        )
        for plan in PLANS
        for ranks in (2, 4)
        for model, option in RUNS
        if option != "plain" or ranks == 2
    ]


def _case(request: pytest.FixtureRequest, case: TrainingCase) -> TrainingCase:
    """The long matrix trains longer."""
    return case if request.node.get_closest_marker("long") is None else case.longer()


def _pool(request: pytest.FixtureRequest, ranks: int) -> RankPool:
    return request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[ranks])


@pytest.mark.parametrize(("plan", "ranks", "model", "option"), _cases())
def test_a_plan_equals_one_device(
    request: pytest.FixtureRequest, plan: str, ranks: int, model: str, option: str
) -> None:
    case = _case(request, TrainingCase(model, _OPTIMIZERS[model], option, dropout=0.0, eps=1e-5))
    results = train_on(_pool(request, ranks), case, {**PLANS[plan], "overlap_iterations": True})
    assert_compiled(*results)
    assert_equals_one_device(results, one_device(case))


@pytest.mark.parametrize(
    ("plan", "model", "option"),
    [
        pytest.param(plan, *run, marks=() if (plan, *run) == ("hybrid zero3", *RUNS[-1]) else pytest.mark.long)
        for plan in HYBRIDS
        for run in RUNS
    ],
)
def test_hybrid_sharding_equals_one_device(
    request: pytest.FixtureRequest, four_ranks: RankPool, plan: str, model: str, option: str
) -> None:
    case = _case(request, TrainingCase(model, _OPTIMIZERS[model], option, dropout=0.0, eps=1e-5))
    results = train_on(four_ranks, case, {**HYBRIDS[plan], "overlap_iterations": True})
    assert_compiled(*results)
    assert_equals_one_device(results, one_device(case))


_TENSOR_SHORT = {
    ("tp2", "conv", "accumulate_clip"),
    ("tp2 sequence", "gpt_llama", "accumulate_clip"),
    ("dp2 tp2 sequence", "gpt_tied", "plain"),
    ("zero3 tp2", "mlp", "accumulate_clip"),
}


def tensor_options(plan: str, model: str) -> dict[str, Any]:
    """Options of the strategy for a plan in which two ranks share the layers of a model."""
    return {**TENSOR_PLANS[plan][1], "tensor_parallel_size": 2, "tensor_parallel_plan": LAYERS[model]}


@pytest.mark.parametrize(
    ("plan", "model", "option"),
    [
        pytest.param(plan, model, option, marks=() if (plan, model, option) in _TENSOR_SHORT else pytest.mark.long)
        for plan in TENSOR_PLANS
        for model, option in RUNS
        if option != "plain" or (plan, model, option) in _TENSOR_SHORT
        if "sequence" not in plan or model.startswith("gpt")
    ],
)
def test_a_tensor_parallel_plan_equals_one_device(
    request: pytest.FixtureRequest, plan: str, model: str, option: str
) -> None:
    case = _case(request, TrainingCase(model, _OPTIMIZERS[model], option, dropout=0.0, eps=1e-5))
    options = {**tensor_options(plan, model), "overlap_iterations": True}
    results = train_on(_pool(request, TENSOR_PLANS[plan][0]), case, options)
    assert_compiled(*results)
    assert_equals_one_device(results, one_device(case))


@pytest.mark.parametrize(
    ("plan", "optimizer"),
    [pytest.param("zero3", n, marks=() if n in ("adagrad", "lion") else pytest.mark.long) for n in OPTIMIZERS]
    + [pytest.param("zero2", n, marks=pytest.mark.long) for n in ("adagrad", "lion")],
)
def test_every_optimizer_works_on_chunks(request: pytest.FixtureRequest, plan: str, optimizer: str) -> None:
    """On sizes that the ranks do not divide, with two parameter groups where torch itself takes them."""
    ranks = 2 if request.node.get_closest_marker("long") is None else 4
    groups = optimizer != "adamw_tensor_lr"
    # Rprop looks at signs alone, and a bias in front of batch norm has rounding for a gradient
    model = "mlp" if optimizer == "rprop" else "conv"
    case = TrainingCase(model, optimizer, batches=12, dropout=0.0, eps=1e-4, groups=groups)
    results = train_on(_pool(request, ranks), case, PLANS[plan])
    assert_compiled(*results)
    assert_equals_one_device(results, one_device(case))


@pytest.mark.parametrize("plan", [pytest.param("zero2", marks=pytest.mark.long), "zero3", "tp2 sequence"])
def test_dropout_is_reproducible(two_ranks: RankPool, plan: str) -> None:
    case = TrainingCase("gpt_tied" if "tp2" in plan else "conv", batches=3, dropout=0.3)
    options = PLANS[plan] if plan in PLANS else tensor_options(plan, case.model)
    first, second = train_on(two_ranks, case, options), train_on(two_ranks, case, options)
    for ours, again in zip(first, second, strict=True):
        assert_bitwise(ours, again)


def _stored_bytes(plan: str, devices: int) -> tuple[int, int]:
    """Bytes of parameters and optimizer state that this rank keeps, and that the whole has, in storages."""
    case = TrainingCase("gpt_tied", "adamw", dropout=0.0)
    module, strategy = case.module(), SPMDStrategy(**{**PLANS, **HYBRIDS}[plan])
    _, trainer = fit(module, InOrder(samples(case.model, case.count), case.rows), strategy, devices, max_steps=1)
    states = [v for state in trainer.optimizers[0].state.values() for v in state.values() if isinstance(v, Tensor)]
    tensors = [*module.parameters(), *states]
    mine = {(s := local(t).untyped_storage()).data_ptr(): s.nbytes() for t in tensors}
    return sum(mine.values()), sum(t.numel() * t.element_size() for t in tensors)


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def test_a_rank_keeps_its_part_alone(two_ranks: RankPool, four_ranks: RankPool) -> None:
    numbers = 64 * 2 * 4  # step counts and biases of fewer elements than ranks
    for mine, all_of_it in four_ranks.run(_stored_bytes, "hybrid zero3", 4):
        assert all_of_it / 4 + numbers < mine <= all_of_it / 2 + numbers
    for mine, all_of_it in two_ranks.run(_stored_bytes, "zero3", 2):
        assert mine <= all_of_it / 2 + numbers
    for mine, all_of_it in two_ranks.run(_stored_bytes, "zero2", 2):
        assert mine <= all_of_it / 3 + all_of_it * 2 / 3 / 2 + numbers


def test_parameters_are_dtensors_where_sharded(two_ranks: RankPool) -> None:
    for plan, sharded in (("zero2", False), ("zero3", True)):
        for found in two_ranks.run(_kinds, plan, 2):
            assert found == [sharded] * len(found)


def _kinds(plan: str, devices: int) -> list[bool]:
    case = TrainingCase("gpt_tied", batches=1)
    module = case.module()
    fit(module, InOrder(samples(case.model, 16), 16), SPMDStrategy(**PLANS[plan]), devices, max_steps=1)
    return [isinstance(p, DTensor) for p in module.parameters()]


def test_what_must_run_eagerly_is_refused(two_ranks: RankPool) -> None:
    """LBFGS needs a closure; with sharded state there is no eager path."""
    with pytest.raises(RankError, match="needs training in graphs.* use data_parallel='replicate'"):
        two_ranks.run(_lbfgs, 2)


def _lbfgs(devices: int) -> None:
    case = TrainingCase("mlp", batches=1)
    module = case.module()
    module.configure_optimizers = lambda: torch.optim.LBFGS(module.parameters())  # type: ignore[method-assign]
    fit(module, InOrder(samples(case.model, 16), 16), SPMDStrategy(data_parallel="zero3"), devices, max_steps=1)


def _found_plan(devices: int) -> Any:
    case = TrainingCase("gpt_llama", "adamw", batches=4, dropout=0.0, eps=1e-5)
    strategy = SPMDStrategy(tensor_parallel_size=2, tensor_parallel_plan="auto")
    module = case.module()
    data = InOrder(samples(case.model, case.count), case.rows)
    result, _ = fit(module, data, strategy, devices, **{**case.flags(), "limit_val_batches": 1})
    split = sum(isinstance(p, DTensor) for p in module.parameters())
    return result, strategy.layer_sharing.found, split, strategy.device_mesh.mesh_dim_names


def test_a_plan_is_found(two_ranks: RankPool) -> None:
    """In the first batch's graph; parameters and optimizer are sharded by it and training goes on."""
    reference = one_device(TrainingCase("gpt_llama", "adamw", batches=4, dropout=0.0, eps=1e-5))
    for result, found, split, names in two_ranks.run(_found_plan, 2):
        assert_compiled(result)
        assert {"blocks.0.q", "blocks.0.o", "blocks.0.gate", "blocks.0.down"} <= set(found)
        assert split >= 7  # layers of the block
        assert names == ("data_parallel", "tensor_parallel")
        assert result.losses == pytest.approx(reference.losses, rel=1e-5)


def _other_batches(devices: int) -> None:
    case = TrainingCase("mlp", batches=1)
    strategy = SPMDStrategy(tensor_parallel_size=2, tensor_parallel_plan=LAYERS["mlp"])
    rank = int(os.environ["RANK"])
    fit(case.module(), DataLoader(samples("mlp", 16, seed=rank), batch_size=16), strategy, devices, max_steps=1)


def test_other_batches_for_one_layer_are_refused(two_ranks: RankPool) -> None:
    with pytest.raises(RankError, match="share layers but hold different batches"):
        two_ranks.run(_other_batches, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"tensor_parallel_size": 3, "tensor_parallel_plan": {}},
            "tensor_parallel_size=3 does not divide the 2 devices",
        ),
        ({"tensor_parallel_plan": {"net.7": "colwise"}, "tensor_parallel_size": 2}, "no module matches 'net.7'"),
        ({"tensor_parallel_plan": {"net.0": "columns"}, "tensor_parallel_size": 2}, "unknown style 'columns'"),
        ({"data_parallel_size": 4}, "data_parallel_size=4 is 4"),
        (
            {"data_parallel": "zero3", "data_parallel_shard_size": 3},
            "data_parallel_shard_size=3 is 3 ranks, which do not divide the 2",
        ),
        ({"data_parallel_shard_size": 2}, "'replicate' splits none"),
    ],
)
def test_what_does_not_fit_is_named(two_ranks: RankPool, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RankError, match=message):
        two_ranks.run(_fit_mlp, options, 2)


def _fit_mlp(options: dict[str, Any], devices: int) -> None:
    case = TrainingCase("mlp", batches=1)
    fit(case.module(), InOrder(samples("mlp", 16), 16), SPMDStrategy(**options), devices, max_steps=1)
