"""What training_step leaves in Python at each step: lists, counters, attributes. Replayed, with real values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.ranks import RankPool
from tests.helpers.training import InOrder, assert_compiled, assert_equals_one_device
from tests.strategy.kinds.optimizers_kinds import Lookahead
from tests.strategy.optimizers import test_loss_scaling
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


class Counts(_Kept):
    """A counter that the loss and a branch depend on, and a hook puts back."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.rate = 0, 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.calls += 1
        self.rate *= 0.99
        loss = self.loss(batch) * (1.0 + 0.01 * self.calls) * self.rate
        if self.calls % 4 == 0:
            loss = loss * 2
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.keep("calls", self.calls)
        self.keep("rate", self.rate)

    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 1:
            self.calls = 1


class CountsAlone(_Kept):
    """A counter that nothing but a hook reads."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.calls += 1
        return self.loss(batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert self.calls == 1 + batch_idx + 6 * self.current_epoch
        assert type(self.calls) is int


class Latest(_Kept):
    """Attributes that are assigned: a tensor, a number of Lightning's, a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.latest: Any = None
        self.index = -1
        self.results: dict[str, Any] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        scores = self(batch[0])
        loss = torch.nn.functional.cross_entropy(scores, batch[1])
        self.latest, self.index = loss.detach(), batch_idx
        self.results["loss"] = loss.detach() * 2
        self.results["scores"] = scores.detach()
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert self.index == batch_idx
        assert float(self.latest) == float(outputs["loss"])
        assert float(self.results["loss"]) == 2 * float(self.latest)
        self.keep("scores", self.results["scores"].square().mean())
        before = getattr(self, "before", None)
        assert before is None or before[0] is not self.latest
        assert before is None or float(before[0]) == before[1]  # nobody writes into what was handed out
        self.before = self.latest, float(self.latest)


class Mean(_Kept):
    """A running mean that begins as a number and scales the loss; on a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.first.mean = 0.0  # type: ignore[assignment]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.first.mean = 0.9 * self.first.mean + 0.1 * loss.detach()  # type: ignore[operator, assignment]
        return loss / (1.0 + self.first.mean)  # type: ignore[operator]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.keep("mean", self.first.mean)


class Tracker:
    """A plain object."""

    def __init__(self) -> None:
        self.count, self.seen = 0, {"batches": 0, "loss": None}


class Plain(_Kept):
    """An object's counter and its dictionary, and one of the class."""

    total = 0

    def __init__(self) -> None:
        super().__init__()
        self.tracker = Tracker()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.tracker.count += 2
        self.tracker.seen["batches"] += 1  # type: ignore[operator]
        self.tracker.seen["loss"] = loss.detach()  # type: ignore[assignment]
        Plain.total += 1
        return loss * (1 + 0.001 * self.tracker.count)

    def on_train_start(self) -> None:
        Plain.total = 0

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        seen = self.tracker.seen
        assert (self.tracker.count, seen["batches"]) == (2 * Plain.total, Plain.total)
        self.keep("total", Plain.total)
        self.keep("loss of the tracker", seen["loss"])


class Toggles(_Kept):
    """Each second step is another one."""

    def __init__(self) -> None:
        super().__init__()
        self.odd = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.odd = not self.odd
        return self.loss(batch) * (2.0 if self.odd else 1.0)


class KeepsItsLoss(_Kept):
    """An attribute that nobody reads, with the loss itself."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.kept = self.loss(batch)
        return self.kept


class Indexes(_Kept):
    """A counter whose very value is taken: no graph holds for another one."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.calls += 1
        return self.loss(batch) * [1.0, 2.0, 3.0, 4.0][self.calls % 4] * len(f"{self.calls:02d}")


class KeepsWeight(_Kept):
    """Memory of the model, which goes on changing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.weight = self.first.weight.detach()
        return self.loss(batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert type(self.weight) is Tensor
        assert self.weight.data_ptr() == self.first.weight.data_ptr()


class CollectsWeights(_Kept):
    """The same in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append({"bias": self.first.bias.detach()[1:]})
        return self.loss(batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert all(torch.equal(item["bias"], self.first.bias[1:]) for item in self.seen)


LISTS = [Outputs, Dictionaries, Privately]
PLACES = [Counts, CountsAlone, Latest, Mean, Plain, Toggles, KeepsItsLoss]


@pytest.mark.parametrize("make", LISTS)
def test_lists_are_filled_each_step(make: Callable[[], Net]) -> None:
    assert_as_eager(make)


@pytest.mark.parametrize("make", PLACES)
def test_places_are_assigned_each_step(make: Callable[[], Net]) -> None:
    assert assert_as_eager(make).captures <= 5


def test_a_number_that_is_taken_as_it_is_is_that_of_the_step() -> None:
    assert_as_eager(Indexes)


@pytest.mark.parametrize("make", [KeepsWeight, CollectsWeights])
def test_memory_of_the_model_that_is_kept_goes_on_changing(make: Callable[[], Net]) -> None:
    assert_as_eager(make)


@pytest.mark.parametrize("make", [Dictionaries, Counts, Latest, Mean])
def test_on_ranks_they_hold_what_one_device_has(make: Callable[[], Net], two_ranks: RankPool) -> None:
    reference = run(make, "auto", data=in_order)
    results = two_ranks.run(run, make, "spmd", 2)
    assert_compiled(*results)
    assert_equals_one_device(results, reference)


class Looking(test_loss_scaling.Half):
    """An optimizer with a counter of its own."""

    def configure_optimizers(self) -> Any:
        return Lookahead(self.parameters(), lr=0.1)


def test_an_optimizers_counter_waits_where_a_step_is_skipped() -> None:
    test_loss_scaling.assert_as_eager("split", make=lambda: Looking("sgd"))
