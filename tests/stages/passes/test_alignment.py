"""Gradients made side by side in one buffer are aligned as tensors of their own would be on their device."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.stages.passes.flat_buffers import SMALLEST_IN_PLACE, Memory, alignment


@pytest.mark.parametrize(("device", "bytes_in_place"), [("cpu", 64), ("cuda:1", 512), ("xpu:0", 512)])
def test_what_would_leave_the_next_one_unaligned_is_not_made_in_place(device: str, bytes_in_place: int) -> None:
    assert alignment(torch.device(device)) == bytes_in_place
    for excess in (0, 64, 128, 512):
        rows = (SMALLEST_IN_PLACE + excess) // 4
        spec = TensorSpec((rows,), (1,), torch.float32, torch.device(device))
        graph = fx.Graph()
        x = graph.placeholder("x")
        made = graph.call_function(torch.ops.aten.mul.Tensor, (x, x))
        start = graph.call_function(torch.ops._c10d_functional.all_reduce.default, (made, "sum", "group"))
        for node in (x, made, start):
            node.meta["val"] = spec
        graph.output(())
        fits = Memory(graph).can_be_made_in_place(made, start, 3, torch.float32)
        assert fits == (excess % bytes_in_place == 0), f"{excess} bytes too many on {device}"
