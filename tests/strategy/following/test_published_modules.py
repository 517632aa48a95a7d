"""What modules that others have published do in their steps, without their packages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from lightning_spmd._private_api import FakeTensorMode
from lightning_spmd.ir.operators.shape_functions import empty_result
from tests.compatibility.measure import Run, watching
from tests.helpers.ranks import RankPool
from tests.helpers.training import InOrder, Result, assert_equals_one_device
from tests.strategy.small import ROWS, Quiet, assert_as_eager, rows, run


class Adding(Quiet):
    """Adds up its loss in a tensor that begins as a number."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = torch.tensor(0.0, device=self.device)
        for power in (1, 2):
            loss += torch.mean(self(batch[0]) ** power)
        self.log("loss", loss.item())
        return {"loss": loss}


class Inferring(Quiet):
    """Meets its weights in inference mode first, makes tensors there, and keeps them."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    @torch.inference_mode()
    def rates(self, scores: Tensor, target: Tensor) -> Tensor:
        right = torch.zeros(3, dtype=torch.long)
        for label in range(3):
            right[label] = ((scores.argmax(1) == target) & (target == label)).sum()
        return right

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.inference_mode():
            before = self(batch[0])
        self.kept.append(self.rates(before, batch[1]))
        return F.cross_entropy(self(batch[0]), batch[1])

    def on_train_epoch_end(self) -> None:
        self.log("right", torch.stack(self.kept).sum().float())
        self.kept.clear()


class Counting(Quiet):
    """Tensors as numbers: of a range, of a size."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        scores = self(batch[0])
        least = batch[1].min() + 2
        positions = torch.arange(least, device=self.device)
        sums = scores.new_zeros(4, 3).index_add(0, batch[1], scores)
        table = torch.zeros((batch[1].max() + 1, 3)).index_add_(0, batch[1], scores)
        return F.cross_entropy(scores, batch[1]) + sums[positions].mean() ** 2 + (table**2).mean()


class Masking(Quiet):
    """NaN among so many rows as the data say."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        scores = self(batch[0])
        chosen = scores[batch[1] > 0]
        positive = chosen.masked_fill(chosen < 0, float("nan"))
        return F.cross_entropy(scores, batch[1]) + positive.nanmean().nan_to_num(0.0)


class Weighted(Metric):
    """A loss that is a metric, and takes targets with their weights."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", default=torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("count", default=torch.tensor(0), dist_reduce_fx="sum")

    def update(self, scores: Tensor, target: Any) -> None:
        labels, weights = target
        self.total = self.total + (F.cross_entropy(scores, labels, reduction="none") * weights).sum()
        self.count = self.count + labels.numel()

    def compute(self) -> Tensor:
        return self.total / self.count


class Both(Metric):
    """Two losses in one."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.losses = [Weighted(), Weighted()]

    def forward(self, *args: Any) -> Tensor:
        return self.losses[0](*args) + 2 * self.losses[1](*args)

    def update(self, *args: Any) -> None:
        for loss in self.losses:
            loss.update(*args)

    def compute(self) -> Tensor:
        return self.losses[0].compute() + 2 * self.losses[1].compute()

    def reset(self) -> None:
        for loss in self.losses:
            loss.reset()


class MetricLoss(Quiet):
    def __init__(self, metric: type[Metric] = Weighted) -> None:
        super().__init__()
        self.metric = metric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        scores = self(batch[0])
        scores.data_ptr()  # so that it is no graph
        loss = self.metric(scores, (batch[1], torch.ones_like(batch[1]) + batch[1]))
        self.log("loss", loss)
        return loss


class Measured(Quiet):
    """Gives a metric what it predicts, and has nothing else of it."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics = MetricCollection([MulticlassAccuracy(3), MulticlassF1Score(3)])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        scores = self(batch[0])
        self.metrics(scores, batch[1])
        self.log_dict(self.metrics)
        return F.cross_entropy(scores, batch[1])


class TwoLosses(MetricLoss):
    def __init__(self) -> None:
        super().__init__(Both)


@pytest.mark.parametrize("make", [MetricLoss, TwoLosses])
def test_a_loss_that_is_a_metric_is_of_all_ranks_in_a_step_that_runs_eagerly(
    make: type[Quiet], two_ranks: RankPool
) -> None:
    reference = run(make, "auto", data=in_order, max_epochs=1, limit_train_batches=2)
    results = two_ranks.run(run, make, "spmd", 2, data=in_order, max_epochs=1, limit_train_batches=2)
    assert results[0].captures == 0
    assert_equals_one_device(results, reference)


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1)])
def test_batch_norm_lies_as_its_kernel_leaves_it(order: tuple[int, ...]) -> None:
    x, vector, aten = torch.randn(4, 7, 7).permute(order), torch.ones(7), torch.ops.aten
    forward = x, vector, vector, vector, vector, True, 0.1, 1e-5
    backward = torch.ones(()).expand_as(x), x, *[vector] * 5, True, 1e-5, [True] * 3
    for op, given in ((aten.native_batch_norm.default, forward), (aten.native_batch_norm_backward.default, backward)):
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(t) if isinstance(t, Tensor) else t for t in given]
            found = empty_result(op, fakes, {})[0].stride()
        assert found == op(*given)[0].stride()


def watched(make: type[Quiet]) -> tuple[Result, Run]:
    with watching(noted := Run()):
        result = run(make, "spmd", 2, data=in_order, max_epochs=1)
    return result, noted


def test_what_a_metric_is_given_stays_on_its_rank(two_ranks: RankPool) -> None:
    reference = run(Measured, "auto", data=in_order, max_epochs=1)
    results, noted = zip(*two_ranks.run(watched, Measured), strict=True)
    assert [run.moved for run in noted] == [[], []]
    assert_equals_one_device(results, reference)


def in_order() -> InOrder:
    return InOrder(rows(), ROWS)


@pytest.mark.parametrize("make", [Adding, Inferring, Counting, Masking])
def test_a_step_is_a_graph(make: type[Quiet], two_ranks: RankPool) -> None:
    reference = assert_as_eager(make, data=in_order, max_epochs=1)
    results, noted = zip(*two_ranks.run(watched, make), strict=True)
    assert results[0].mode == "compiled"
    assert results[0].captures > 0
    assert [text for text in noted[0].told if "eagerly" in text] == []
    assert_equals_one_device(results, reference)
