"""A GPT over bytes as a plain LightningModule: no tokenizer, no parallel code."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lightning_spmd.examples.checks import check_sizes, check_tokens
from lightning_spmd.examples.language_model import LanguageModel, begin_small

VOCABULARY_SIZE = 256
"""One token for each value of a byte."""


class CausalSelfAttention(nn.Module):
    """Multi-head attention in which a position sees itself and what came before.

    Args:
        width: Features per position.
        heads: Attention heads; divides ``width``.
        dropout: Probability of dropping an attention weight, and a feature of the output.
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Mix positions: ``[batch, length, width]`` → ``[batch, length, width]``."""
        batch, length, width = x.shape
        query, key, value = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=-1)
        )
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        mixed = mixed.transpose(1, 2).reshape(batch, length, width)
        return F.dropout(self.proj(mixed), self.dropout, self.training)


class MLP(nn.Module):
    """Two linear layers with a GELU between them, four times wider inside.

    Args:
        width: Features per position.
        dropout: Probability of dropping a feature of the output.
        gelu: ``"tanh"`` for the approximation that GPT-2 has.
    """

    def __init__(self, width: int, dropout: float, gelu: str = "none") -> None:
        super().__init__()
        self.dropout = dropout
        self.gelu = gelu
        self.up = nn.Linear(width, 4 * width)
        self.proj = nn.Linear(4 * width, width)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Transform each position by itself: ``[..., width]`` → ``[..., width]``."""
        return F.dropout(self.proj(F.gelu(self.up(x), approximate=self.gelu)), self.dropout, self.training)


class Block(nn.Module):
    """A pre-norm transformer block.

    Args:
        width: Features per position.
        heads: Attention heads; divides ``width``.
        dropout: Probability of dropping an attention weight or a feature.
        gelu: ``"tanh"`` for the approximation that GPT-2 has.
    """

    def __init__(self, width: int, heads: int, dropout: float, gelu: str = "none") -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = CausalSelfAttention(width, heads, dropout)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = MLP(width, dropout, gelu)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Add what attention and the MLP say: ``[batch, length, width]`` → the same shape."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """The network without its training: bytes → scores of the next byte.

    Args:
        width: Features per position.
        layers: Number of blocks.
        heads: Attention heads of each block; divides ``width``.
        sequence_length: The longest input, in bytes.
        dropout: Probability of dropping an attention weight or a feature.
        tie_embeddings: Whether the output layer's weight is the embedding's.
    """

    def __init__(
        self, width: int, layers: int, heads: int, sequence_length: int, dropout: float, tie_embeddings: bool
    ) -> None:
        super().__init__()
        self.dropout = dropout
        self.byte_embedding = nn.Embedding(VOCABULARY_SIZE, width)
        self.position_embedding = nn.Embedding(sequence_length, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY_SIZE, bias=False)
        begin_small(self, layers)
        if tie_embeddings:
            self.head.weight = self.byte_embedding.weight

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        """Score the next byte at every position: int64 ``[batch, length]`` → ``[batch, length, 256]``."""
        positions = self.position_embedding.weight[: tokens.shape[1]]
        x = F.dropout(self.byte_embedding(tokens) + positions, self.dropout, self.training)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class GPTBytes(LanguageModel):
    """A byte-level GPT with AdamW, linear warmup and cosine decay.

    Logs ``train_loss`` (nats per byte) at every step and ``val_bits_per_byte`` at every validation. Batches are dicts
    ``{"inputs", "targets"}`` of int64 ``[batch, length]``, the targets one byte ahead.

    Args:
        width: Features per position.
        layers: Number of transformer blocks.
        heads: Attention heads of each block; divides ``width``.
        sequence_length: The longest input, in bytes.
        dropout: Probability of dropping an attention weight or a feature.
        tie_embeddings: Whether the output layer's weight is the embedding's.
        learning_rate: The highest learning rate, reached when warmup ends.
        weight_decay: AdamW's decay of matrices; biases and norms are not decayed.
        warmup_steps: Optimizer steps over which the learning rate rises from near zero.
        final_learning_rate_fraction: The share of ``learning_rate`` that the cosine ends at.

    Raises:
        ValueError: If a size is none; if ``heads`` does not divide ``width``; at ``setup``, if the data's sequences are
            longer than ``sequence_length``.
    """

    def __init__(
        self,
        width: int = 128,
        layers: int = 4,
        heads: int = 4,
        sequence_length: int = 128,
        dropout: float = 0.0,
        tie_embeddings: bool = True,
        learning_rate: float = 1e-3,
        weight_decay: float = 0.1,
        warmup_steps: int = 20,
        final_learning_rate_fraction: float = 0.1,
    ) -> None:
        super().__init__(learning_rate, weight_decay, warmup_steps, final_learning_rate_fraction)
        check_sizes(self, dropout, width=width, layers=layers, heads=heads, sequence_length=sequence_length)
        if width % heads != 0:
            raise ValueError(f"GPTBytes(width={width}, heads={heads}): heads must divide width.")
        self.save_hyperparameters()
        self.sequence_length = sequence_length
        self.model = GPT(width, layers, heads, sequence_length, dropout, tie_embeddings)

    @override
    def setup(self, stage: str) -> None:
        check_tokens(self, self.sequence_length, VOCABULARY_SIZE)

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        """Score the next byte at every position: int64 ``[batch, length]`` → ``[batch, length, 256]``."""
        return self.model(tokens)

    @override
    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log_mean("val_bits_per_byte", self.loss(batch) / math.log(2), batch)

    @override
    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log_mean("test_bits_per_byte", self.loss(batch) / math.log(2), batch)

    @override
    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The likeliest next byte at every position, int64 ``[batch, length]``."""
        return self(batch["inputs"]).argmax(-1)

    @torch.no_grad()
    def generate(
        self, prompt: Tensor, length: int, temperature: float = 1.0, generator: torch.Generator | None = None
    ) -> Tensor:
        """Continue a prompt byte by byte, seeing at most the last ``sequence_length`` bytes.

        Args:
            prompt: int64 ``[batch, prompt_length]`` on the module's device; at least one byte.
            length: How many bytes to add.
            temperature: Divides the scores before sampling; 0 takes the likeliest byte.
            generator: Source of random numbers, on the CPU; the global one if ``None``.

        Returns:
            int64 ``[batch, prompt_length + length]``, the prompt included.
        """
        tokens = prompt
        for _ in range(length):
            scores = self(tokens[:, -self.sequence_length :])[:, -1].float()
            if temperature == 0:
                following = scores.argmax(-1, keepdim=True)
            else:
                # Drawn on the CPU, so that a seed gives the same text on every kind of device.
                probabilities = (scores / temperature).softmax(-1).cpu()
                following = torch.multinomial(probabilities, 1, generator=generator).to(tokens.device)
            tokens = torch.cat([tokens, following], dim=1)
        return tokens
