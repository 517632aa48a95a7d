"""Values of tensors that Python reads in training_step: the step stays a graph, and is one device's."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_spmd import SPMDStrategy
from lightning_spmd.stages.capture.follow.copies import Copies
from lightning_spmd.strategy.graphs.building import GraphBuilder
from tests.helpers.ranks import RankPool
from tests.helpers.training import InOrder, Result, assert_compiled, assert_equals_one_device
from tests.strategy.small import ROWS, Net, Quiet, assert_as_eager, rows, run


class LogsNumbers(Quiet):
    """Numbers that are only logged, and what is computed from them."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss.item(), on_step=True, on_epoch=True)
        self.log_dict({"perplexity": math.exp(loss.item()), "half": 0.5 * loss.item() + 1})
        return loss


class Weighs(Quiet):
    """A number that goes back into tensors."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return loss * (1.0 / (1.0 + loss.item()))


class Branches(Quiet):
    """``if tensor:``, of the loss and of a mask; what one branch logs the other does not."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        losses = F.cross_entropy(self(batch[0]), batch[1], reduction="none")
        large = batch[0][:, 0] > 1.3
        if large.any():
            losses = losses * (1 + large.float())
        loss = losses.mean()
        if loss > 1.1 and not torch.isnan(loss):
            self.log("large", loss)
            loss = loss * 0.5
        return loss


class Cuts(Quiet):
    """Sizes: padding is cut behind the longest sequence."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        length = 3 + int((x[:, 0] > 0).sum() % 3)
        count = (y == 0).sum().item() % 2 + 1
        padded = F.pad(x[:, :length], (0, 6 - length))
        return F.cross_entropy(self(padded), y) + 0.01 * x[:, :count].square().mean()


class Lists(Quiet):
    """``tolist`` of a short tensor, and loops over numbers."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        counts = torch.stack([(y == k).sum() for k in range(3)]).clamp(max=3).tolist()
        loss = F.cross_entropy(self(x), y)
        for _ in range(min(counts)):
            loss = loss * 0.9
        return loss * max(counts)


class Columns(Quiet):
    """A value of a column whose number has a graph of its own: no graph of another one may give it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        column = [0, 5, 3][batch_idx % 3]
        return self.loss(batch) * (1 + math.tanh(batch[0][:, column].sum().item()))


class CountedColumns(Quiet):
    """A column whose number comes of a count of rows."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        large = batch[0][batch[0] > 0.8]
        return self.loss(batch) * (1 + math.tanh(batch[0][:, len(large) % 3].sum().item()))


class Retries(Quiet):
    """Decompositions of what may have none, again with something on the diagonal, as Gaussian processes do it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = torch.tanh(self.first(batch[0]))
        covariance, jitter, tries = hidden.t() @ hidden - 0.3 * torch.eye(10), 0.0, 0
        while True:
            try:
                root = torch.linalg.cholesky(covariance + jitter * torch.eye(10))
                break
            except torch.linalg.LinAlgError:
                jitter, tries = max(0.25, 1.5 * jitter), tries + 1
        return self.loss(batch) + 0.01 * root.diagonal().log().sum() + tries


class SetsRates(Quiet):
    """Numbers of the optimizer that follow from what was read: the update of this very step has them."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        group = self.trainer.optimizers[0].param_groups[0]
        group["lr"] = 0.1 / (1 + loss.item())
        if loss.item() < 1.1:
            group["momentum"] = 0.5 + 0.1 * math.tanh(loss.item())
        return loss


class Likelihood(Quiet):
    """Torch's own Python reads whether a variance is negative."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        means = self(batch[0])
        return F.gaussian_nll_loss(means, F.one_hot(batch[1], 3).float(), means.square().mean(1, keepdim=True) + 0.1)


WAYS = [LogsNumbers, Weighs, Branches, Cuts, Lists, Columns, CountedColumns, Retries, SetsRates, Likelihood]


class WithState(Net):
    """Dropout and batch norm in front of a decision: a run that ends there must leave no trace."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self(self.norm(batch[0])), batch[1])
        if loss > 1.1:
            loss = loss * 0.5
        return loss + 0.1 * torch.rand(())


@pytest.mark.parametrize("make", [*WAYS, WithState])
def test_values_read_in_python_stay_in_graphs(make: type[Net]) -> None:
    """Fifty-four steps, bitwise."""
    assert_as_eager(make, max_epochs=9)


