"""Values of metrics that a step keeps: what they are to ``isinstance``, saved, copied, and as a buffer."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor
from torch.nn import functional as F

from tests.strategy.small import Quiet, assert_as_eager


class Keeps(Quiet):
    def __init__(self) -> None:
        super().__init__()
        self.metric = self.made()
        self.kept: list[Any] = []

    def made(self) -> Any:
        return torchmetrics.Accuracy("multiclass", num_classes=3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        scores = self(batch[0])
        value = self.metric(scores.softmax(-1), batch[1])
        self.use(value)
        return F.cross_entropy(scores, batch[1])

    def use(self, value: Any) -> None:
        self.kept.append(value)

    def on_train_epoch_end(self) -> None:
        self.log("kept", self.mean_of(self.kept))
        self.log("tensors", float(sum(isinstance(value, Tensor) for value in self.kept)))
        self.kept.clear()

    def mean_of(self, values: list[Any]) -> Tensor:
        return torch.stack(values).mean()


class Asks(Keeps):
    """In the step."""

    def use(self, value: Any) -> None:
        super().use(value)
        self.log("asked", float(torch.is_tensor(value) and not isinstance(value, dict)))


class Saves(Keeps):
    weights_only = False

    def mean_of(self, values: list[Any]) -> Tensor:
        file = io.BytesIO()
        torch.save(values, file)
        file.seek(0)
        return torch.stack(torch.load(file, weights_only=self.weights_only)).mean()


class SavesWeights(Saves):
    weights_only = True


class Copies(Keeps):
    def mean_of(self, values: list[Any]) -> Tensor:
        return torch.stack(copy.deepcopy(values)).mean()


class Collections(Keeps):
    def made(self) -> Any:
        return torchmetrics.MetricCollection([super().made(), torchmetrics.Recall("multiclass", num_classes=3)])

    def use(self, value: Any) -> None:
        super().use(value)
        self.log("asked", float(isinstance(value, dict) and all(isinstance(each, Tensor) for each in value.values())))

    def mean_of(self, values: list[Any]) -> Tensor:
        file = io.BytesIO()
        torch.save(values, file)
        file.seek(0)
        return torch.stack([each for value in torch.load(file, weights_only=False) for each in value.values()]).mean()


class Buffers(Keeps):
    def use(self, value: Any) -> None:
        super().use(value)
        self.register_buffer("value", value)


@pytest.mark.parametrize("make", [Keeps, Asks, Saves, SavesWeights, Copies, Collections])
def test_values_of_metrics_are_tensors(make: type[Keeps]) -> None:
    assert_as_eager(make, max_epochs=2)


def test_a_value_of_a_metric_as_a_buffer_makes_steps_eager() -> None:
    result = assert_as_eager(Buffers, "eager", max_epochs=2)
    assert any("register value + 0 instead" in text for text in result.warnings)
