"""A step that looks at a metric behind a call of it: what it sees is what eager training shows, however it looks."""

from __future__ import annotations

import contextlib
import copy
import pickle
from typing import Any

import lightning as L
import pytest
import torch
import torchmetrics
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score, MulticlassPrecision

from tests.helpers.ranks import RankError, RankPool
from tests.helpers.training import Result, deviation
from tests.strategy.small import Net, Quiet, assert_as_eager, run


class Counts(torchmetrics.Metric):
    """A state of each kind, attributes of its own that ``update`` changes, and a setting."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen = 0, {"rows": 0}
        self.add_state("total", default=torch.tensor(0.0), dist_reduce_fx="sum", persistent=True)
        self.add_state("kept", default=[], dist_reduce_fx="cat")

    def update(self, scores: Tensor, target: Tensor) -> None:
        self.calls += 1
        self.seen["rows"] += len(target)
        self.largest = scores.detach().max()
        self.total += scores.detach().square().sum() / 100
        self.kept.append(scores.detach().mean().reshape(1))

    def compute(self) -> Tensor:
        return self.total / max(self.calls, 1)


class Looks(Net):
    """The loss is weighed with what a look gives, so that every parameter tells of it."""

    def __init__(self) -> None:
        super().__init__()
        self.counts, self.mean, self.accuracy = Counts(), torchmetrics.MeanMetric(), MulticlassAccuracy(3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        scores, loss = self(batch[0]), self.loss(batch)
        self.counts.update(scores, batch[1])
        self.mean(loss)
        self.log("mean", self.mean, on_step=True, on_epoch=True)
        found = self.look(scores, batch[1])
        self.log("found", found)
        return loss * (1 + float(found) / 10)

    def look(self, scores: Tensor, target: Tensor) -> Any:
        raise NotImplementedError


class State(Looks):
    def look(self, scores: Tensor, target: Tensor) -> Any:
        return self.mean.mean_value.item()


class StateTensor(Looks):
    """It is no number that is read: the loss is computed with the state."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        scores = self(batch[0])
        self.counts.update(scores, batch[1])
        return self.loss(batch) * (1 + self.counts.total / 100)


class StateDict(Looks):
    def look(self, scores: Tensor, target: Tensor) -> Any:
        return float(self.counts.state_dict()["total"]) + float(self.state_dict()["counts.total"])


class Copied(Looks):
    def look(self, scores: Tensor, target: Tensor) -> Any:
        return float(copy.deepcopy(self.counts).total) + float(copy.copy(self.mean).mean_value)


class Cloned(Looks):
    def look(self, scores: Tensor, target: Tensor) -> Any:
        return float(self.counts.clone().total) + self.counts.clone().update_count


class Pickled(Looks):
    def look(self, scores: Tensor, target: Tensor) -> Any:
        return float(pickle.loads(pickle.dumps(self.counts)).total)


