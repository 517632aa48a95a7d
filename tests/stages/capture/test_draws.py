"""What counts as a draw of random numbers: attention does where it drops something out, and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_spmd.ir.effects import draws_random
from lightning_spmd.stages.runtime.random_streams import draws_numbers
from tests.helpers.tiny_capture import capture_function

aten = torch.ops.aten
KERNELS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "flash": (aten._scaled_dot_product_flash_attention.default, ()),
    "efficient": (aten._scaled_dot_product_efficient_attention.default, (None, True)),
    "cudnn": (aten._scaled_dot_product_cudnn_attention.default, (None, True)),
    "host": (aten._scaled_dot_product_flash_attention_for_cpu.default, ()),
}


def _captured(kernel: str, dropout: float, *, recomputed: bool = False) -> Any:
    op, options = KERNELS[kernel]

    def attention(x: Tensor) -> Tensor:
        return op(x, x, x, *options, dropout, True)[0]

    def step(parameters: dict[str, Tensor], _: Any, x: Tensor) -> Tensor:
        x = x * parameters["scale"]
        return (checkpoint(attention, x, use_reentrant=False) if recomputed else attention(x)).square().mean()

    parameters = {"scale": torch.ones(8, requires_grad=True)}
    return capture_function(step, parameters, {}, [torch.randn(2, 3, 16, 8)])[0].graph_module.graph


def _attention(graph: Any) -> list[Any]:
    return [n for n in graph.nodes if "attention" in str(n.target) and "backward" not in str(n.target)]


@pytest.mark.parametrize("kernel", KERNELS)
def test_attention_without_dropout_draws_nothing(kernel: str) -> None:
    graph = _captured(kernel, 0.0)
    assert not any(draws_random(n) for n in graph.nodes)
    assert not draws_numbers(graph)


@pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn"])
def test_attention_with_dropout_draws(kernel: str) -> None:
    assert [draws_random(n) for n in _attention(_captured(kernel, 0.1))] == [True]


@pytest.mark.parametrize("kernel", KERNELS)
def test_activation_checkpointing_makes_attention_without_dropout_again(kernel: str) -> None:
    assert len(_attention(_captured(kernel, 0.0, recomputed=True))) == 2
