"""Networks drawn at random from a seed: chains of operators, in place and through views, with draws and statistics."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_spmd.ir.steps import CapturedStep
from tests.helpers.tiny_capture import capture_module

WIDTH = 16
Choice = Callable[[], Tensor]


class RandomNet(nn.Module):
    """From 6 to 18 operators on earlier results, most of them recent ones.

    Args:
        seed: of the choice.
        ranks: leave out what several ranks have no rule for, and what draws: their draws are of their own.
    """

    def __init__(self, seed: int, *, ranks: bool) -> None:
        super().__init__()
        self.seed, self.ranks = seed, ranks
        self.linear = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(6)])
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(6)])
        self.statistics = nn.ModuleList([nn.BatchNorm1d(WIDTH) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        choose = random.Random(self.seed)
        values = [self.linear[0](x)]
        for _ in range(choose.randint(6, 18)):
            a, b = choose.choice(values[-4:]), choose.choice(values)
            kinds = [self._pure(a, b, choose), self._in_place(a, b)]
            kinds += [] if self.ranks else [self._one_device(a), self._drawing(a)]
            values.append(choose.choice([c for kind in kinds for c in kind])())
        return torch.stack([v.float().sigmoid() for v in values[-3:]]).sum(0)

    def _pure(self, a: Tensor, b: Tensor, choose: random.Random) -> Sequence[Choice]:
        i = choose.randrange(6)
        heads = (a.shape[0], 1, 4, 4)
        return [
            lambda: self.linear[i](a), lambda: self.norms[i](a), lambda: self.statistics[i % 3](a),
            lambda: F.gelu(a), lambda: a + b, lambda: a * b, lambda: torch.sigmoid(a), lambda: F.silu(a),
            lambda: a.softmax(-1), lambda: F.relu(a), lambda: a.exp().clamp(max=3.0), lambda: torch.where(a > 0, a, b),
            lambda: torch.cat([a[:, :8], b[:, 8:]], -1), lambda: a.chunk(2, -1)[0].repeat(1, 2),
            lambda: a.view(-1, 4, 4).transpose(1, 2).reshape(-1, WIDTH), lambda: a.double().square().float(),
            lambda: (a.bfloat16() * b.bfloat16()).float(), lambda: a.unsqueeze(1).expand(-1, 2, -1).mean(1),
            lambda: F.scaled_dot_product_attention(a.view(heads), b.view(heads), a.view(heads)).reshape(-1, WIDTH),
        ]  # fmt: skip

    def _in_place(self, a: Tensor, b: Tensor) -> Sequence[Choice]:
        def through_views() -> Tensor:
            copy = a.clone()
            copy[:, ::2].mul_(2.0)
            copy.view(-1, 2, 8)[:, 0].add_(b[:, :8])
            return copy

        def read_before() -> Tensor:
            value = torch.tanh(a) * 1.0
            value.add_(value.sigmoid())
            return value

        def piece_by_piece() -> Tensor:
            value = torch.zeros_like(a)
            value[:, 1:] = a[:, 1:]
            value[:, 0] = b[:, 0]
            return value

        def filled() -> Tensor:
            value = torch.empty_like(a)
            value.copy_(a).tanh_()
            return value.view(-1, WIDTH) * 2 + value

        return [
            through_views, read_before, piece_by_piece, filled, lambda: a.clone().relu_(),
            lambda: a.clone().mul_(1.5).add_(b), lambda: F.leaky_relu_(a * 1.0, 0.2),
        ]  # fmt: skip

    def _one_device(self, a: Tensor) -> Sequence[Choice]:
        def block(h: Tensor) -> Tensor:
            return torch.tanh(self.linear[1](F.gelu(self.norms[0](h))))

        return [
            lambda: checkpoint(block, a, use_reentrant=False), lambda: F.relu_(self.statistics[0](a)),
            lambda: a.cumsum(0), lambda: a.sort(-1).values,
        ]  # fmt: skip

    def _drawing(self, a: Tensor) -> Sequence[Choice]:
        return [
            lambda: F.dropout(a, 0.3, True), lambda: F.dropout(a.clone(), 0.3, True, inplace=True),
            lambda: a + torch.randn_like(a) * 0.1, lambda: a * torch.bernoulli(torch.full_like(a, 0.6)),
        ]  # fmt: skip


def captured_program(seed: int, *, ranks: bool = False) -> tuple[CapturedStep, list[Tensor]]:
    """The net of a seed with a step of gradient descent."""
    torch.manual_seed(seed)
    net = RandomNet(seed, ranks=ranks)
    return capture_module(net, lambda m, x: m(x).square().mean(), [torch.randn(6, WIDTH)], update=_descend)


def _descend(parameters: list[Tensor], gradients: list[Tensor]) -> None:
    torch._foreach_add_(parameters, gradients, alpha=-0.1)
