"""Operators of a plan's graph that are measured by themselves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn

from lightning_spmd.cost.hardware import DEVICES, LINKS, Machines
from lightning_spmd.cost.operators import work_of
from lightning_spmd.planning import kernels
from lightning_spmd.planning.kernels import kernel_of, measure_kernels
from lightning_spmd.planning.times import Clock
from tests.helpers.tiny_capture import capture_module

_CPU = Machines(DEVICES["cpu"], 1, 1, LINKS["loopback"])


def _graph() -> fx.Graph:
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2), nn.Conv2d(8, 8, 3, stride=2))

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        return m(x).square().sum()

    captured, _ = capture_module(module, loss, (torch.ones(2, 3, 32, 32),))
    return captured.graph_module.graph


def test_convolutions_are_measured_by_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "SECONDS", 0.0)
    graph = _graph()
    convolutions = [node for node in graph.nodes if work_of(node).kind == "convolution"]
    found = measure_kernels([graph])
    assert len(convolutions) == 6, "three, and the gradients of each"
    assert set(found) == {kernel_of(node) for node in convolutions}
    assert len(found) == 6, "none is as large as another"
    assert all(seconds > 0 for seconds in found.values())


def test_a_clock_goes_by_what_was_measured() -> None:
    nodes = [node for node in _graph().nodes if node.op == "call_function"]
    known = {kernel: float(i + 1) for i, node in enumerate(nodes) if (kernel := kernel_of(node)) is not None}
    clock, without = Clock(_CPU, {}, known), Clock(_CPU, {}, {})
    for node in nodes:
        kernel = kernel_of(node)
        assert clock.of(node) == (without.of(node) if kernel is None else known[kernel])
