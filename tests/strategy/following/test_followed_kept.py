"""Tensors with a history that a followed step keeps: later steps may use their values, and not their history."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.func import vmap

from lightning_spmd.stages.capture.follow.step import Step
from tests.strategy.following.test_followed_backward import Noted, _run, assert_same, note


class UsesTheValue(Noted):
    """The loss and a layer's output are kept as they are, and read in the next step."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.losses = torch.zeros(()), list[Tensor]()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = self.hidden(batch[0])
        loss = self.loss_of(h, batch[1]) + 0.1 * (h.mean() - self.last.detach().mean()).square()
        note((self.last.requires_grad, self.last.grad_fn is None, self.last.is_leaf))
        if self.losses:
            with torch.no_grad():
                note((self.losses[-1] * 2).item())
                note((self.losses[-1] < loss).item())
        self.last = h
        self.losses.append(loss)
        return loss


class UsesTheHistory(UsesTheValue):
    """The last step's output goes into the loss, and nobody thought of its history."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        before = self.last
        self.last = self.hidden(batch[0]) * 1.5
        loss = self.loss_of(self.last, batch[1])
        return loss if before.ndim == 0 else loss + before.sum()


def test_values_of_kept_tensors_are_used() -> None:
    assert_same(UsesTheValue)


def test_a_backward_pass_into_an_earlier_step_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"an earlier step computed \(.*test_followed_kept.py:\d+\)"):
        _run(UsesTheHistory, "spmd")


class AsksForGradients(Noted):
    """Like the first layer of Wav2Vec2: torch never releases what ``__torch_function__`` returns for a setter."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0] * 2
        x.requires_grad = True
        return self.loss_of(self.hidden(x), batch[1])


class Transforms(Noted):
    """Below a transform autograd saves what the step's calls give."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = vmap(self.hidden)(batch[0][:, None])[:, 0]
        return self.loss_of(h, batch[1])


@pytest.mark.parametrize("make", [AsksForGradients, Transforms])
def test_what_nobody_has_is_not_kept(make: type[Noted]) -> None:
    kept = list[int]()

    def counting(step: Step) -> Any:
        found = real(step)
        kept.append(len(found))
        return found

    real = Step.kept
    with mock.patch.object(Step, "kept", counting):
        assert_same(make)
    assert set(kept) == {1}  # the loss
