"""Attention over pieces of the sequence: every kind of mask, both ways for keys, kernels that only a GPU has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.long_sequences import CONTEXT_PARALLEL, choose_ring, context_plan, moved
from tests.helpers.simulate import assert_equals_one_device, expand_all
from tests.helpers.tiny_capture import capture_function, capture_module

aten = torch.ops.aten


class Attention(nn.Module):
    """Projections, attention as ``how`` says, a projection."""

    def __init__(self, how: Callable[..., Tensor], groups: int = 4) -> None:
        super().__init__()
        self.how = how
        self.q, self.out = nn.Linear(8, 16), nn.Linear(16, 4)
        self.k, self.v = nn.Linear(8, 4 * groups), nn.Linear(8, 4 * groups)

    def forward(self, x: Tensor, present: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.out(self.how(q, k, v, present).transpose(1, 2).flatten(2))


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **settings: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, mask, **settings)


def _window(length: int) -> Tensor:
    at = torch.arange(length)
    return (at[:, None] - at).abs() < 5


HOW: dict[str, tuple[Callable[..., Tensor], int]] = {
    "causal": (lambda q, k, v, _: _attend(q, k, v, is_causal=True), 4),
    "causal, groups, scale": (lambda q, k, v, _: _attend(q, k, v, is_causal=True, enable_gqa=True, scale=0.3), 2),
    "all": (lambda q, k, v, _: _attend(q, k, v), 4),
    "padding": (lambda q, k, v, present: _attend(q, k, v, present[:, None, None]), 4),
    "padding, groups": (lambda q, k, v, present: _attend(q, k, v, present[:, None, None], enable_gqa=True), 2),
    "window": (lambda q, k, v, _: _attend(q, k, v, _window(q.shape[2])), 4),
    "causal window and padding": (
        lambda q, k, v, present: _attend(q, k, v, _window(q.shape[2]).tril() & present[:, None, None]),
        4,
    ),
    # in the queries' precision: with float32 here torch's kernel is off by 1.4 for 24 keys, not for 8 (2.11 and 2.13)
    "bias": (
        lambda q, k, v, present: _attend(
            q,
            k,
            v,
            (torch.linspace(0, 3, 4).view(4, 1, 1) * torch.arange(q.shape[2]) * present[:, None, None]).double(),
        ),
        4,
    ),
    "one number a query": (lambda q, k, v, present: _attend(q, k, v, present[:, None, :, None]), 4),
}
SHORT = {"causal, groups, scale", "padding", "causal window and padding", "one number a query"}


def attention_step(module: nn.Module, x: Tensor, present: Tensor) -> Tensor:
    return (module(x, present) * torch.linspace(-1, 1, 4)).square().mean()


def captured_attention(how: str, length: int = 24) -> Any:
    torch.manual_seed(0)
    attend, groups = HOW[how]
    present = torch.arange(length) < torch.tensor([[length], [2], [0], [length - 1]])  # the third sees nothing at all
    return capture_module(
        Attention(attend, groups).double(), attention_step, [torch.randn(4, length, 8).double(), present]
    )


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("how", [pytest.param(h, marks=() if h in SHORT else pytest.mark.long) for h in HOW])
def test_equals_one_device_to_the_last_digits(how: str, ring: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    choose_ring(monkeypatch, ring)
    captured, live = captured_attention(how)
    steps = assert_equals_one_device(
        captured, live, {CONTEXT_PARALLEL: (1, 1, 1), "data_parallel": (1, 1)}, plan=context_plan(), rtol=1e-12
    )
    assert steps[0].fallbacks == []
    kinds = {kind for found in moved(steps[0]).values() for kind in found}
    assert ("all_to_all_single" in kinds) == ring


@pytest.mark.parametrize("how", ["causal", "padding"])
def test_pieces_of_unequal_length(how: str) -> None:
    captured, live = captured_attention(how, length=11)
    steps = assert_equals_one_device(
        captured, live, {CONTEXT_PARALLEL: (1, 1, 1), "data_parallel": (1, 3)}, plan=context_plan(), rtol=1e-12
    )
    assert steps[0].axes[0].split == (4, 4, 3)
    assert steps[0].fallbacks == []


def test_dropout_in_attention_draws_on_every_rank_for_its_own_queries() -> None:
    """On the CPU attention with dropout is written out; its numbers are drawn in the stream of the context axis."""
    module = Attention(lambda q, k, v, _: _attend(q, k, v, is_causal=True, dropout_p=0.5))
    captured, _ = capture_module(module, attention_step, [torch.randn(2, 8, 8), torch.ones(2, 8, dtype=torch.bool)])
    (step, *_) = expand_all(captured, {CONTEXT_PARALLEL: (1, 1)}, context_plan())
    draws = [n for n in step.graph_module.graph.nodes if n.meta.get("random") is not None]
    assert [n.meta["random"] for n in draws] == [(CONTEXT_PARALLEL,)]
    assert draws[0].meta["val"].shape == (2, 4, 4, 8)
    assert step.fallbacks == []


# ---------------------------------------------------------------- kernels of GPUs, by their shape functions
def _kernel(name: str, causal: bool, dropout: float) -> Callable[..., Tensor]:
    op = getattr(aten, f"_scaled_dot_product_{name}_attention").default
    return lambda *qkv: op(*qkv, *([] if name == "flash" else [None, True]), dropout, causal)[0]


def captured_kernel(name: str, length: int, *, causal: bool, dropout: float = 0.0) -> Any:
    kernel = _kernel(name, causal, dropout)

    def step(parameters: dict[str, Tensor], _: Any, x: Tensor) -> Tensor:
        heads = (x @ parameters["qkv"]).view(2, length, 3, 4, 8).permute(2, 0, 3, 1, 4)
        return kernel(*heads.unbind(0)).pow(2).mean()

    parameters = {"qkv": torch.randn(8, 3 * 4 * 8, requires_grad=True)}
    return capture_function(step, parameters, {}, [torch.randn(2, length, 8)])[0]


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["flash", "efficient", "cudnn"])
def test_kernels_of_gpus_are_called_on_parts(
    name: str, causal: bool, ring: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rank's program is written with the kernel's own arguments, and its shape function takes the parts."""
    choose_ring(monkeypatch, ring)
    for step in expand_all(captured_kernel(name, 128, causal=causal), {CONTEXT_PARALLEL: (1, 1)}, context_plan()):
        assert step.fallbacks == []
        kernels = [n for n in step.graph_module.graph.nodes if "scaled_dot_product" in str(n.target)]
        assert len(kernels) == (2 * 2 if ring else 2 * (4 if causal else 1))


@pytest.mark.parametrize(
    ("name", "length", "dropout"),
    [("flash", 128, 0.1), ("cudnn", 128, 0.1), ("efficient", 128, 0.1), ("efficient", 72, 0)],
)
def test_a_kernel_that_draws_or_pads_is_not_cut(name: str, length: int, dropout: float) -> None:
    """A kernel's dropout cannot be drawn again in parts; the memory-efficient one pads to multiples of 32 rows."""
    captured = captured_kernel(name, length, causal=False, dropout=dropout)
    (step, *_) = expand_all(captured, {CONTEXT_PARALLEL: (1, 1)}, context_plan())
    assert any(f"_{name}_attention" in line for line in step.fallbacks)
    assert all(("draws the numbers of dropout itself" in line) == (dropout > 0) for line in step.fallbacks)