class CopyInUse(Looks):
    """A copy is a metric of its own, also one that was made before any call."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.before, self.both = copy.deepcopy(self.accuracy), copy.copy(self.accuracy)
        return super().training_step(batch, batch_idx)

    def look(self, scores: Tensor, target: Tensor) -> Any:
        self.accuracy.update(scores, target)
        behind = self.accuracy.clone()
        for fresh in (self.before, behind, self.both):
            fresh.reset()
            fresh(scores.detach(), (target + 1) % 3)
        return float(behind.compute()) + float(self.before.tp.sum()) + float(self.accuracy.compute())  # type: ignore[arg-type, union-attr, operator]


class Counted(Looks):
    def look(self, scores: Tensor, target: Tensor) -> Any:
        return self.counts.update_count + self.counts._update_count + 3 * self.mean.update_called


class States(Looks):
    def look(self, scores: Tensor, target: Tensor) -> Any:
        state = self.counts.metric_state
        return float(state["total"]) + float(torch.cat(state["kept"]).sum())


class Listed(Looks):
    def look(self, scores: Tensor, target: Tensor) -> Any:
        return len(list(self.counts.kept)) + float(self.counts.kept[-1])


class Variables(Looks):
    def look(self, scores: Tensor, target: Tensor) -> Any:
        return float(vars(self.counts)["total"]) + float({**vars(self.mean)}["mean_value"])


class Dictionary(Looks):
    def look(self, scores: Tensor, target: Tensor) -> Any:
        return float(dict(self.counts.__dict__.items()).get("total", 0.0)) + self.counts.__dict__.get("calls", 0)


class OwnAttributes(Looks):
    def look(self, scores: Tensor, target: Tensor) -> Any:
        return self.counts.calls + self.counts.seen["rows"] + float(self.counts.largest)


class MadeByUpdate(Looks):
    """There is such an attribute from the first call on."""

    def look(self, scores: Tensor, target: Tensor) -> Any:
        return float(hasattr(self.counts, "largest"))


class Emptied(Looks):
    def look(self, scores: Tensor, target: Tensor) -> Any:
        self.counts.reset()
        before = float(self.counts.total) + self.counts.update_count
        self.counts.update(scores, target)
        return before + float(self.counts.total)


class SetBehind(Looks):
    """What is set behind a call is not undone by it."""

    def look(self, scores: Tensor, target: Tensor) -> Any:
        self.counts.calls = 7
        self.counts.update(scores, target)
        return self.counts.calls


class Merged(Looks):
    def look(self, scores: Tensor, target: Tensor) -> Any:
        other = Counts()
        other.merge_state(self.counts)
        return float(other.total)


class OfItsClass(Looks):
    """A method that is not the metric's own shadow."""

    def look(self, scores: Tensor, target: Tensor) -> Any:
        Counts.reset(self.counts)
        return float(self.counts.total) + len(self.counts.kept)


class Collected(Looks):
    """Of a collection whose metrics share their states, as torchmetrics finds in the first step."""

    def __init__(self) -> None:
        super().__init__()
        of = {"average": "macro", "num_classes": 3}
        self.all = torchmetrics.MetricCollection(
            {"precision": MulticlassPrecision(**of), "f1": MulticlassF1Score(**of), "counts": Counts()}  # type: ignore[arg-type]
        )

    def look(self, scores: Tensor, target: Tensor) -> Any:
        self.all.update(scores, target)
        self.log_dict(self.all)
        return self.all["f1"].tp.sum().item() + float(self.all["counts"].total) + self.all["precision"].update_count


class Wrapped(Looks):
    """What an attribute of a wrapper is not, its metric is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.classes = torchmetrics.ClasswiseWrapper(MulticlassAccuracy(3, average=None))
        self.range = torchmetrics.MinMaxMetric(torchmetrics.MeanMetric())

    def look(self, scores: Tensor, target: Tensor) -> Any:
        self.classes.update(scores, target)
        self.range.update(scores.detach())
        tp = self.classes.tp.sum().item()  # type: ignore[union-attr, operator]
        return tp + float(self.range._base_metric.mean_value) + self.classes.update_count


class AskedWhileLooked(Looks):
    """A wrapper asks its metric for what it has not, also while it is hashed, and that is a look."""

    def __init__(self) -> None:
        super().__init__()
        self.classes = torchmetrics.ClasswiseWrapper(MulticlassAccuracy(3, average=None))

    def look(self, scores: Tensor, target: Tensor) -> Any:
        self.log_dict(self.classes(scores, target))
        self.accuracy(scores, target)
        return self.accuracy.compute().item()


class InAList(Looks):
    """No module of it."""

    def __init__(self) -> None:
        super().__init__()
        self.some = [Counts()]

    def look(self, scores: Tensor, target: Tensor) -> Any:
        self.some[0].update(scores, target)
        return float(self.some[0].total)


class InHook(Looks):
    """A hook looks at it in the middle of the step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        scores = self(batch[0])
        self.counts.update(scores, batch[1])
        handle = self.last.register_forward_pre_hook(lambda *_: setattr(self, "there", float(self.counts.total)))
        loss = self.loss(batch)
        handle.remove()
        return loss * (1 + self.there / 100)