class NegativeVariance(Quiet):
    """A variance that is negative from the fourth step on."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        means = self(batch[0])
        spread = means.square() + (0.1 if batch_idx < 3 else -100.0)
        return F.gaussian_nll_loss(means, F.one_hot(batch[1], 3).float(), spread)


@pytest.mark.parametrize("strategy", ["auto", "spmd"])
def test_torchs_own_error_about_values_is_raised_in_its_step(strategy: str) -> None:
    with pytest.raises(ValueError, match="var has negative"):
        run(NegativeVariance, strategy)


@pytest.mark.parametrize("make", WAYS)
def test_a_value_is_that_of_the_global_batch(make: type[Net], two_ranks: RankPool) -> None:
    ours = two_ranks.run(run, make, "spmd", 2, max_epochs=9)
    theirs = run(make, "auto", data=_in_order, max_epochs=9)
    assert_compiled(ours[0])
    assert_equals_one_device(ours, theirs)


def on_plan(make: Any, options: dict[str, Any], flags: dict[str, Any]) -> Result:
    return run(make, SPMDStrategy(**options), 2, max_epochs=3, **flags)


ZERO = {"data_parallel": "zero3", "overlap_iterations": True}
TP = {"tensor_parallel_size": 2, "tensor_parallel_plan": {"first": "colwise", "last": "rowwise"}}


@pytest.mark.parametrize(
    ("options", "flags"),
    [
        (
            {"data_parallel": "zero3", "overlap_iterations": True},
            {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05},
        ),
        (TP, {"limit_train_batches": 5}),
    ],
    ids=["zero3", "tensor"],
)
def test_under_every_plan(two_ranks: RankPool, options: dict[str, Any], flags: dict[str, Any]) -> None:
    ours = two_ranks.run(on_plan, Branches, options, flags)
    assert_compiled(ours[0])
    assert ours[0].captures > 2
    assert_equals_one_device(ours, run(Branches, "auto", data=_in_order, max_epochs=3, **flags))


class ManySizes(Quiet):
    """A size that is another one in nearly every step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        many = int((batch[0].square().sum() * 1000).item())
        return self.loss(batch) * (1 + len(range(many)) % 7)


def test_numbers_that_differ_in_each_step_share_a_graph() -> None:
    assert assert_as_eager(ManySizes).captures <= 4


def _in_order() -> Any:
    return InOrder(rows(), ROWS, shuffle=False)


class ReadsLoss(Quiet):
    """The loss is read, and decides."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return loss * (2 if loss.item() > 1 else 3)


@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-true", "bf16-mixed"])
def test_graphs_tell_values_in_all_precisions(precision: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a precision changes torch's switches around the step, copies told them, and the graph computed it again."""
    copies: list[int] = []
    original = Copies._values_so_far
    monkeypatch.setattr(Copies, "_values_so_far", lambda own: copies.append(1) or original(own))
    assert_as_eager(ReadsLoss, precision=precision)
    assert len(copies) <= 4  # for the paths that are new


class CountsItsSteps(Quiet):
    """A number that is another one in each step, before and behind the read."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        loss = self.loss(batch) * (1 + 0.01 * self.steps)
        return loss * (1 + 0.01 * min(loss.item(), 2.0))


def test_numbers_before_and_behind_a_read() -> None:
    assert assert_as_eager(CountsItsSteps).captures <= 3


class RowByRow(Quiet):
    """A confusion matrix as one writes it down, row by row; a copy of labels is written to between two reads."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        scores = self(batch[0])
        hits, wrong = 0, [0] * scores.shape[1]
        for guess, label in zip(scores.argmax(1), batch[1], strict=True):
            hits += int(guess == label)
            wrong[label] += int(guess != label)
        labels = batch[1].clone()
        first = labels[0]
        before = labels[1].item()
        labels[0] = 7
        assert (first.item(), labels[1].item()) == (7, before)
        return F.cross_entropy(scores, batch[1]) * (1 + hits / 16 + wrong[0] / 32)


def _graphs_of_beginnings() -> tuple[Result, int]:
    with mock.patch.object(GraphBuilder, "beginning", autospec=True, side_effect=GraphBuilder.beginning) as built:
        return run(RowByRow, "spmd", 2, max_epochs=1), built.call_count


@pytest.mark.long
def test_on_ranks_a_loop_over_rows_takes_few_graphs(two_ranks: RankPool) -> None:
    (first, count), (second, _) = two_ranks.run(_graphs_of_beginnings)
    assert_compiled(first, second)
    assert_equals_one_device([first, second], run(RowByRow, "auto", data=_in_order, max_epochs=1))
    assert count < 17  # of 51 reads
