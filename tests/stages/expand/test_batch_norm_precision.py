"""Batch norm of values in half precision: on ranks as on one device, whatever precision weights and statistics have.

On the host torch's shape function gives statistics the values' precision; the kernel takes float32 beside float32
weights, and raised in the first step of `precision="bf16-mixed"` on two CPUs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.simulate import assert_equals_one_device
from tests.helpers.tiny_capture import capture_module


class Normed(nn.Module):
    def __init__(self, mixed: bool, **options: Any) -> None:
        super().__init__()
        self.mixed = mixed
        self.convolution, self.norm = nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4, **options)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.mixed):
            return self.norm(self.convolution(x)).relu()


@pytest.mark.parametrize("mixed", [True, False], ids=["mixed", "true"])
@pytest.mark.parametrize(
    "options",
    [{}, {"affine": False}, {"track_running_stats": False}, {"affine": False, "track_running_stats": False}],
    ids=["all", "no weights", "no running statistics", "neither"],
)
def test_ranks_normalize_as_one_device(mixed: bool, options: dict[str, bool]) -> None:
    torch.manual_seed(0)
    x, weights = torch.randn(6, 1, 8, 8), torch.randn(6, 4, 6, 6)
    module = Normed(mixed, **options)
    if not mixed:
        module, x = module.bfloat16(), x.bfloat16()
    captured, live = capture_module(module, lambda m, x, w: (m(x).float() * w).sum(), [x, weights])
    assert_equals_one_device(captured, live, (4, 2), rtol=3e-2)