ALL = [
    State, StateTensor, StateDict, Copied, Cloned, Pickled, CopyInUse, Counted, States, Listed, Variables, Dictionary,
    OwnAttributes, MadeByUpdate, Emptied, SetBehind, Merged, OfItsClass, Collected, Wrapped, AskedWhileLooked, InAList,
    InHook,
]  # fmt: skip


@pytest.mark.parametrize("make", ALL)
def test_one_device_is_bitwise_eager(make: type[Net]) -> None:
    assert_as_eager(make, max_epochs=1 if make is CopyInUse else 3)  # each of its steps is a path of its own


class Mistaken(Looks):
    """Accuracy is given too many classes; the step's own ``except`` is over when that is found."""

    def look(self, scores: Tensor, target: Tensor) -> Any:
        with contextlib.suppress(Exception):
            self.accuracy.update(torch.cat([scores, scores], 1), target)
        return 0.0


class LoggedTwice(Looks):
    def look(self, scores: Tensor, target: Tensor) -> Any:
        self.log("twice", scores.mean())
        self.log("twice", scores.mean(), on_step=False, on_epoch=True)
        return 0.0


@pytest.mark.parametrize(("make", "call"), [(Mistaken, "accuracy.update(...)"), (LoggedTwice, "self.log('twice')")])
def test_the_error_of_a_queued_call_names_it(make: type[Net], call: str) -> None:
    with pytest.raises((ValueError, MisconfigurationException)) as raised:
        run(make)
    assert any(f"raised by {call} in the step" in note for note in raised.value.__notes__)


class Watched(Quiet):
    """It keeps what it sees in a step, and what is there when the step is over."""

    def __init__(self) -> None:
        super().__init__()
        self.counts, self.mean = Counts(), torchmetrics.MeanMetric()
        self.seen, self.there = list[Any](), list[Any]()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        scores, loss = self(batch[0]), self.loss(batch)
        self.counts.update(scores, batch[1])
        self.mean(loss)
        self.log("counts", self.counts, on_step=False, on_epoch=True)
        self.look()
        return loss

    def look(self) -> None:
        self.seen.append(self.state())

    def on_train_batch_end(self, *_: Any) -> None:
        self.there.append(self.state())

    def state(self) -> Any:
        own, mean = vars(self.counts), self.mean
        kept = [one.item() for one in own["kept"]]
        return own["total"].item(), kept, own["seen"]["rows"], self.counts.update_count, mean.update_count


class NotLookedAt(Watched):
    def look(self) -> None:
        self.seen.append(None)


def _on_ranks(make: type[Watched], settings: Any) -> tuple[list[Any], list[Any], Result]:
    L.seed_everything(11)
    module = make()
    result = run(lambda: module, settings, 2, max_epochs=2)
    return module.seen, module.there, result


def test_ranks_see_what_a_step_leaves_in_their_metrics(two_ranks: RankPool) -> None:
    """Of its own rows each, as without a look; the step is eager."""
    ours, theirs = (two_ranks.run(_on_ranks, make, "spmd") for make in (Watched, NotLookedAt))
    for (seen, there, result), (_, left, graphs) in zip(ours, theirs, strict=True):
        assert seen == there
        assert graphs.mode == "compiled"
        assert [row[2:] for row in there] == [row[2:] for row in left]
        torch.testing.assert_close([row[:2] for row in there], [row[:2] for row in left])
        assert deviation(result, graphs).weights <= 1e-4
    assert any("metric 'counts' is looked at behind a call of it" in told for told in ours[0][-1].warnings)


def test_ranks_with_parts_of_the_weights_are_told_the_line(two_ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"metric 'counts' is looked at behind a call of it \(.*looked_at\.py:\d+\)"):
        two_ranks.run(_on_ranks, Watched, {"data_parallel": "zero3"})
