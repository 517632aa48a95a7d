"""Models of the lane that ``tests.helpers.modules`` has not: a recurrent one and a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.helpers.modules import GPT, ConvNet, Llama, SmallModule

EXPERTS = 4


class LSTM(GPT):
    """A language model of one LSTM layer, cuDNN's on GPUs."""

    def __init__(self, width: int = 16, **settings: Any) -> None:
        super().__init__(width=width, **settings)
        self.blocks = _Recurrent(width)


class _Recurrent(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.lstm(x)[0]


class Experts(nn.Module):
    """Each token goes to the best of four experts: sorted by expert, one grouped product, back in order."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, width, 2 * width) / width**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * width, width) / width**0.5)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weight, expert = self.router(flat).softmax(-1).max(-1)
        ids, order = torch.sort(expert)
        ends = torch.histc(ids.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0, dtype=torch.int32)
        rows = flat[order].to(torch.bfloat16)
        hidden = torch._grouped_mm(rows, self.up.to(torch.bfloat16), offs=ends)
        rows = torch._grouped_mm(F.silu(hidden), self.down.to(torch.bfloat16), offs=ends)
        back = torch.argsort(order)
        return x + (rows[back].to(x.dtype) * weight[:, None]).view_as(x)


class MixtureOfExperts(GPT):
    """A GPT block, then experts."""

    def __init__(self, width: int = 16, **settings: Any) -> None:
        super().__init__(width=width, **settings)
        self.blocks.append(Experts(width))


MODELS: dict[str, Callable[..., SmallModule]] = {
    "gpt": GPT,
    "llama": Llama,
    "conv": ConvNet,
    "lstm": LSTM,
    "experts": MixtureOfExperts,
}
