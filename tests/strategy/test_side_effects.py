"""What training_step leaves in Python at each step: lists, counters, attributes. Replayed, with real values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.ranks import RankPool
from tests.helpers.training import InOrder, assert_compiled, assert_equals_one_device
from tests.strategy.small import ROWS, Net, Quiet, assert_as_eager, rows, run


def in_order() -> InOrder:
    """The data of several ranks, for one device."""
    return InOrder(rows(), ROWS)


class _Kept(Quiet):
    """Has what the step leaves as weights' neighbours: buffers that hooks write, so that runs can be compared."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, list[float]] = {}

    def keep(self, name: str, value: Any) -> None:
        """Log what a hook sees."""
        self.log(name, value if isinstance(value, Tensor) else float(value))


class Outputs(_Kept):
    """Lightning 2's recipe."""

    def __init__(self) -> None:
        super().__init__()
        self.training_step_outputs: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.training_step_outputs.append(loss)
        return loss

    def on_train_epoch_end(self) -> None:
        assert len(self.training_step_outputs) == 6
        self.keep("mean", torch.stack(self.training_step_outputs).mean())
        self.training_step_outputs.clear()


class Dictionaries(_Kept):
    """Predictions and targets for a metric at the epoch's end, in dictionaries, with what is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        scores = self(batch[0])
        loss = torch.nn.functional.cross_entropy(scores, batch[1])
        self.outputs.append({"scores": scores.detach(), "targets": batch[1], "number": batch_idx, "kind": "train"})
        return {"loss": loss}

    def on_train_epoch_end(self) -> None:
        scores = torch.cat([o["scores"] for o in self.outputs])
        targets = torch.cat([o["targets"] for o in self.outputs])
        assert len(scores) == len(targets) == 48
        assert [(o["number"], o["kind"]) for o in self.outputs] == [(i, "train") for i in range(6)]
        assert len({id(o) for o in self.outputs}) == 6
        self.keep("accuracy", (scores.argmax(-1) == targets).float().mean())
        self.keep("first", scores[:8].mean())
        self.outputs = []


class Privately(_Kept):
    """A list with an underscore, of a submodule, from which a hook takes at each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first._losses: list[Any] = []  # type: ignore[misc]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.first._losses.append(loss.detach())  # type: ignore[union-attr, operator]
        self.first._losses.extend((2 * loss, batch_idx))  # type: ignore[union-attr, operator]
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss, twice, index = self.first._losses  # type: ignore[misc]
        assert float(loss) == float(outputs["loss"])
        assert float(twice) == 2 * float(loss)
        assert index == batch_idx
        self.first._losses.clear()  # type: ignore[union-attr, operator]


@pytest.mark.parametrize("make", [Outputs, Dictionaries, Privately])
def test_lists_are_filled_each_step(make: Callable[[], Net]) -> None:
    assert_as_eager(make)


@pytest.mark.parametrize("make", [Outputs, Dictionaries])
def test_on_ranks_lists_hold_what_one_device_has(make: Callable[[], Net], two_ranks: RankPool) -> None:
    reference = run(make, "auto", data=in_order)
    results = two_ranks.run(run, make, "spmd", 2)
    assert_compiled(*results)
    assert_equals_one_device(results, reference)
