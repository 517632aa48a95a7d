"""A residual network with batch norm that classifies small images."""

import math

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy
from typing_extensions import override

from lightning_spmd.examples.checks import check_sizes
from lightning_spmd.examples.optimization import warmup_then_cosine


class ResidualBlock(nn.Module):
    """Two convolutions with batch norm, added to what came in.

    Args:
        before: Channels of the input.
        after: Channels of the output.
        stride: 2 halves height and width.
    """

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(after)
        self.second = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(after)
        same = before == after and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(before, after, 1, stride, bias=False)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """``[batch, before, height, width]`` → ``[batch, after, height / stride, width / stride]``."""
        y = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.second_norm(self.second(y)) + self.shortcut(x))


class ImageClassifier(LightningModule):
    """A residual network for images of 16 to 64 pixels, with SGD, linear warmup and cosine decay.

    Logs ``train_loss``, ``val_loss`` and ``val_accuracy``. Batches are pairs of float ``[batch, 3, height, width]`` and
    classes, int64 ``[batch]``. Batch norm takes mean and variance of the whole batch: under ``strategy="spmd"`` of all
    devices' rows together, as on one device.

    Args:
        classes: Number of classes.
        width: Channels of the first stage; each of the two others doubles them and halves height and width.
        blocks: Residual blocks of a stage.
        learning_rate: The highest learning rate, reached after a quarter of the training.
        weight_decay: Of all parameters.
        label_smoothing: Share of the target that goes to all classes alike.

    Raises:
        ValueError: If a size is none; at ``setup``, if the data has another number of classes.
    """

    def __init__(
        self,
        classes: int = 8,
        width: int = 32,
        blocks: int = 2,
        learning_rate: float = 0.1,
        weight_decay: float = 5e-4,
        label_smoothing: float = 0.1,
    ) -> None:
        super().__init__()
        check_sizes(self, classes=classes, width=width, blocks=blocks)
        self.save_hyperparameters()
        self.classes = classes
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.label_smoothing = label_smoothing
        layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        for stage in range(3):
            for block in range(blocks):
                first = block == 0 and stage > 0
                after = width * 2**stage
                layers.append(ResidualBlock(after // 2 if first else after, after, stride=2 if first else 1))
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(width * 4, classes)
        self.accuracy = MulticlassAccuracy(num_classes=classes, average="micro")

    @override
    def setup(self, stage: str) -> None:
        given = getattr(getattr(self.trainer, "datamodule", None), "classes", None)
        if given is not None and len(given) != self.classes:
            raise ValueError(
                f"the data has {len(given)} classes ({', '.join(given[:5])}{', ...' if len(given) > 5 else ''}), and "
                f"model.classes={self.classes}. Set model.classes to {len(given)}."
            )

    @override
    def forward(self, images: Tensor) -> Tensor:
        """Score the classes: float ``[batch, 3, height, width]`` → ``[batch, classes]``."""
        return self.head(self.features(images).mean((2, 3)))

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, classes = batch
        loss = F.cross_entropy(self(images), classes, label_smoothing=self.label_smoothing)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, classes = batch
        scores = self(images)
        self.accuracy(scores, classes)
        self.log("val_loss", F.cross_entropy(scores, classes), sync_dist=True)
        self.log("val_accuracy", self.accuracy, prog_bar=True)

    @override
    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """The likeliest class of each image, int64 ``[batch]``."""
        return self(batch[0]).argmax(-1)

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = torch.optim.SGD(
            self.parameters(), lr=self.learning_rate, momentum=0.9, weight_decay=self.weight_decay, nesterov=True
        )

        def factor(step: int) -> float:
            total = self.trainer.estimated_stepping_batches
            return warmup_then_cosine(step, 0 if math.isinf(total) else int(total) // 4, total, final_fraction=0.0)

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
