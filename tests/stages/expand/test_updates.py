"""Updates of replicated parameters by gradients that are sums over the ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.simulate import assert_equals_one_device
from tests.helpers.tiny_capture import capture_module

UPDATES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "add_": lambda p, g: p.add_(g, alpha=-0.1),
    "sub_": lambda p, g: p.sub_(g),
    "mul_": lambda p, g: p.mul_(g),
    "div_": lambda p, g: p.div_(g + 1),
    "copy_": lambda p, g: p.copy_(g),
    "addcmul_": lambda p, g: p.addcmul_(g, p),
    "lerp_": lambda p, g: p.lerp_(g, 0.1),
    "gradient changed in place": lambda p, g: p.mul_(g.mul_(2)),
    "list": lambda p, g: torch._foreach_mul_([p], [g]),
}


@pytest.mark.parametrize("name", UPDATES)
def test_a_parameter_stays_whole_on_every_rank(name: str) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    captured, live = capture_module(
        module,
        lambda m, x: (m(x) - x).square().mean(),
        [torch.randn(6, 4)],
        update=lambda ps, gs: [UPDATES[name](p, g) for p, g in zip(ps, gs, strict=True)] and None,
    )
    assert_equals_one_device(captured, live, (3, 3))
