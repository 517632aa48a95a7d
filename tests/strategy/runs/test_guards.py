"""Python values that training_step reads: counters cause no graph, decisions and attributes cause the right ones."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.helpers.ranks import RankPool
from tests.helpers.training import InOrder, assert_compiled, assert_equals_one_device
from tests.strategy.small import ROWS, Net, Quiet, assert_as_eager, rows, run


class BatchIndexBranch(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if batch_idx % 3 == 0:
            loss = loss + 0.1 * self.first.weight.square().sum()
        return loss


class BatchIndexArithmetic(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch) * (1.0 + 0.1 * batch_idx)
        self.log("index", batch_idx)
        self.log("half", batch_idx / 2)
        return loss


class GlobalStep(Net):
    """Warms a weight up by the global step, branches on the epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch) * min(1.0, (self.global_step + 1) / 10)
        if self.current_epoch >= 1:
            loss = loss * 0.5
        self.log("step", self.global_step)
        self.log("annealed", torch.tensor(0.5) ** self.current_epoch)
        return loss


class FloatOfStep(Net):
    """``float()`` of a counter gives a plain number."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("step", math.fsum([self.global_step]))
        return self.loss(batch)


class TrainerCounters(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        progress = self.trainer.global_step / self.trainer.estimated_stepping_batches
        return self.loss(batch) * (1 - 0.5 * progress)


@pytest.mark.parametrize(
    ("make", "most"),
    [(BatchIndexBranch, 4), (BatchIndexArithmetic, 3), (GlobalStep, 6), (TrainerCounters, 2), (FloatOfStep, 2)],
)
def test_counters_equal_eager_with_few_graphs(make: type[Net], most: int) -> None:
    """18 batches; a branch costs a graph for each outcome, arithmetic costs none."""
    assert assert_as_eager(make).captures <= most


class AttributeEachEpoch(Net):
    """A hook changes an attribute that training_step reads."""

    def __init__(self) -> None:
        super().__init__()
        self.strength = 1.0
        self.settings = {"scale": 1.0}

    def on_train_epoch_start(self) -> None:
        self.strength = 1.0 / (1 + self.current_epoch)
        self.settings["scale"] = 1.0 + self.current_epoch

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * self.strength * self.settings["scale"] ** 0.5


def test_an_attribute_that_a_hook_changes_each_epoch_is_seen() -> None:
    assert assert_as_eager(AttributeEachEpoch).captures == 3


class Clips(Quiet):
    """The largest norm of gradients is set between batches, and once in the step; in some batches there is none."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.trainer.gradient_clip_val = [0.05, 0.2, None][batch_idx % 3]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 4:
            self.trainer.gradient_clip_val = 0.05
        return self.loss(batch)


def test_a_changed_clip_value_is_seen() -> None:
    assert assert_as_eager(Clips, gradient_clip_val=1.0).captures <= 6


def test_a_changed_clip_value_is_seen_by_two_ranks(two_ranks: RankPool) -> None:
    ours = two_ranks.run(run, Clips, "spmd", 2, gradient_clip_val=1.0)
    theirs = run(Clips, "auto", data=lambda: InOrder(rows(), ROWS, shuffle=False), gradient_clip_val=1.0)
    assert_compiled(*ours)
    assert_equals_one_device(ours, theirs)


class UnreadAttribute(Net):
    """Counts its batches in a hook; training_step does not look."""

    def __init__(self) -> None:
        super().__init__()
        self.batches, self.history = 0, []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.batches += 1
        self.history.append(batch_idx)


def test_an_attribute_that_is_not_read_never_recaptures() -> None:
    assert assert_as_eager(UnreadAttribute).captures == 2


class ListInHook(Net):
    """The recipe of Lightning's migration guide: outputs gathered in a list, by a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Tensor] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.outputs.append(outputs["loss"].detach())

    def on_train_epoch_end(self) -> None:
        self.log("mean_of_outputs", torch.stack(self.outputs).mean())
        self.outputs.clear()


def test_outputs_gathered_by_a_hook_equal_eager() -> None:
    assert assert_as_eager(ListInHook).captures == 2


class AttributeEachStep(Net):
    """A number that a hook changes at every batch and training_step reads: an input once it has changed."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = 1.0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.temperature *= 0.99

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * self.temperature


