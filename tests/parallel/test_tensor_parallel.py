"""A plan applied to a model: what each style splits, and every mistake named before a graph is built."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_spmd.errors import ConfigurationError
from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.ir.placement import REPLICATE, Shard, ShardAxis
from lightning_spmd.ir.signature import GraphInput, GraphOutput, InputRole, OutputRole
from lightning_spmd.parallel.tensor_parallel import TensorParallelPlan, resolve_plan
from tests.helpers.models import GPT
from tests.helpers.transformers_like import Conv1D, Llama

AXIS = ShardAxis("tensor_parallel", 2, 0, "none", (1, 1))


class Stack(nn.Module):
    """Experts as one parameter a layer."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__()
        self.up, self.up_bias = nn.Parameter(torch.zeros(first, 8, 6)), nn.Parameter(torch.zeros(first, 6))
        self.down, self.scale = nn.Parameter(torch.zeros(second, 6, 8)), nn.Parameter(torch.zeros(first))


def placements(module: nn.Module, plan: Any, size: int = 2) -> dict[str, str]:
    """What is not replicated."""
    found = resolve_plan(module, plan, size).placements
    return {name: str(p) for name, p in found.items() if p != REPLICATE}


def test_a_megatron_plan_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = GPT(layers=1, tied=True)
    plan = {
        "blocks.*.qkv": {"style": "colwise", "parts": 3},
        "blocks.*.up": "colwise",
        "blocks.*.proj": "rowwise",
        "blocks.*.down": "rowwise",
        "tokens": "embedding",
    }
    assert placements(model, plan) == {
        "tokens.weight": "S(0)",
        "blocks.0.qkv.weight": "S(0,outer=3)",
        "blocks.0.qkv.bias": "S(0,outer=3)",
        "blocks.0.proj.weight": "S(1)",
        "blocks.0.up.weight": "S(0)",
        "blocks.0.up.bias": "S(0)",
        "blocks.0.down.weight": "S(1)",
        "head.weight": "S(0)",
    }


def test_later_patterns_win() -> None:
    plan = {"blocks.*.up": "colwise", "blocks.1.up": "replicate"}
    assert set(placements(GPT(layers=2), plan)) == {"blocks.0.up.weight", "blocks.0.up.bias"}


def test_a_prefix_stands_before_every_name() -> None:
    resolved = resolve_plan(nn.Sequential(nn.Linear(4, 4)), {"net.0": "colwise"}, 2, prefix="net.")
    assert resolved.placements == {"net.0.weight": Shard(0), "net.0.bias": Shard(0)}


