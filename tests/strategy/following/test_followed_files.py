"""Files of tensors that a followed step writes: what is pickled are values, and the step is a graph all the same."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.strategy.following.test_followed_backward import Noted, assert_same, note


class Saves(Noted):
    """What the step computed, weights and a whole layer go into files, and come out of them."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = self.hidden(batch[0])
        file = io.BytesIO()
        torch.save({"h": h, "mean": h.mean().detach(), "head": self.head.state_dict(), "body": self.body}, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        note((loaded["h"].sum().item(), loaded["h"].requires_grad, type(loaded["body"].weight).__name__))
        note((loaded["mean"].item(), loaded["head"]["bias"].tolist(), loaded["body"].bias.sum().item()))
        return self.loss_of(h, batch[1]) + (self.head.weight - 0.9 * loaded["head"]["weight"]).square().sum()


class Pickles(Noted):
    """One number; and a copy by Python's own means has the same memory."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        seen = pickle.loads(pickle.dumps(loss.detach()))
        scale = loss.detach().clone()
        copy.copy(scale).mul_(2)
        note((seen.item(), scale.item()))
        return loss * seen


@pytest.mark.parametrize("kind", [Saves, Pickles])
def test_what_is_pickled_are_values(kind: type[Noted]) -> None:
    assert_same(kind)
