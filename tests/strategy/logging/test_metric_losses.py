"""A metric of torchmetrics as the loss, or as a part of it: the graph computes it, and the metric is updated."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torchmetrics
from torch import Tensor
from torch.nn import functional as F
from torchmetrics.utilities import dim_zero_cat

from tests.helpers.ranks import RankPool
from tests.helpers.training import InOrder, Result, assert_compiled, assert_equals_one_device
from tests.strategy.small import ROWS, Net, Quiet, assert_as_eager, rows, run


class Mean(torchmetrics.Metric):
    """As packages write losses that are logged by themselves: sums, a weight of its own, a buffer, a setting."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.sharpness = 1.0
        self.register_buffer("weights", torch.tensor([1.0, 2.0, 0.5]))
        self.add_state("total", default=torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("count", default=torch.tensor(0), dist_reduce_fx="sum")

    def update(self, scores: Tensor, target: Tensor) -> None:
        losses = F.cross_entropy(scores * self.sharpness, target, weight=self.weights, reduction="none")
        self.total += losses.sum()
        self.count += target.numel()

    def compute(self) -> Tensor:
        return self.total / self.count


class Kept(Mean):
    """Keeps all losses, and looks at its whole state in each update."""

    full_state_update = True

    def __init__(self) -> None:
        super().__init__()
        self.add_state("losses", default=[], dist_reduce_fx="cat")

    def update(self, scores: Tensor, target: Tensor) -> None:
        self.losses.append(F.cross_entropy(scores, target, reduction="none"))

    def compute(self) -> Tensor:
        return dim_zero_cat(self.losses).mean()


class Both(Mean):
    """Two values, with names."""

    def compute(self) -> dict[str, Tensor]:
        return {"total": self.total, "mean": super().compute()}


class Prints(Mean):
    """What it prints reads a tensor of it."""

    def extra_repr(self) -> str:
        raise AssertionError(f"somebody prints the metric: {self.weights.tolist()}")


class Returned(Quiet):
    """The metric is the loss, and is logged by itself."""

    kind: type[Mean] = Mean

    def __init__(self) -> None:
        super().__init__()
        self.criterion = self.kind()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.criterion(self(batch[0]), batch[1])
        self.log("loss", self.criterion, on_step=True, on_epoch=True, batch_size=len(batch[0]))
        return loss


class Logged(Returned):
    """Its value is logged, and goes into the loss with another one."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        scores = self(batch[0])
        value = self.criterion(scores, batch[1])
        loss = 0.5 * value + torch.stack([value, scores.square().mean()]).sum() * 0.1 - value.sqrt() / 7
        self.log("value", value)
        return {"loss": loss, "value": value.detach()}


class KeptLosses(Returned):
    kind = Kept


class Collected(Returned):
    """The loss is a sum of values of a collection, which is logged by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.all = torchmetrics.MetricCollection({"kept": Kept(), "mean": Mean()})
        self.range = torchmetrics.MinMaxMetric(torchmetrics.SumMetric())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        scores = self(batch[0])
        values = self.all(scores, batch[1])
        self.log_dict(self.all, on_step=False, on_epoch=True)
        losses = F.cross_entropy(scores, batch[1], reduction="none")  # that none is NaN is read twice
        return values["kept"] + values["mean"] + 0.01 * self.range(losses)["raw"]


class Added(Returned):
    """Its value is the second operand of a call."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        scores = self(batch[0])
        value = self.criterion(scores, batch[1])
        return F.cross_entropy(scores, batch[1]) + value


class Overwritten(Returned):
    """What the metric was given is written over before its value is used, without its gradient."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        scores = self(batch[0])
        given = scores * 1.0
        value = self.criterion(given, batch[1]).detach()
        self.log("loss", self.criterion, on_step=False, on_epoch=True)
        with torch.no_grad():
            given.zero_()
        return F.cross_entropy(scores, batch[1]) * value


class Set(Returned):
    """A setting of the metric that a hook changes."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.criterion.sharpness = 1.0 if self.global_step < 4 else 2.0


class InParts(Returned):
    """A sum of two metrics is no single one: on one device its Python is the step's own from the second step on."""

    def __init__(self) -> None:
        super().__init__()
        self.sum = Mean() + Mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.sum(self(batch[0]), batch[1])


@pytest.mark.parametrize("make", [Returned, Logged, Added, Overwritten, KeptLosses, Set])
def test_one_device_is_bitwise_eager(make: type[Net]) -> None:
    assert_as_eager(make)


class Named(Returned):
    """A metric in the collection names its values itself."""

    def __init__(self) -> None:
        super().__init__()
        self.all = torchmetrics.MetricCollection({"both": Both(), "kept": Kept()})

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss: Any = 0.0
        for name, value in self.all(self(batch[0]), batch[1]).items():
            self.log(name, value, on_step=False, on_epoch=True)
            loss = loss + value
        return loss


@pytest.mark.parametrize("make", [InParts, Named, pytest.param(Collected, marks=pytest.mark.long)])
def test_what_consists_of_metrics_is_the_step_s_own_python(make: type[Net]) -> None:
    assert_as_eager(make)


def _on_ranks(make: type[Net]) -> Result:
    return run(make, "spmd", 2, max_epochs=1)


@pytest.mark.parametrize(
    "make",
    [Returned, Collected, pytest.param(Added, marks=pytest.mark.long), pytest.param(InParts, marks=pytest.mark.long)],
)
def test_ranks_train_by_the_metric_of_the_whole_batch(two_ranks: RankPool, make: type[Net]) -> None:
    ours = two_ranks.run(_on_ranks, make)
    assert_compiled(*ours)
    assert_equals_one_device(ours, run(make, "auto", data=_in_order, max_epochs=1))


class Asked(Returned):
    """What a metric has seen so far lets the step run eagerly, behind a value that becomes the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = torchmetrics.MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        value = self.criterion(self(batch[0]), batch[1])
        self.log("loss", self.criterion, on_step=False, on_epoch=True)
        self.seen.update(batch[0].square())
        return value * float(self.seen.compute())


def test_a_value_has_the_gradient_of_all_ranks_rows_where_a_step_goes_on_eagerly(two_ranks: RankPool) -> None:
    ours = two_ranks.run(_on_ranks, Asked)
    assert [r.mode for r in ours] == ["eager"] * 2
    assert_equals_one_device(ours, run(Asked, "auto", data=_in_order, max_epochs=1))


def _in_order() -> L.LightningDataModule:
    return InOrder(rows(), ROWS, shuffle=False)


class OverwrittenAndRead(Overwritten):
    """The value is read behind the write, and a step that asks what a metric has seen goes on eagerly."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = torchmetrics.MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.seen.update(batch[0].square())
        return loss * float(self.seen.compute())


def test_what_a_metric_was_given_is_what_it_was_where_a_step_goes_on_eagerly() -> None:
    assert_as_eager(OverwrittenAndRead, max_epochs=1)


class ReturnsAnother(Returned):
    """A metric that nobody prints."""

    kind = Prints


def test_no_metric_is_printed_for_its_value() -> None:
    assert_as_eager(ReturnsAnother, max_epochs=1)
