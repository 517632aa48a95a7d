"""The byte-level GPT with a mixture of experts in every block: each byte goes through two of eight MLPs."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lightning_spmd.examples.checks import check_sizes
from lightning_spmd.examples.gpt_bytes import GPTBytes


class Experts(nn.Module):
    """MLPs of one shape, each layer of all of them in one tensor.

    Args:
        width: Features per position.
        experts: How many there are.
        layers: Blocks of the network, for the first weights.
    """

    def __init__(self, width: int, experts: int, layers: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(experts, width, 4 * width))
        self.down = nn.Parameter(torch.empty(experts, 4 * width, width))
        nn.init.normal_(self.up, std=0.02)
        nn.init.normal_(self.down, std=0.02 / math.sqrt(2 * layers))

    @override
    def forward(self, rows: Tensor, expert: Tensor, share: Tensor) -> Tensor:
        """Transform each row by its expert: ``[rows, width]`` → the same shape, times its share ``[rows]``."""
        expert, order = expert.sort()
        counts = torch.histc(expert.float(), len(self.up), 0, len(self.up) - 1)
        ends = counts.cumsum(0, dtype=torch.int32)
        hidden = F.gelu(F.grouped_mm(rows[order], self.up, offs=ends))
        done = F.grouped_mm(hidden, self.down, offs=ends) * share[order].unsqueeze(-1)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device)
        return done[place]


class MixtureOfExperts(nn.Module):
    """Experts of which a router chooses a few for each position, and by how much each counts.

    Args:
        width: Features per position.
        experts: How many there are.
        chosen: How many of them a position goes through.
        layers: Blocks of the network, for the first weights.
    """

    def __init__(self, width: int, experts: int, chosen: int, layers: int) -> None:
        super().__init__()
        self.chosen = chosen
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = Experts(width, experts, layers)
        nn.init.normal_(self.router.weight, std=0.02)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Transform each position by itself: ``[batch, length, width]`` → the same shape."""
        rows = x.reshape(-1, x.shape[-1])
        share, expert = self.router(rows).softmax(-1).topk(self.chosen, -1)
        share = share / share.sum(-1, keepdim=True)
        done = self.experts(rows.repeat_interleave(self.chosen, 0), expert.flatten(), share.flatten())
        return done.view(len(rows), self.chosen, -1).sum(1).view_as(x)


class MixtureBytes(GPTBytes):
    """A :class:`GPTBytes` whose MLPs are mixtures of experts. No byte is dropped, and no expert has a capacity.

    Args:
        width: Features per position.
        layers: Number of transformer blocks.
        heads: Attention heads of each block; divides ``width``.
        sequence_length: The longest input, in bytes.
        experts: Experts of each block.
        experts_per_byte: How many of them a byte goes through.
        learning_rate: The highest learning rate, reached when warmup ends.
        weight_decay: AdamW's decay of matrices.
        warmup_steps: Optimizer steps over which the learning rate rises from near zero.

    Raises:
        ValueError: If a size is none; if there are fewer experts than a byte goes through.
    """

    def __init__(
        self,
        width: int = 128,
        layers: int = 4,
        heads: int = 4,
        sequence_length: int = 128,
        experts: int = 8,
        experts_per_byte: int = 2,
        learning_rate: float = 1e-3,
        weight_decay: float = 0.1,
        warmup_steps: int = 20,
    ) -> None:
        super().__init__(
            width,
            layers,
            heads,
            sequence_length,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            warmup_steps=warmup_steps,
        )
        check_sizes(self, 0.0, experts=experts, experts_per_byte=experts_per_byte)
        if experts < experts_per_byte:
            raise ValueError(f"MixtureBytes(experts={experts}, experts_per_byte={experts_per_byte}): too few experts.")
        self.save_hyperparameters()
        for block in self.model.blocks:
            block.mlp = MixtureOfExperts(width, experts, experts_per_byte, layers)