def test_an_attribute_that_changes_each_step_becomes_an_input() -> None:
    assert assert_as_eager(AttributeEachStep, max_epochs=4).captures == 2


class TrainEvalFlag(Net):
    """Switches a submodule's dropout off in the second epoch, and its batch norm to evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(10)

    def on_train_epoch_start(self) -> None:
        self.dropout.train(self.current_epoch != 1)
        self.norm.train(self.current_epoch == 0)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.dropout(self.norm(torch.tanh(self.first(x)))))


def test_the_training_flag_of_a_submodule_is_seen() -> None:
    assert assert_as_eager(TrainEvalFlag).captures == 4


class ReplacedModule(Net):
    """Replaces an activation and a parameter between epochs."""

    def __init__(self) -> None:
        super().__init__()
        self.activation = nn.Tanh()

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.activation = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.dropout(self.activation(self.first(x))))


def test_a_replaced_submodule_is_seen() -> None:
    assert assert_as_eager(ReplacedModule).captures > 2


class DropoutRate(Net):
    """A schedule of the dropout probability."""

    def on_train_epoch_start(self) -> None:
        self.dropout.p = 0.3 / (1 + self.current_epoch)


def test_a_changed_dropout_probability_is_seen() -> None:
    assert assert_as_eager(DropoutRate).captures == 3


class HostTensor(Net):
    """A plain tensor attribute that a hook writes: read anew each step, no graph."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.tensor(1.0)
        self.register_buffer("steps", torch.tensor(0.0))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.scale.mul_(0.95)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps.add_(1.0)
        return self.loss(batch) * self.scale + 0.0 * self.steps


def test_a_tensor_attribute_is_read_anew_each_step() -> None:
    assert assert_as_eager(HostTensor).captures == 2


class ReplacedTensor(HostTensor):
    """The same, but the hook puts a new tensor there."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.scale = self.scale * 0.95


def test_a_replaced_tensor_attribute_is_seen() -> None:
    assert assert_as_eager(ReplacedTensor).captures == 2


class OtherDtype(HostTensor):
    """A hook puts a tensor of another dtype there."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 7:
            self.scale = torch.tensor([0.5], dtype=torch.float64)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self.loss(batch) * self.scale).sum()


def test_a_tensor_attribute_of_another_kind_gets_another_graph() -> None:
    assert assert_as_eager(OtherDtype).captures == 3


class Constants(Net):
    """Makes tensors inside training_step, in the ways people do."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        weight = torch.tensor([1.0, 2.0, 0.5])
        mask = torch.ones(x.shape[0]).to(x)
        noise = torch.randn_like(x) * 0.01 + torch.rand(x.shape[0], 1) * 0.01
        ids = torch.arange(x.shape[0], device=x.device)
        losses = F.cross_entropy(self(x + noise), y, weight=weight, reduction="none")
        return (losses * mask * (1 + 0.001 * ids)).mean() + torch.zeros(()).requires_grad_()


def test_tensors_made_in_training_step_equal_eager() -> None:
    assert assert_as_eager(Constants).captures == 2


class RowCount(Quiet):
    """Code that divides by the batch size sees the global one."""

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1], reduction="sum") / len(batch[0]) + 0.1 / batch[0].size(0)


class Counters(BatchIndexArithmetic, GlobalStep, Quiet):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch) * (1.0 + 0.1 * batch_idx) * (0.5 if self.current_epoch == 1 else 1.0)
        self.log("step", self.global_step)
        return loss


class QuietAttribute(AttributeEachEpoch, Quiet):
    pass


@pytest.mark.parametrize("make", [RowCount, Counters, QuietAttribute])
def test_python_values_on_two_ranks_equal_one_device(two_ranks: RankPool, make: type[Net]) -> None:
    results = two_ranks.run(run, make, "spmd", 2)
    assert_compiled(*results)
    assert_equals_one_device(results, run(make, "auto", data=lambda: InOrder(rows(), ROWS)))
