"""What the tests of PyTorch's former ``torch.distributed._spmd`` covered (``CoverageTest``, ``DataParallelTest``).

Operators that depend on the batch in their values, shapes or Python arithmetic: an update on several ranks equals one
device.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.activations import activation_collectives
from tests.helpers.simulate import assert_equals_one_device
from tests.helpers.tiny_capture import capture_module
from tests.stages.expand.test_models import sgd


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.embedding = nn.Embedding(16, 8)
        self.positions = nn.Embedding(16, 8)
        self.norm = nn.LayerNorm(8)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 8))


Step = Callable[[Parts, Tensor], Tensor]
STEPS: dict[str, Step] = {
    "log_softmax": lambda m, x: F.log_softmax(m.linear(x), -1).square().mean(),
    "nll_loss": lambda m, x: F.nll_loss(F.log_softmax(m.linear(x), -1), x.abs().argmax(-1)),
    "replicated embedding": lambda m, x: m.embedding(x.abs().argsort(-1)).square().sum(),
    "position embedding": lambda m, x: (m.linear(x) + m.positions(torch.arange(x.shape[0]) % 16)).square().mean(),
    "factory full": lambda m, x: (m.linear(x) * torch.full(x.shape, 0.5)).square().mean(),
    "factory ones and zeros": lambda m, x: (m.linear(x) * torch.ones(x.shape[0], 1) + torch.zeros_like(x)).sum(),
    "factory arange": lambda m, x: (m.linear(x) * torch.arange(x.shape[1])).square().mean(),
    "numel in arithmetic": lambda m, x: m.linear(x).square().sum() / x.numel(),
    "stride in arithmetic": lambda m, x: m.linear(x).square().sum() / (x.stride(0) + 1),
    "arithmetic on sizes": lambda m, x: m.linear(x).square().sum() / ((x.shape[0] + 2) * 3 - 1),
    "scalar tensor": lambda m, x: m.linear(x).square().mean() * torch.tensor(2.0),
    "stack": lambda m, x: torch.stack([m.linear(x), m.norm(x)], 1).square().mean(),
    "slice": lambda m, x: m.linear(x)[:, 1:7:2].square().mean(),
    "cat of a hundred": lambda m, x: torch.cat([m.linear(x)] * 100, -1).square().mean(),
    "expand": lambda m, x: (m.scale.expand(x.shape[0], 8) * m.linear(x)).square().mean(),
    "repeat": lambda m, x: (m.linear(x).repeat(1, 3) * m.scale.repeat(x.shape[0], 3)).square().mean(),
    "flatten, squeeze, view": lambda m, x: (
        m.linear(x).view(-1, 2, 4).unsqueeze(1).squeeze(1).flatten(1).square().mean()
    ),
    "batch not in front": lambda m, x: m.linear(x.view(-1, 1, 8).transpose(0, 1)).square().mean(),
    "layer norm": lambda m, x: m.norm(m.linear(x)).square().mean(),
    "buffer": lambda m, x: (m.linear(x) * m.scale).square().mean(),
}


@pytest.mark.parametrize("split", [(3, 3), (1, 3, 2)], ids=str)
@pytest.mark.parametrize("name", STEPS)
def test_an_update_equals_one_device(name: str, split: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    captured, live = capture_module(Parts(), STEPS[name], [torch.randn(6, 8)], update=sgd)
    steps = assert_equals_one_device(captured, live, split)
    assert activation_collectives(steps[0]) == []
    assert steps[0].fallbacks == []
