"""On several ranks the user's Python runs in every step, once, on the batch of all ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MeanMetric

from tests.helpers.ranks import RankError, RankPool
from tests.helpers.training import InOrder, Result, assert_compiled, assert_equals_one_device
from tests.strategy.small import ROWS, Net, Quiet, rows, run

RUNS: list[int] = []
"""How often training_step ran in this process, in the run before."""


class Counting(Quiet):
    def __init__(self) -> None:
        super().__init__()
        self.runs = 0
        self.kept: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.runs += 1
        return super().training_step(batch, batch_idx)

    def on_train_end(self) -> None:
        RUNS[:] = [self.runs, *[value.tolist() if isinstance(value, Tensor) else value for value in self.kept]]


class Reading(Counting):
    """Reads twice, keeps what it read, and goes ways of its own."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        value = loss.item()
        self.kept.append(value)
        if value > 1.1:
            scale = self.last.weight.norm().item()
            loss = loss * scale
        return loss


class Keeping(Counting):
    """Keeps tensors of the batch, and results."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.kept += [batch[1], loss.detach()]
        return loss


class Counted(Counting):
    """Numbers of Python in the graph: of its own, of the batch's size, of an index."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.kept.append(len(batch[0]))
        return loss * (1 + 0.1 * self.runs) + batch[0].mean(0)[batch_idx % 6]


class Retaining(Counting):
    """Every third step can be no graph."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.runs += 1
        h = torch.tanh(self.first(batch[0]))
        if batch_idx % 3 == 2:
            h.detach().untyped_storage()
        loss = F.cross_entropy(self.last(h), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


class Exchanging(Counting):
    """Calls torch.distributed on what it computed, which is the same on all ranks."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        largest = loss.detach().clone()
        if torch.distributed.is_initialized() and batch_idx == 1:
            torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
        self.kept.append(largest)
        return loss


class ByHand(Counting):
    """Steps until the loss has fallen, at most three times, and reads in between."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.runs += 1
        optimizer: Any = self.optimizers()
        first = None
        for _ in range(3):
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            self.clip_gradients(optimizer, 0.5, "norm")
            optimizer.step()
            self.kept.append(loss.item())
            first = self.kept[-1] if first is None else first
            if self.kept[-1] < 0.99 * first:
                break
        self.log("loss", loss, on_step=True, on_epoch=True)


def with_runs(make: type[Net], *args: Any, **flags: Any) -> tuple[Result, list[Any]]:
    result = run(make, *args, **flags)
    return result, list(RUNS)


def ragged() -> InOrder:
    return InOrder(rows(ROWS * 3 + 4), ROWS)


@pytest.mark.parametrize("plan", ["replicate", "zero2"])
@pytest.mark.parametrize("make", [Reading, Keeping, Counted, Retaining])
def test_two_ranks_equal_one_device(make: type[Net], plan: str, two_ranks: RankPool) -> None:
    reference, expected = with_runs(make, "auto", data=lambda: InOrder(rows(), ROWS))
    answers = two_ranks.run(with_runs, make, {"data_parallel": plan}, 2)
    assert_compiled(*[result for result, _ in answers])
    assert_equals_one_device([result for result, _ in answers], reference)
    for _, kept in answers:
        assert kept[0] == expected[0] == 18, "training_step runs once in each step"
        assert _flat(kept) == pytest.approx(_flat(expected), rel=1e-5)


def _flat(values: list[Any]) -> list[float]:
    """In an order of its own within a tensor: ranks' rows come one rank after the other."""
    return [float(v) for value in values for v in (sorted(value) if isinstance(value, list) else [value])]


def test_optimization_by_hand(two_ranks: RankPool) -> None:
    reference, expected = with_runs(ByHand, "auto", data=lambda: InOrder(rows(), ROWS))
    answers = two_ranks.run(with_runs, ByHand, "spmd", 2)
    assert_compiled(*[result for result, _ in answers])
    assert_equals_one_device([result for result, _ in answers], reference)
    for _, kept in answers:
        assert kept == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("make", [Reading, Retaining])
def test_accumulated_gradients(make: type[Net], two_ranks: RankPool) -> None:
    reference = run(make, "auto", data=lambda: InOrder(rows(), ROWS), accumulate_grad_batches=4)
    results = two_ranks.run(run, make, "spmd", 2, accumulate_grad_batches=4)
    assert_equals_one_device(results, reference)


