"""GPT-2 as a LightningModule: by default the smallest one, of 124 million parameters."""

import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lightning_spmd.examples.checks import check_sizes, check_tokens
from lightning_spmd.examples.gpt_bytes import Block
from lightning_spmd.examples.language_model import LanguageModel, begin_small


class GPT2Network(nn.Module):
    """The network without its training: tokens → scores of the next token.

    Args:
        vocabulary_size: Number of different tokens.
        width: Features per position.
        layers: Number of blocks.
        heads: Attention heads of each block; divides ``width``.
        sequence_length: The longest input, in tokens.
        dropout: Probability of dropping an attention weight or a feature.
    """

    def __init__(
        self, vocabulary_size: int, width: int, layers: int, heads: int, sequence_length: int, dropout: float
    ) -> None:
        super().__init__()
        self.dropout = dropout
        self.token_embedding = nn.Embedding(vocabulary_size, width)
        self.position_embedding = nn.Embedding(sequence_length, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout, gelu="tanh") for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary_size, bias=False)
        begin_small(self, layers)
        self.head.weight = self.token_embedding.weight

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        """Score the next token at every position: int64 ``[batch, length]`` → ``[batch, length, vocabulary_size]``."""
        positions = self.position_embedding.weight[: tokens.shape[1]]
        x = F.dropout(self.token_embedding(tokens) + positions, self.dropout, self.training)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class GPT2(LanguageModel):
    """GPT-2, trained from scratch with AdamW, linear warmup and cosine decay.

    Logs ``train_loss`` and ``val_loss`` (nats per token) and ``val_perplexity``. Batches are dicts
    ``{"inputs", "targets"}`` of int64 ``[batch, length]``, the targets one token ahead. The layers are made in
    ``configure_model``, so that under ``data_parallel: zero3`` no device ever holds all of them.

    Args:
        vocabulary_size: Number of different tokens; 50,257 is that of GPT-2's own tokenizer.
        width: Features per position.
        layers: Number of transformer blocks.
        heads: Attention heads of each block; divides ``width``.
        sequence_length: The longest input, in tokens.
        dropout: Probability of dropping an attention weight or a feature.
        learning_rate: The highest learning rate, reached when warmup ends.
        weight_decay: AdamW's decay of matrices and embeddings; biases and norms are not decayed.
        warmup_steps: Optimizer steps over which the learning rate rises from near zero.
        final_learning_rate_fraction: The share of ``learning_rate`` that the cosine ends at.

    Raises:
        ValueError: If a size is none; if ``heads`` does not divide ``width``; at ``setup``, if the data has more tokens
            than the vocabulary or longer sequences than the positions.
    """

    def __init__(
        self,
        vocabulary_size: int = 50257,
        width: int = 768,
        layers: int = 12,
        heads: int = 12,
        sequence_length: int = 1024,
        dropout: float = 0.0,
        learning_rate: float = 6e-4,
        weight_decay: float = 0.1,
        warmup_steps: int = 700,
        final_learning_rate_fraction: float = 0.1,
    ) -> None:
        super().__init__(learning_rate, weight_decay, warmup_steps, final_learning_rate_fraction)
        sizes = {"width": width, "layers": layers, "heads": heads, "sequence_length": sequence_length}
        check_sizes(self, dropout, vocabulary_size=vocabulary_size, **sizes)
        if width % heads != 0:
            raise ValueError(f"GPT2(width={width}, heads={heads}): heads must divide width.")
        self.save_hyperparameters()
        self.vocabulary_size = vocabulary_size
        self.width = width
        self.layers = layers
        self.heads = heads
        self.sequence_length = sequence_length
        self.dropout = dropout
        self.model: GPT2Network | None = None

    @override
    def configure_model(self) -> None:
        if self.model is None:
            self.model = GPT2Network(
                self.vocabulary_size, self.width, self.layers, self.heads, self.sequence_length, self.dropout
            )

    @override
    def setup(self, stage: str) -> None:
        check_tokens(self, self.sequence_length, self.vocabulary_size)

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        """Score the next token at every position: int64 ``[batch, length]`` → ``[batch, length, vocabulary_size]``."""
        if self.model is None:
            raise RuntimeError("GPT2 has no layers yet: call configure_model() before using it without a Trainer.")
        return self.model(tokens)

    @override
    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log_mean("val_loss", self.loss(batch), batch)

    @override
    def on_validation_epoch_end(self) -> None:
        # Of the mean, once: the mean of the batches' perplexities would be another, larger number.
        mean = self.trainer.callback_metrics["val_loss"]
        self.log("val_perplexity", mean.exp(), sync_dist=True)
