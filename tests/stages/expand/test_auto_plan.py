"""``"auto"`` finds what a person would write, and leaves alone what would gather."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_spmd.parallel.tensor_parallel import resolve_plan
from lightning_spmd.stages.expand.auto_plan import find_plan
from tests.helpers.models import GPT
from tests.helpers.simulate import assert_equals_one_device
from tests.helpers.tiny_capture import capture_module
from tests.helpers.transformers_like import Llama
from tests.stages.expand.test_sharded_state import UPDATES
from tests.stages.expand.test_tensor_parallel import collectives_of, cross_entropy, square, tensor_plan, words


class Vision(nn.Module):
    """Attention as vision models write it: one view into (3, heads, size), then ``unbind``."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.proj = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(b, t, 3, 4, c // 4).permute(2, 0, 3, 1, 4).unbind(0)
        y = (q @ k.transpose(-2, -1) / 2).softmax(-1) @ v
        return x + self.proj(y.transpose(1, 2).reshape(b, t, c))


def plan_of(module: nn.Module, step: Any, batch: list[Tensor], size: int) -> dict[str, Any]:
    return find_plan(capture_module(module, step, batch)[0], size)


GPT_PLAN = {
    "blocks.0.qkv": {"style": "colwise", "parts": 3},
    "blocks.0.proj": "rowwise",
    "blocks.0.up": "colwise",
    "blocks.0.down": "rowwise",
    "tokens": "embedding",
}
MLP_OF_LLAMA = {"blocks.0.gate": "colwise", "blocks.0.up": "colwise", "blocks.0.down": "rowwise"}
LANGUAGE: dict[str, tuple[Any, int, dict[str, Any]]] = {
    "gpt": (lambda: GPT(1), 4, GPT_PLAN | {"head": "loss"}),
    "gpt, tied": (lambda: GPT(1, tied=True), 2, GPT_PLAN),
    "llama": (
        lambda: Llama(1),
        2,
        MLP_OF_LLAMA
        | dict.fromkeys(["blocks.0.q", "blocks.0.k", "blocks.0.v"], "colwise")
        | {"blocks.0.out": "rowwise", "tokens": "embedding", "head": "loss"},
    ),
    "llama, fused": (
        lambda: Llama(1, fused=True),
        2,
        MLP_OF_LLAMA
        | {"blocks.0.qkv": {"style": "colwise", "parts": [64, 16, 16]}, "blocks.0.out": "rowwise"}
        | {"tokens": "embedding", "head": "loss"},
    ),
    "two heads of keys for four ranks": (lambda: Llama(1), 4, MLP_OF_LLAMA | {"tokens": "embedding", "head": "loss"}),
    "seven ranks": (lambda: GPT(1), 7, {}),
}


@pytest.mark.parametrize("name", LANGUAGE)
def test_the_plan_of_a_language_model(name: str) -> None:
    make, size, expected = LANGUAGE[name]
    assert plan_of(make(), cross_entropy, words(), size) == expected


def test_the_found_plan_trains_like_one_device() -> None:
    torch.manual_seed(0)
    module = Llama(1, fused=True)
    captured, live = capture_module(module, cross_entropy, words(), update=UPDATES["lists"])
    plan = tensor_plan(module, find_plan(captured, 2), 2)
    (step, *_) = assert_equals_one_device(captured, live, {"tensor_parallel": (1, 1)}, plan=plan)
    assert step.fallbacks == []


def test_one_view_into_three_parts() -> None:
    torch.manual_seed(0)
    module = Vision()
    captured, live = capture_module(module, square, [torch.randn(4, 5, 16)], update=UPDATES["lists"])
    found = find_plan(captured, 4)
    assert found == {"qkv": {"style": "colwise", "parts": 3}, "proj": "rowwise"}
    (step, *_) = assert_equals_one_device(
        captured, live, {"tensor_parallel": (1,) * 4}, plan=tensor_plan(module, found, 4)
    )
    assert collectives_of(step)[0] == {"all_reduce": 1}
    assert step.fallbacks == []


def _normed(m: Any, x: Tensor) -> Tensor:
    return m["last"](F.layer_norm(m["first"](x), (16,))).square().mean()


def _returned(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    hidden = m["first"](x)
    return m["last"](hidden).square().mean(), hidden


def _gated(m: Any, x: Tensor) -> Tensor:
    """The gate meets a value that is trained and whole: its gradient would have to be gathered."""
    value = (x * m["first"].bias.mean()).tanh()
    return m["last"](torch.sigmoid(m["first"](x)) * value).square().mean()


@pytest.mark.parametrize("step", [_normed, _returned, _gated])
def test_what_would_be_gathered_stays_whole(step: Any) -> None:
    layers = nn.ModuleDict({"first": nn.Linear(16, 16), "last": nn.Linear(16, 16)})
    assert plan_of(layers, step, [torch.randn(4, 16)], 2) == {}


def test_three_layers_make_one_pair() -> None:
    layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    found = plan_of(layers, square, [torch.randn(4, 8)], 2)
    assert found == {"0": "colwise", "2": "rowwise"}
    assert resolve_plan(layers, found, 2).styles == found
