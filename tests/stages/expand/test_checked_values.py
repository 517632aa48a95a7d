"""What checks of values reduce (`torch.distributions` asks of its arguments): numbers move, not rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.activations import activation_collectives
from tests.helpers.simulate import assert_equals_one_device
from tests.helpers.tiny_capture import capture_module

aten = torch.ops.aten


@pytest.mark.parametrize("check", [aten._is_all_true, aten._is_any_true, torch.all, torch.any])
@pytest.mark.parametrize("limit", [-100.0, 0.0, 100.0])
def test_no_row_moves(check: Callable[[Tensor], Tensor], limit: float) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 3)
    captured, live = capture_module(
        nn.Linear(3, 2), lambda m, x: torch.where(check(m(x) > limit), m(x).sum(), m(x).square().mean()), [x]
    )
    steps = assert_equals_one_device(captured, live, (1, 3))
    assert activation_collectives(steps[0]) == []
    assert steps[0].fallbacks == []
