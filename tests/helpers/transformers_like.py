"""A Llama-like model (grouped queries, rotary positions, RMS norms, gated MLP) and transposed projections."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Written out, as model code usually has it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


def rotate(x: Tensor) -> Tensor:
    """Rotary positions of (batch, heads, time, size)."""
    time, size = x.shape[-2:]
    angles = torch.outer(torch.arange(time), 100.0 ** (-torch.arange(0, size, 2) / size))
    cos, sin = (torch.cat([f(angles)] * 2, -1) for f in (torch.cos, torch.sin))
    half = torch.cat([-x[..., size // 2 :], x[..., : size // 2]], -1)
    return x * cos + half * sin


class LlamaBlock(nn.Module):
    """Separate or fused query, key and value; keys and values repeated by the kernel or here."""

    def __init__(self, width: int, heads: int, groups: int, *, gqa: bool, fused: bool) -> None:
        super().__init__()
        self.heads, self.groups, self.gqa, self.size = heads, groups, gqa, width // heads
        self.sizes = [width, groups * self.size, groups * self.size]
        self.first, self.second = RMSNorm(width), nn.RMSNorm(width)
        if fused:
            self.qkv = nn.Linear(width, sum(self.sizes), bias=True)
        else:
            self.q, self.k, self.v = (nn.Linear(width, n, bias=False) for n in self.sizes)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def _projections(self, x: Tensor) -> list[Tensor]:
        flat = self.qkv(x).split(self.sizes, -1) if hasattr(self, "qkv") else (self.q(x), self.k(x), self.v(x))
        return [t.unflatten(-1, (-1, self.size)).transpose(1, 2) for t in flat]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self._projections(self.first(x))
        q, k = rotate(q), rotate(k)
        if not self.gqa:
            k, v = (t.repeat_interleave(self.heads // self.groups, 1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.gqa)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        h = self.second(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    """Tokens → logits."""

    def __init__(
        self,
        layers: int = 2,
        width: int = 64,
        heads: int = 8,
        groups: int = 2,
        *,
        gqa: bool = True,
        fused: bool = False,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(96, width)
        self.blocks = nn.Sequential(*[LlamaBlock(width, heads, groups, gqa=gqa, fused=fused) for _ in range(layers)])
        self.norm, self.head = RMSNorm(width), nn.Linear(width, 96, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.tokens(x))))


class Conv1D(nn.Module):
    """A projection whose weight has shape (in, out), as GPT-2's in Hugging Face's library."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.nf = outputs
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs) * 0.1), nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight)
        return rows.view(*x.shape[:-1], self.nf)
