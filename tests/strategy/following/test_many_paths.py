"""Steps that take many paths (random augmentations in the step): equal, recorded now and then, and told of once."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from lightning_spmd.stages.capture.follow import follower
from lightning_spmd.stages.capture.follow.recorder import Recorder
from tests.strategy.small import Net, Quiet, assert_as_eager

_AUGMENTATIONS = (torch.tanh, torch.sin, torch.cos, torch.abs, torch.relu, torch.sigmoid, torch.neg)


class Augments(Quiet):
    """128 paths."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        for augment in _AUGMENTATIONS:
            if random.random() < 0.5:
                x = augment(x)
        return self.loss((x, y))


class SomeMoreOften(Quiet):
    """Ten paths, two of which most steps take."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        way = batch_idx % 2 if self.global_step >= 20 else self.global_step % 10
        for _ in range(way):
            x = torch.tanh(x)
        return self.loss((x, y))


def test_most_steps_on_new_paths_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = 0
    record = Recorder.record

    def counting(self: Recorder, *args: Any) -> Any:
        nonlocal recorded
        recorded += self.now is None
        return record(self, *args)

    monkeypatch.setattr(Recorder, "record", counting)
    ours = assert_as_eager(Augments, max_epochs=20)
    assert 8 < recorded <= 8 + follower.RECORDED_AT_FIRST + 3
    told = [text for text in ours.warnings if "path that no step took" in text]
    assert not told or len(told) == 1


@pytest.mark.parametrize("make", [SomeMoreOften])
def test_what_steps_take_again_becomes_a_graph(make: type[Net]) -> None:
    assert assert_as_eager(make, max_epochs=10).captures >= 9