@pytest.mark.parametrize(
    ("module", "entry", "expected"),
    [
        (nn.Linear(8, 12), {"style": "colwise", "parts": [8, 2, 2]}, {"weight": "S(0,outer=(4, 1, 1))"}),
        (nn.Linear(8, 12), {"style": "rowwise", "parts": 2}, {"weight": "S(1,outer=2)"}),
        (nn.Conv2d(4, 8, 3), "colwise", {"weight": "S(0)", "bias": "S(0)"}),
        (nn.Conv3d(4, 8, 3), "rowwise", {"weight": "S(1)"}),
        (nn.Conv1d(4, 8, 3, groups=4), "colwise", {"weight": "S(0)"}),
        (nn.ConvTranspose2d(4, 8, 3), "colwise", {"weight": "S(1)", "bias": "S(0)"}),
        (nn.ConvTranspose2d(4, 8, 3), "rowwise", {"weight": "S(0)"}),
        (Conv1D(12, 8), "colwise", {"weight": "S(1)", "bias": "S(0)"}),
        (Conv1D(8, 8), "rowwise", {"weight": "S(0)"}),
        (nn.BatchNorm2d(6), "colwise", {"weight": "S(0)", "bias": "S(0)", "running_mean": "S(0)"}),
        (nn.Embedding(6, 3), "embedding", {"weight": "S(0)"}),
        (nn.Linear(8, 12), "loss", {"weight": "S(0)", "bias": "S(0)"}),
        (Stack(4, 4), "experts", {"up": "S(0)", "up_bias": "S(0)", "down": "S(0)"}),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else str(value),
)
def test_what_a_style_splits(module: nn.Module, entry: Any, expected: dict[str, str]) -> None:
    found = placements(nn.ModuleDict({"layer": module}), {"layer": entry})
    assert {f"layer.{n}": p for n, p in expected.items()}.items() <= found.items()


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "no such module": ({"block.*.qkv": "colwise"}, "no module matches 'block.\\*.qkv'; near: 'blocks.0.qkv'"),
    "no such style": ({"head": "colwis"}, "unknown style 'colwis'.*colwise, rowwise.*did you mean 'colwise'"),
    "no style": ({"head": {"parts": 3}}, "unknown style None"),
    "no such option": ({"head": {"style": "colwise", "part": 3}}, "'head'.*unknown option 'part'; .*'parts'"),
    "a container": ({"blocks": "colwise"}, "'blocks' \\(Sequential\\).*choose the layers inside"),
    "a vector": ({"norm": "rowwise"}, "'norm' \\(LayerNorm\\).*shape \\[64\\], which is no matrix"),
    "not divisible": ({"head": "colwise"}, "'head'.*tensor_parallel_size=3.*256 output features .*\\[256, 64\\]"),
    "a part is not divisible": (
        {"blocks.*.qkv": {"style": "colwise", "parts": [96, 48, 48]}, "blocks.0.up": {"style": "rowwise", "parts": 2}},
        "a part of 32 of its input features .* cannot be divided by 3",
    ),
    "parts do not add up": ({"head": {"style": "colwise", "parts": [6, 6]}}, "add up to 12, but it has 256"),
    "parts are not equal": ({"head": {"style": "colwise", "parts": 5}}, "are not 5 equal parts"),
    "parts of what": ({"head": {"style": "colwise", "parts": "three"}}, "'parts' must be .* got 'three'"),
    "a sum over groups": ({"grouped": "rowwise"}, "grouped convolution"),
    "groups": ({"grouped": "colwise"}, "its 4 groups are not divisible by 3"),
    "parts of classes": ({"head": {"style": "loss", "parts": 2}}, "the classes are one part"),
    "no experts": ({"head": "experts"}, "'head' \\(Linear\\).*no parameter of its own with one matrix an expert"),
    "experts are not divisible": ({"stack": "experts"}, "'stack'.*its 4 experts .* cannot be divided by 3"),
    "two numbers of experts": ({"odd": "experts"}, "different numbers of experts: 'up' .4, 8, 6., .*'down' .3, 6, 8."),
    "a table with a limit": ({"limited": "embedding"}, "max_norm"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named(mistake: str) -> None:
    plan, message = MISTAKES[mistake]
    model = GPT(layers=1)
    model.grouped = nn.Conv1d(12, 12, 1, groups=4)
    model.stack, model.odd = Stack(4, 4), Stack(4, 3)
    model.limited = nn.Embedding(6, 6, max_norm=1.0)
    with pytest.raises(ConfigurationError, match=message):
        resolve_plan(model, plan, 3)


def test_tied_parameters_need_one_placement() -> None:
    with pytest.raises(ConfigurationError, match="'tokens.weight' and 'head.weight' are one tied parameter"):
        resolve_plan(GPT(layers=1, tied=True), {"tokens": "embedding", "head": "rowwise"}, 2)
    with pytest.raises(ConfigurationError, match="'head.weight' and 'tokens.weight' are one tied parameter"):
        resolve_plan(GPT(layers=1, tied=True), {"head": "replicate", "tokens": "embedding"}, 2)


def test_a_sequence_style_splits_the_sequence_everywhere() -> None:
    assert resolve_plan(Llama(1), {"blocks.*.first": "sequence"}, 2).sequence_parallel
    assert not resolve_plan(Llama(1), {"blocks.*.out": "rowwise"}, 2).sequence_parallel


def test_state_lies_like_its_parameter() -> None:
    plan = TensorParallelPlan(resolve_plan(nn.ModuleDict({"a": nn.Linear(4, 6)}), {"a": "colwise"}, 2))

    def spec(*shape: int) -> TensorSpec:
        return TensorSpec.of(torch.empty(shape))

    entries = {
        "momentum": (InputRole.OPTIMIZER_STATE, ("a.weight", "exp_avg"), spec(6, 4)),
        "gradient": (InputRole.GRADIENT, ("a.weight",), spec(6, 4)),
        "step": (InputRole.OPTIMIZER_STATE, ("a.weight", "step"), spec()),
        "factor": (InputRole.OPTIMIZER_STATE, ("a.weight", "row"), spec(6)),
        "batch": (InputRole.BATCH, (0,), spec(6, 4)),
        "rate": (InputRole.HYPER_PARAMETER, (0, "lr"), 0.1),
    }
    found = {n: plan.input_placement(AXIS, GraphInput(r, k, n, v)) for n, (r, k, v) in entries.items()}
    assert found == dict.fromkeys(entries, REPLICATE) | {"momentum": Shard(0), "gradient": Shard(0)}
    logged = GraphOutput(OutputRole.LOGGED, (0,), "a.weight", spec(6, 4))
    assert plan.output_placement(AXIS, logged, Shard(0)) == REPLICATE
    state = GraphOutput(OutputRole.OPTIMIZER_STATE, ("a.weight", "exp_avg"), "", spec(6, 4))
    assert plan.output_placement(AXIS, state, REPLICATE) == Shard(0)
