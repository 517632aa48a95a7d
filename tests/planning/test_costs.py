"""What operators do and how long messages take, against numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_spmd.cost.hardware import DEVICES, LINKS, Machines
from lightning_spmd.cost.operators import work_of
from tests.helpers.tiny_capture import capture_module


def _work(module: nn.Module, loss: Any, *batch: Tensor) -> dict[str, Any]:
    captured, _ = capture_module(module, loss, batch)
    found: dict[str, Any] = {}
    for node in captured.graph_module.graph.nodes:
        found.setdefault(str(node.target).removesuffix(".default"), work_of(node))
    return found


def test_products_count_two_for_each_multiplication() -> None:
    found = _work(nn.Linear(16, 8), lambda m, x: m(x).sum(), torch.ones(4, 16))
    assert found["aten.addmm"].flops == 2 * 4 * 16 * 8
    assert found["aten.addmm"].bytes == 4 * (4 * 16 + 16 * 8 + 8 + 4 * 8)
    assert found["aten.t"].is_none, "a view moves nothing"
    assert found["aten.sum"].flops == 0


def test_a_convolution_and_its_gradients_count() -> None:
    found = _work(nn.Conv2d(3, 5, 3), lambda m, x: m(x).sum(), torch.ones(2, 3, 8, 8, requires_grad=True))
    forward = 2 * (2 * 5 * 6 * 6) * (3 * 3 * 3)
    assert found["aten.convolution"].flops == forward
    assert found["aten.convolution_backward"].flops >= forward


@pytest.mark.parametrize("causal", [False, True])
def test_attention_counts_half_of_the_scores_if_causal(causal: bool) -> None:
    module = nn.Linear(8, 24)

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        q, k, v = m(x).view(2, 10, 3, 2, 4).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal).sum()

    found = _work(module, loss, torch.ones(2, 10, 8))
    attention = next(work for name, work in found.items() if "dot_product" in name and "backward" not in name)
    backward = next(work for name, work in found.items() if "dot_product" in name and "backward" in name)
    pairs = 2 * 2 * 10 * 10
    assert attention.flops == 2 * pairs * 8 / (2 if causal else 1)
    assert backward.flops == 2.5 * attention.flops


def test_reading_rows_of_a_table_does_not_read_the_table() -> None:
    found = _work(nn.Embedding(1000, 4), lambda m, x: m(x).sum(), torch.zeros(3, dtype=torch.int64))
    assert found["aten.embedding"].bytes == 2 * 3 * 4 * 4


def _machines(within: str = "nvlink4", between: str = "infiniband-ndr") -> Machines:
    return Machines(DEVICES["h100"], 8, 4, LINKS[within], LINKS[between])


@pytest.mark.parametrize(
    ("size", "stride", "link", "bandwidth"),
    [
        (8, 1, "nvlink4", 450e9 * 0.8),  # a node
        (4, 8, "infiniband-ndr", 50e9 * 0.8),  # one device of each node: its own adapter
        (32, 1, "infiniband-ndr", 8 * 40e9),  # all: the eight adapters of a node
        (16, 2, "infiniband-ndr", 4 * 40e9),  # four devices of each node: four adapters
    ],
)
def test_a_group_is_as_fast_as_its_narrowest_link(size: int, stride: int, link: str, bandwidth: float) -> None:
    machines = _machines()
    assert machines.link(size, stride).name == link
    assert machines.bandwidth(size, stride) == pytest.approx(bandwidth)


def test_the_groups_of_a_node_share_its_only_adapter() -> None:
    machines = _machines(between="ethernet-10")
    assert machines.bandwidth(4, 8) == pytest.approx(1.25e9 * 0.8 / 8)
    assert machines.bandwidth(32, 1) == pytest.approx(1.25e9 * 0.8)


def test_a_message_takes_latency_and_bytes_over_bandwidth() -> None:
    machines, link = _machines(), LINKS["nvlink4"]
    seconds = machines.seconds("all_reduce", 1 << 30, 8, 1)
    assert seconds == pytest.approx(link.start + 2 * 3 * link.latency + 2 * 7 / 8 * (1 << 30) / (0.8 * 450e9))
    assert machines.seconds("all_reduce", 1 << 30, 1, 1) == 0.0


def test_every_device_of_the_table_has_a_link_and_a_source() -> None:
    for device in DEVICES.values():
        assert device.link in LINKS
        assert device.source
        assert device.peak(torch.float32) == device.flops["fp32"]
    assert all(link.source for link in LINKS.values())
