"""The first run copies what lies otherwise than it is written, and leaves alone what kernels keep for themselves."""

from __future__ import annotations

import torch
from torch import fx

from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.stages.runtime.first_run import LayoutCheck


def _doubled(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[fx.GraphModule, fx.Node]:
    graph = fx.Graph()
    x = graph.placeholder("x")
    double = graph.call_function(torch.ops.aten.mul.Tensor, (x, 2.0))
    double.meta["val"] = TensorSpec(shape, stride, torch.float32, torch.device("cpu"))
    graph.output((double,))
    return fx.GraphModule(torch.nn.Module(), graph), double


def test_what_lies_otherwise_is_copied() -> None:
    module, double = _doubled((2, 3), (1, 2))
    check = LayoutCheck(module)
    (value,) = check.run(torch.ones(2, 3))
    assert check.repairs == [double]
    assert value.stride() == (1, 2)


def test_what_has_another_shape_is_opaque() -> None:
    """CuDNN keeps bytes for its backward whose number torch's shape functions say is zero."""
    module, _ = _doubled((0,), (1,))
    check = LayoutCheck(module)
    (value,) = check.run(torch.ones(2, 3))
    assert check.repairs == []
    assert value.shape == (2, 3)
