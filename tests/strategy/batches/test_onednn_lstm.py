"""An LSTM on CPUs is oneDNN's in graphs as in eager training: bitwise on one device, one device's numbers on ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_spmd.ir.operators.onednn_lstm import LSTM_LAYER, LSTM_LAYER_BACKWARD
from tests.helpers.simulate import assert_equals_one_device as assert_simulated
from tests.helpers.tiny_capture import capture_module
from tests.strategy.small import ROWS, Net, assert_as_eager, run

aten = torch.ops.aten


class Recurrent(Net):
    """Two layers both ways with dropout between them; outputs and last states count."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(10, 6, num_layers=2, dropout=0.3, bidirectional=True, batch_first=True)
        self.last = nn.Linear(12, 3)

    def steps(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(x)).unsqueeze(1) * torch.arange(1.0, 6.0, device=x.device).view(1, -1, 1)

    def forward(self, x: Tensor) -> Tensor:
        out, (h, c) = self.rnn(self.steps(x))
        return self.last(out[:, -1]) + h.sum(0)[:, :3] - c[1, :, 3:]


class Plain(Recurrent):
    """Time first, no biases."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(10, 12, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.rnn(self.steps(x).transpose(0, 1))
        return self.last(out.mean(0))


class KeepsItsState(Plain):
    """Truncated backpropagation: the state of a step is the next one's first, without its gradient."""

    state: Any = None

    def forward(self, x: Tensor) -> Tensor:
        out, (h, c) = self.rnn(self.steps(x).transpose(0, 1), self.state)
        self.state = h.detach(), c.detach()
        return self.last(out.mean(0))


class BufferedState(Plain):
    """The same with buffers."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("h", "c"):
            self.register_buffer(name, torch.zeros(1, ROWS, 12))

    def forward(self, x: Tensor) -> Tensor:
        out, (h, c) = self.rnn(self.steps(x).transpose(0, 1), (self.h.clone(), self.c.clone()))
        self.h.copy_(h.detach())
        self.c.copy_(c.detach())
        return self.last(out.mean(0))


class Frozen(Plain):
    """A second LSTM that learns nothing: under no_grad, and only its input has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.LSTM(10, 12), nn.LSTM(12, 12).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            seen, _ = self.encoder(self.steps(x).transpose(0, 1))
        out, _ = self.decoder(seen + self.rnn(self.steps(x).transpose(0, 1))[0])
        return self.last(out.mean(0))


class Twice(Plain):
    """The layer's weights are used twice, and differentiated twice."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].clone().requires_grad_()
        first, state = self.rnn(self.steps(x).transpose(0, 1))
        out, _ = self.rnn(first[:, :, :10], state)
        loss = F.cross_entropy(self.last(out.mean(0)), batch[1])
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + slope.square().sum() + 0.01 * sum(p.square().sum() for p in self.rnn.parameters())


@pytest.mark.parametrize(
    "make",
    [
        Recurrent,
        KeepsItsState,
        *(pytest.param(make, marks=pytest.mark.long) for make in (Plain, BufferedState, Frozen, Twice)),
    ],
)
def test_one_device_has_eager_s_bits(make: type[Net]) -> None:
    """Was eager: 'oneDNN's LSTM on the CPU cannot be captured'."""
    assert_as_eager(make, max_epochs=1)


@pytest.mark.long
@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_half_precision_has_eager_s_bits(precision: Any) -> None:
    try:
        run(Recurrent, "auto", max_epochs=1, precision=precision)
    except RuntimeError as error:
        pytest.skip(f"this processor cannot train the module: {error}")
    assert_as_eager(Recurrent, max_epochs=1, precision=precision)


class BothWays(nn.Module):
    """What ranks split: an LSTM both ways."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(6, 5, num_layers=2, bidirectional=True, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out, (h, _) = self.rnn(x)
        return out[:, -1] + torch.cat([h[0], h[1]], 1)


@pytest.mark.parametrize("split", [(2, 2), (3, 1), (4, 0)])
def test_ranks_have_rows_of_their_own(split: Sequence[int]) -> None:
    captured, live = capture_module(BothWays(), lambda module, x: module(x).square().mean(), [torch.randn(4, 7, 6)])
    assert any(node.target is LSTM_LAYER for node in captured.graph_module.graph.nodes)
    assert_simulated(captured, live, split)


def test_a_workspace_that_was_copied_is_made_again() -> None:
    x, state = torch.randn(7, 4, 6), torch.randn(4, 5)
    weights = torch.randn(20, 6), torch.randn(20, 5), torch.randn(20), torch.randn(20)
    how = (False, [], 2, 5, 1, True, False, False, True)
    *made, workspace = LSTM_LAYER(x, *weights, state, state, *how, True)
    back = (False, 2, 5, 1, True, True, False, [], False)
    operands = (x, *weights, state, state, *made, torch.ones(7, 4, 5), None, None, *back)
    found, again = LSTM_LAYER_BACKWARD(*operands, workspace), LSTM_LAYER_BACKWARD(*operands, workspace.clone())
    whole = aten.mkldnn_rnn_layer(x, *weights, state, state, *how)[3]
    eager = aten.mkldnn_rnn_layer_backward(*operands, whole)
    for one, other, its in zip(found, again, eager, strict=True):
        torch.testing.assert_close(one, its, rtol=0, atol=0)
        torch.testing.assert_close(other, its, rtol=0, atol=0)
