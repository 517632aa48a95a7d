"""What is said of a tensor in Python's state that another one replaced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_spmd.strategy import iteration
from tests.strategy.small import Quiet, run


class Replaces(Quiet):
    """A mask on a plain object, replaced after the third batch."""

    def __init__(self) -> None:
        super().__init__()
        self.masks = {"one": torch.ones(3, 3)}

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * self.masks["one"].sum()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.masks["one"] = self.other()

    def other(self) -> Tensor:
        return torch.ones(3, 3).t()


class AsksForGradients(Replaces):
    def other(self) -> Tensor:
        return torch.ones(3, 3, requires_grad=True)


class UnderTwoNames(Replaces):
    """It may be written to by either name: another object under one of them is another program."""

    def __init__(self) -> None:
        super().__init__()
        self.masks["two"] = self.masks["one"]

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * self.masks["two"].mean()

    def other(self) -> Tensor:
        return torch.ones(3, 3)


@pytest.mark.usefixtures("captured_steps")
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (Replaces, "masks['one'] changed: its strides from (3, 1) to (1, 3)"),
        (AsksForGradients, "masks['one'] changed: its requires_grad from False to True"),
        (
            UnderTwoNames,
            "masks['one'] changed: it is another tensor float32[3, 3], and the step reaches the one",
        ),
    ],
)
def test_it_is_said_in_what_they_differ(make: type[Quiet], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(iteration, "tell", told.append)
    run(make, max_epochs=1)
    assert [text for text in told if said in text], told
