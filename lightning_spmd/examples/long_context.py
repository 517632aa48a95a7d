"""A language model for long texts: rotary positions, grouped queries, gated MLPs."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lightning_spmd.examples.checks import check_sizes, check_tokens
from lightning_spmd.examples.language_model import LanguageModel, begin_small


class RotaryAttention(nn.Module):
    """Causal attention in which several heads of queries share one of keys, and positions are angles.

    Args:
        width: Features per position.
        heads: Heads of queries; divides ``width``.
        key_heads: Heads of keys and values; divides ``heads``.
    """

    def __init__(self, width: int, heads: int, key_heads: int) -> None:
        super().__init__()
        self.size = width // heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, key_heads * self.size, bias=False)
        self.value = nn.Linear(width, key_heads * self.size, bias=False)
        self.proj = nn.Linear(width, width, bias=False)

    @override
    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """Mix positions.

        Args:
            x: ``[batch, length, width]``.
            cosines: ``[length, width / heads]``, of the angle of each position.
            sines: Likewise.

        Returns:
            ``[batch, length, width]``.
        """
        query, key, value = (
            layer(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        query, key = (part * cosines + _quarter_turn(part) * sines for part in (query, key))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.proj(mixed.transpose(1, 2).flatten(2))


def _quarter_turn(x: Tensor) -> Tensor:
    """Pairs of features, turned by 90 degrees; a feature's partner is half a head away."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


class RotaryBlock(nn.Module):
    """A pre-norm block of attention and a gated MLP.

    Args:
        width: Features per position.
        attention: Of so many features.
    """

    def __init__(self, width: int, attention: RotaryAttention) -> None:
        super().__init__()
        inner = 8 * width // 3
        self.attention_norm = nn.RMSNorm(width)
        self.attention = attention
        self.mlp_norm = nn.RMSNorm(width)
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    @override
    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """Add what attention and the MLP say: ``[batch, length, width]`` → the same shape."""
        x = x + self.attention(self.attention_norm(x), cosines, sines)
        inner = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(inner)) * self.up(inner))


class LongContextLM(LanguageModel):
    """A byte-level language model that reads tens of thousands of bytes at once.

    Logs ``train_loss`` (nats per byte) and ``val_bits_per_byte``. Batches are dicts ``{"inputs", "targets"}`` of int64
    ``[batch, length]``, the targets one byte ahead. Nothing here knows that a sequence may lie on several devices.

    Args:
        width: Features per position.
        layers: Number of blocks.
        heads: Heads of queries; divides ``width``.
        key_heads: Heads of keys and values; divides ``heads``.
        sequence_length: The longest input, in bytes.
        rotary_base: The slowest angle turns once in about this many positions.
        learning_rate: The highest learning rate, reached when warmup ends.
        weight_decay: AdamW's decay of matrices; norms are not decayed.
        warmup_steps: Optimizer steps over which the learning rate rises from near zero.
        final_learning_rate_fraction: The share of ``learning_rate`` that the cosine ends at.

    Raises:
        ValueError: If a size is none; if ``heads`` does not divide ``width`` into even parts, or ``key_heads`` does not
            divide ``heads``; at ``setup``, if the data's sequences are longer than ``sequence_length``.
    """

    cosines: Tensor
    sines: Tensor

    def __init__(
        self,
        width: int = 1024,
        layers: int = 16,
        heads: int = 16,
        key_heads: int = 4,
        sequence_length: int = 32768,
        rotary_base: float = 500_000.0,
        learning_rate: float = 3e-4,
        weight_decay: float = 0.1,
        warmup_steps: int = 200,
        final_learning_rate_fraction: float = 0.1,
    ) -> None:
        super().__init__(learning_rate, weight_decay, warmup_steps, final_learning_rate_fraction)
        sizes = {"width": width, "layers": layers, "heads": heads, "key_heads": key_heads}
        check_sizes(self, sequence_length=sequence_length, **sizes)
        if width % (2 * heads) or heads % key_heads:
            raise ValueError(
                f"LongContextLM(width={width}, heads={heads}, key_heads={key_heads}): heads must divide width into "
                "even parts, and key_heads must divide heads."
            )
        self.save_hyperparameters()
        self.sequence_length = sequence_length
        self.embedding = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(RotaryBlock(width, RotaryAttention(width, heads, key_heads)) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        begin_small(self, layers)
        size = width // heads
        speeds = rotary_base ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
        angles = torch.arange(sequence_length, dtype=torch.float64)[:, None] * speeds.repeat(2)
        self.register_buffer("cosines", angles.cos().float(), persistent=False)
        self.register_buffer("sines", angles.sin().float(), persistent=False)

    @override
    def setup(self, stage: str) -> None:
        check_tokens(self, self.sequence_length, 256)

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        """Score the next byte at every position: int64 ``[batch, length]`` → ``[batch, length, 256]``."""
        length = tokens.shape[1]
        x = self.embedding(tokens)
        # In the activations' precision, which is bfloat16 under trainer.precision=bf16-true.
        cosines, sines = self.cosines[:length].to(x.dtype), self.sines[:length].to(x.dtype)
        for block in self.blocks:
            x = block(x, cosines, sines)
        return self.head(self.norm(x))

    @override
    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log_mean("val_bits_per_byte", self.loss(batch) / math.log(2), batch)
