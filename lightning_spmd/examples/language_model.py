"""What the language models here share: the loss, the training step, the optimizer and how weights begin."""

import math

import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from typing_extensions import override

from lightning_spmd.examples.optimization import adamw_with_warmup


class LanguageModel(LightningModule):
    """A model that scores the next token, with AdamW, linear warmup and cosine decay.

    Logs ``train_loss`` (nats per token). Batches are dicts ``{"inputs", "targets"}`` of int64 ``[batch, length]``, the
    targets one token ahead.

    Args:
        learning_rate: The highest learning rate, reached when warmup ends.
        weight_decay: AdamW's decay of matrices and embeddings; biases and norms are not decayed.
        warmup_steps: Optimizer steps over which the learning rate rises from near zero.
        final_learning_rate_fraction: The share of ``learning_rate`` that the cosine ends at.
    """

    def __init__(
        self, learning_rate: float, weight_decay: float, warmup_steps: int, final_learning_rate_fraction: float
    ) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.warmup_steps = warmup_steps
        self.final_learning_rate_fraction = final_learning_rate_fraction

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Mean cross-entropy of the batch's targets, in nats per token."""
        return F.cross_entropy(self(batch["inputs"]).flatten(0, 1), batch["targets"].flatten())

    @override
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True, batch_size=batch["inputs"].shape[0])
        return loss

    def log_mean(self, name: str, value: Tensor, batch: dict[str, Tensor]) -> None:
        """Log the mean of a value over all rows of an evaluation.

        Args:
            name: Of what is logged.
            value: Its mean over the batch.
            batch: The batch.
        """
        self.log(name, value, prog_bar=True, sync_dist=True, batch_size=batch["inputs"].shape[0])

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        return adamw_with_warmup(
            self, self.learning_rate, self.weight_decay, self.warmup_steps, self.final_learning_rate_fraction
        )


def begin_small(network: nn.Module, layers: int) -> None:
    """GPT-2's rule for first weights: what is added to the residual stream shrinks with the number of additions.

    Args:
        network: Its matrices are drawn again, its biases become zero. Layers ``proj`` and ``down`` are those that add.
        layers: Its number of blocks, of two additions each.
    """
    for name, parameter in network.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif parameter.dim() >= 2:
            residual = name.endswith(("proj.weight", "down.weight"))
            nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if residual else 0.02)
