"""Results that are written step by step (`out[:, t] = h`), as recurrent layers by hand do: rows stay where they are.

Autograd's backward of such a write copies the gradient into fresh memory and writes zeros into a view of it.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.activations import activation_collectives
from tests.helpers.simulate import assert_equals_one_device
from tests.helpers.tiny_capture import capture_function, capture_module

STEPS = 3


def _by_steps(h: Tensor) -> Tensor:
    out, state = torch.zeros_like(h), torch.zeros_like(h[:, 0])
    for step in range(STEPS):
        state = 0.5 * state + h[:, step]
        out[:, step] = torch.tanh(state)
    return out


def _backwards(h: Tensor) -> Tensor:
    out, state = h.new_empty(h.shape), torch.zeros_like(h[:, 0])
    for step in reversed(range(STEPS)):
        state = torch.tanh(0.5 * state + h[:, step])
        out[:, step].copy_(state)
    return out


def _halves(h: Tensor) -> Tensor:
    out = torch.empty_like(h)
    out[..., :2], out[..., 2:] = h[..., 2:].sin(), h[..., :2]
    return out


def _copied_and_masked(h: Tensor) -> Tensor:
    out = torch.empty(h.shape)
    out.copy_(h)
    out[:, 0] = 0.0
    out[:, -1].mul_(2.0)
    return out


def _into_a_clone(h: Tensor) -> Tensor:
    out = h.clone()
    out[:, 1:] += h[:, :-1]
    out[:, :, 0].zero_()
    return out


class _Written(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(4, 4), nn.Linear(4, 4)


@pytest.mark.parametrize("write", [_by_steps, _backwards, _halves, _copied_and_masked, _into_a_clone])
def test_no_row_moves(write: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    captured, live = capture_module(
        _Written(), lambda m, x: m.after(write(m.before(x))).square().mean(), [torch.randn(4, STEPS, 4)]
    )
    steps = assert_equals_one_device(captured, live, (1, 3))
    assert activation_collectives(steps[0]) == []


@pytest.mark.parametrize("shape", [(6, 4), (6,)])
def test_a_row_is_written_into_what_sums_over_ranks_were_added_to(shape: tuple[int, ...]) -> None:
    """As a codebook's statistics, which a step writes into a copy until it has read its last value."""

    def function(p: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor) -> Tensor:
        z = x @ p["w"]
        with torch.no_grad():
            sums = buffers["sums"].clone()
            added = torch.tanh(z).sum(0) if len(shape) > 1 else z.sum()
            sums.mul_(0.9).add_(added, alpha=0.1)
            for row in (1, 2):
                sums[row] = z[row].detach() if len(shape) > 1 else 1.0
            buffers["sums"].copy_(sums)
        return z.square().mean()

    live = {"w": torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()}
    captured, inputs = capture_function(function, live, {"sums": torch.ones(shape)}, [torch.randn(8, 3)])
    assert_equals_one_device(captured, inputs, (4, 4))
