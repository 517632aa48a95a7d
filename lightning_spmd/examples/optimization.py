"""How the language models here are optimized: AdamW that decays matrices only, linear warmup, cosine decay."""

import math

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler


def adamw_with_warmup(
    module: LightningModule,
    learning_rate: float,
    weight_decay: float,
    warmup_steps: int,
    final_learning_rate_fraction: float,
) -> OptimizerLRScheduler:
    """What ``configure_optimizers`` returns.

    Args:
        module: Whose parameters are trained; those that are frozen are left out.
        learning_rate: The highest learning rate, reached when warmup ends.
        weight_decay: Of matrices and embeddings; biases and norms are not decayed.
        warmup_steps: Optimizer steps over which the learning rate rises from near zero.
        final_learning_rate_fraction: The share of ``learning_rate`` that the cosine ends at.
    """
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=learning_rate,
        betas=(0.9, 0.95),
        # Under mixed precision Lightning clips no gradients of fused optimizers, though scaling them is over by then.
        fused=not str(module.trainer.precision).endswith("-mixed"),
    )

    def factor(step: int) -> float:
        # Asked at each step, because only a training that has begun knows how long it will be.
        total = module.trainer.estimated_stepping_batches
        return warmup_then_cosine(step, warmup_steps, total, final_learning_rate_fraction)

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def warmup_then_cosine(step: int, warmup_steps: int, total: float, final_fraction: float) -> float:
    """Factor on the learning rate at an optimizer step: linear warmup, then cosine decay until the last one.

    Args:
        step: How many steps have been taken.
        warmup_steps: After how many the factor is 1.
        total: How many there will be; a training without an end (infinity) stays at 1.
        final_fraction: The factor that the cosine ends at.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if math.isinf(total):
        return 1.0
    progress = min(1.0, (step - warmup_steps) / max(1.0, total - warmup_steps))
    return final_fraction + (1 - final_fraction) * 0.5 * (1 + math.cos(math.pi * progress))
