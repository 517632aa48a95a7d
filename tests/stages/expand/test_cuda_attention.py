"""CUDA's attention kernels expand without moving activations. Shapes are checked here; numbers need a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_spmd.ir.node_info import spec_of
from tests.helpers.activations import activation_collectives
from tests.helpers.simulate import expand_all
from tests.helpers.tiny_capture import capture_function

ROWS, HEADS, LENGTH, WIDTH = 6, 4, 16, 8
aten = torch.ops.aten


def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return aten._scaled_dot_product_flash_attention.default(q, k, v, 0.0, True)[0]


def efficient(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return aten._scaled_dot_product_efficient_attention.default(q, k, v, None, True, 0.0, True)[0]


def cudnn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return aten._scaled_dot_product_cudnn_attention.default(q, k, v, None, True, 0.0, True)[0]


@pytest.mark.parametrize("split", [(3, 3), (1, 3, 2)], ids=str)
@pytest.mark.parametrize("kernel", [flash, efficient, cudnn])
def test_attention_kernels_of_cuda_stay_on_their_rows(kernel: Any, split: tuple[int, ...]) -> None:
    def step(parameters: dict[str, Tensor], _: Any, x: Tensor) -> Tensor:
        heads = (x @ parameters["qkv"]).view(x.shape[0], LENGTH, 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4)
        return kernel(*heads.unbind(0)).pow(2).mean()

    parameters = {"qkv": torch.randn(8, 3 * HEADS * WIDTH, requires_grad=True)}
    captured, _ = capture_function(step, parameters, {}, [torch.randn(ROWS, LENGTH, 8)])
    for rank, expanded in enumerate(expand_all(captured, split)):
        assert activation_collectives(expanded) == []
        assert expanded.fallbacks == []
        nodes = expanded.graph_module.graph.nodes
        attention = next(n for n in nodes if "scaled_dot_product" in str(n.target))
        backward = next(n for n in nodes if "scaled_dot_product" in str(n.target) and "backward" in str(n.target))
        assert spec_of(attention.all_input_nodes[0]).shape[0] == split[rank]
        assert spec_of(backward.all_input_nodes[0]).shape[0] == split[rank]


def flash_below(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    length = q.shape[1]
    return aten._flash_attention_forward.default(q, k, v, None, None, length, length, 0.0, True, False)[0]


def efficient_below(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return aten._efficient_attention_forward.default(q, k, v, None, None, None, None, None, 0.0, 1, True)[0]


@pytest.mark.parametrize("split", [(3, 3), (1, 3, 2)], ids=str)
@pytest.mark.parametrize("kernel", [flash_below, efficient_below])
def test_the_kernels_below_stay_on_their_rows_too(kernel: Any, split: tuple[int, ...]) -> None:
    def step(parameters: dict[str, Tensor], _: Any, x: Tensor) -> Tensor:
        heads = (x @ parameters["qkv"]).view(x.shape[0], LENGTH, 3, HEADS, WIDTH).unbind(2)
        return kernel(*heads).pow(2).mean()

    parameters = {"qkv": torch.randn(8, 3 * HEADS * WIDTH, requires_grad=True)}
    captured, _ = capture_function(step, parameters, {}, [torch.randn(ROWS, LENGTH, 8)])
    for rank, expanded in enumerate(expand_all(captured, split)):
        assert expanded.fallbacks == []
        assert activation_collectives(expanded) == []
        kernels = [n for n in expanded.graph_module.graph.nodes if "_attention_" in str(n.target)]
        assert {spec_of(n.all_input_nodes[0]).shape[0] for n in kernels} == {split[rank]}
        assert len(kernels) == 2
