"""``x[mask] = number``: every element for itself, so ranks write into their own rows and nothing is gathered."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.helpers.simulate import assert_equals_one_device
from tests.helpers.tiny_capture import capture_function


def _whole(y: Tensor) -> None:
    y[y > 0.5] = 0.0


def _rows(y: Tensor) -> None:
    y[y.sum((1, 2)) > 0] = 2.0


def _columns(y: Tensor) -> None:
    y[:, y[0, :, 0] > 0] = -1.0


def _learned(y: Tensor) -> None:
    y.masked_fill_(y < 0, 0.0)
    y[y > 1] = y.new_tensor([0.25])


@pytest.mark.parametrize("write", [_whole, _rows, _columns, _learned])
def test_a_number_is_written_by_mask_into_a_ranks_own_rows(write: Callable[[Tensor], None]) -> None:
    def function(p: dict[str, Tensor], _: object, x: Tensor) -> Tensor:
        y = x * p["w"]
        write(y)
        return y.square().mean() + y.sum()

    live = {"w": torch.linspace(0.5, 2, 4).requires_grad_()}
    captured, inputs = capture_function(function, live, {}, [torch.randn(7, 3, 4)])
    steps = assert_equals_one_device(captured, inputs, (4, 3))
    gathered = 1 if write is _columns else 0  # which columns, says the first row alone
    assert len(steps[0].fallbacks) <= gathered
