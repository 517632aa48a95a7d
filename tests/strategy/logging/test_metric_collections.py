"""What metrics return inside training_step may be logged or returned, alone or by the dictionary, or used otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor

from tests.helpers.ranks import RankPool
from tests.helpers.training import InOrder, assert_compiled, assert_equals_one_device
from tests.strategy.small import ROWS, Net, Quiet, assert_as_eager, rows, run

Accuracy = torchmetrics.classification.MulticlassAccuracy


class Named(torchmetrics.Metric):
    """Returns a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, predicted: Tensor, target: Tensor) -> None:
        self.total += predicted.detach().sum()

    def compute(self) -> dict[str, Tensor]:
        return {"total": self.total, "twice": 2 * self.total}


class Collected(Quiet):
    """Logs several metrics in one of the ways below."""

    def __init__(self, way: Callable[[Any, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.way = way
        metrics = {"micro": Accuracy(3, average="micro"), "macro": Accuracy(3), "top2": Accuracy(3, top_k=2)}
        self.collection = torchmetrics.MetricCollection(metrics, prefix="train/", postfix="!")
        self.named = Named()
        self.mixed = torchmetrics.MetricCollection({"plain": Accuracy(3), "named": Named()})

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        scores = self(batch[0])
        loss = torch.nn.functional.cross_entropy(scores, batch[1])
        self.way(self, scores, batch[1])
        return loss


def whole(self: Any, scores: Tensor, target: Tensor) -> None:
    self.log_dict(self.collection(scores, target), on_step=True, on_epoch=True)


def by_item(self: Any, scores: Tensor, target: Tensor) -> None:
    self.log_dict({k.upper(): v for k, v in self.collection(scores, target).items()}, on_epoch=True, prog_bar=True)


def by_name(self: Any, scores: Tensor, target: Tensor) -> None:
    values = self.collection(scores, target)
    assert "train/micro!" in values
    assert len(values) == 3
    self.log("one", values["train/micro!"])
    self.log_dict({**values, "more": scores.mean()})


def computed(self: Any, scores: Tensor, target: Tensor) -> None:
    self.collection.update(scores, target)
    self.log_dict(self.collection.compute())


def itself(self: Any, scores: Tensor, target: Tensor) -> None:
    self.collection.update(scores, target)
    self.log_dict(self.collection, on_step=False, on_epoch=True)


def dictionary(self: Any, scores: Tensor, target: Tensor) -> None:
    self.log_dict(self.named(scores, target), on_epoch=True)


def mixed(self: Any, scores: Tensor, target: Tensor) -> None:
    self.log_dict(self.mixed(scores, target), True, on_epoch=True)


WAYS = [whole, by_item, by_name, computed, itself, dictionary, mixed]


@pytest.mark.parametrize("way", WAYS)
def test_several_metrics_at_once_are_logged_as_eager_training_does(way: Any) -> None:
    result = assert_as_eager(lambda: Collected(way))
    assert max(len(values) for _, values in result.to_logger) > 2


class All(Collected):
    def __init__(self) -> None:
        super().__init__(everything)


def everything(self: Any, scores: Tensor, target: Tensor) -> None:
    whole(self, scores, target)
    self.log_dict(self.named(scores, target), on_step=True, on_epoch=True)


def _run(devices: int) -> Any:
    return run(All, "spmd" if devices > 1 else "auto", devices, data=lambda: InOrder(rows(), 8))


def test_several_ranks_log_the_collections_of_the_global_batch(two_ranks: RankPool) -> None:
    results = two_ranks.run(_run, 2)
    assert_compiled(*results)
    assert_equals_one_device(results, _run(1))


class AlikeByChance(Quiet):
    """In the first batch the best and the two best are right for all rows of rank 0, and not for those of rank 1."""

    def __init__(self) -> None:
        super().__init__()
        metrics = {"best": Accuracy(3), "two best": Accuracy(3, top_k=2)}
        self.collection = torchmetrics.MetricCollection(metrics)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        second = torch.nn.functional.one_hot((y + 1) % 3, 3) * (x[:, :1] < 0)
        self.collection.update(torch.nn.functional.one_hot(y, 3) + 2.0 * second, y)
        self.log_dict(self.collection, on_step=False, on_epoch=True)
        return self.loss(batch)


def _alike_by_chance(devices: int) -> Any:
    samples = rows()
    for i, (x, _) in enumerate(samples[:ROWS]):
        x[0] = 1.0 if i % 2 == 0 else -1.0  # ranks take every other row
    return run(AlikeByChance, "spmd", devices, data=lambda: InOrder(samples, ROWS))


def test_metrics_that_are_alike_on_a_rank_by_chance_are_not_counted_as_one(two_ranks: RankPool) -> None:
    results = two_ranks.run(_alike_by_chance, 2)
    assert_compiled(*results)
    assert_equals_one_device(results, _alike_by_chance(1))


class Returns(Collected):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        scores = self(batch[0])
        values = self.collection(scores, batch[1])
        loss = torch.nn.functional.cross_entropy(scores, batch[1])
        return {"loss": loss, "all": values, "one": values["train/top2!"], "named": self.named(scores, batch[1])}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("one", outputs["one"])
        self.log("all", outputs["all"]["train/micro!"])
        self.log("named", outputs["named"]["twice"])


def test_they_may_be_returned() -> None:
    result = assert_as_eager(lambda: Returns(whole))
    assert {"one", "all", "named"} <= result.to_logger[0][1].keys()


def compared(self: Any, scores: Tensor, target: Tensor) -> None:
    self.log("best", float(self.collection(scores, target)["train/micro!"] == 1.0))


def formatted(self: Any, scores: Tensor, target: Tensor) -> None:
    self.log(f"accuracy of {self.collection(scores, target)['train/micro!']}"[:8], 0.0)


def subtracted(self: Any, scores: Tensor, target: Tensor) -> None:
    self.log("error", 1 - self.collection(scores, target)["train/macro!"])


@pytest.mark.parametrize("way", [compared, formatted, subtracted])
def test_any_other_use_computes_in_the_step(way: Any) -> None:
    assert_as_eager(lambda: Collected(way))


class WrongName(Net):
    def __init__(self) -> None:
        super().__init__()
        self.mixed = torchmetrics.MetricCollection({"named": Named()})

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        scores = self(batch[0])
        self.log("named", self.mixed(scores, batch[1])["named"])
        return super().training_step(batch, batch_idx)


def test_a_name_that_a_collection_turns_out_not_to_have_is_said() -> None:
    with pytest.raises(RuntimeError, match="no value 'named' but 'total', 'twice'"):
        run(WrongName)