def test_a_last_batch_of_fewer_rows(two_ranks: RankPool) -> None:
    reference, expected = with_runs(Reading, "auto", data=ragged)
    answers = two_ranks.run(with_runs, Reading, "spmd", 2, data=ragged)
    assert_equals_one_device([result for result, _ in answers], reference)
    assert [kept[0] for _, kept in answers] == [expected[0]] * 2


def test_what_torch_distributed_does_in_a_step(two_ranks: RankPool) -> None:
    reference, expected = with_runs(Exchanging, "auto", data=lambda: InOrder(rows(), ROWS))
    answers = two_ranks.run(with_runs, Exchanging, "spmd", 2)
    assert_equals_one_device([result for result, _ in answers], reference)
    for _, kept in answers:
        assert kept == pytest.approx(expected, rel=1e-5)


class ReadsDropout(Counting):
    """What is read depends on numbers of which each rank draws its part: it is what the graph goes on with."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.kept.append(loss.item())
        self.log("read", self.kept[-1] - loss)
        return loss


def test_a_value_is_read_with_the_numbers_that_the_graph_draws(two_ranks: RankPool) -> None:
    for result, kept in two_ranks.run(with_runs, ReadsDropout, "spmd", 2):
        assert_compiled(result)
        assert kept[0] == 18
        assert kept[1:] == pytest.approx(result.losses, abs=1e-6)


class RankInNumbers(Quiet):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (1 + 0.5 * batch_idx * self.global_rank)


class RankInTensors(Quiet):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * torch.tensor([1.0, 2.0 + self.global_rank])[1]


@pytest.mark.parametrize("make", [RankInNumbers, RankInTensors])
def test_numbers_that_differ_are_named(make: Callable[[], Net], two_ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"test_followed_on_ranks.py:\d+") as caught:
        two_ranks.run(run, make, "spmd", 2)
    assert caught.value.type_names == ["RankDisagreementError"] * 2


class OtherNumbers(Quiet):
    """A number that decides the update is another one on one rank from the second batch on."""

    def __init__(self, key: str = "lr") -> None:
        super().__init__()
        self.key = key

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1 and self.global_rank == 1:
            if self.key == "clip":
                self.trainer.gradient_clip_val = 0.25
            else:
                self.optimizers().param_groups[0][self.key] = 0.25
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("key", ["lr", "momentum", "weight_decay", "clip"])
@pytest.mark.parametrize("strategy", ["spmd", "spmd_zero3"])
def test_numbers_of_updates_that_differ_are_named(key: str, strategy: str, two_ranks: RankPool) -> None:
    name = "trainer.gradient_clip_val" if key == "clip" else rf"\w+.param_groups\[0\]\['{key}'\]"
    with pytest.raises(RankError, match=rf"{name} is .* on rank 0 and 0.25 on rank 1") as caught:
        two_ranks.run(run, functools.partial(OtherNumbers, key), strategy, 2)
    assert caught.value.type_names == ["RankDisagreementError"] * 2


class MetricAlone(Quiet):
    """Calls a metric on one rank alone."""

    def __init__(self, method: str = "forward") -> None:
        super().__init__()
        self.mean, self.method = MeanMetric(), method

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.global_rank == 0:
            getattr(self.mean, self.method)(loss)
        return loss


def test_a_metric_that_one_rank_alone_waits_in_is_named(two_ranks: RankPool) -> None:
    with pytest.raises(RankError, match="metric 'mean': rank 0 calls mean.forward, rank 1 does not") as caught:
        two_ranks.run(run, MetricAlone, "spmd", 2)
    assert caught.value.type_names == ["RankDisagreementError"] * 2


def test_a_metric_that_one_rank_alone_updates_is_a_graph(two_ranks: RankPool) -> None:
    results = two_ranks.run(run, functools.partial(MetricAlone, "update"), "spmd", 2)
    assert_compiled(*results)
    assert_equals_one_device(results, run(Quiet, "auto", data=lambda: InOrder(rows(), ROWS)))


class SeesItsLog(Quiet):
    """Asks in the same step for what it has just logged."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("share", 0.25 + batch_idx)
        return super().training_step(batch, batch_idx) * float(self.trainer.callback_metrics["share"])


def test_a_number_that_is_logged_is_there_in_the_same_step(two_ranks: RankPool) -> None:
    results = two_ranks.run(run, SeesItsLog, "spmd", 2)
    assert_compiled(*results)
    assert_equals_one_device(results, run(SeesItsLog, "auto", data=lambda: InOrder(rows(), ROWS)))
