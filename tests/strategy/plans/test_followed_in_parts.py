"""Steps are followed where parameters, gradients, state or sequences are in parts."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tests.helpers.ranks import RankError, RankPool
from tests.helpers.training import InOrder, assert_compiled, assert_equals_one_device
from tests.strategy.ranks.test_followed_on_ranks import ByHand, Counting, Reading, with_runs
from tests.strategy.small import ROWS, rows

LAYERS = {"first": "colwise", "last": "rowwise"}
PLANS: dict[str, dict[str, Any]] = {
    "zero3": {"data_parallel": "zero3"},
    "tp2": {"tensor_parallel_size": 2, "tensor_parallel_plan": LAYERS},
}


class Untidy(Counting):
    """A counter, a list, a print, values of a loss and of parameters that are read, a branch on one, a log of one."""

    def __init__(self) -> None:
        super().__init__()
        self.best = 10.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        value, norm = loss.item(), self.last.weight.norm().item()
        self.kept += [value, norm, loss.detach(), float(self.last.bias[0])]
        print(f"{value:.3f}")
        if value < self.best:
            self.best = value
            loss = loss * (1 + 0.1 * norm)
        self.log("bias", self.last.bias.sum())
        return loss


@pytest.mark.parametrize("plan", list(PLANS))
def test_two_ranks_equal_one_device(plan: str, two_ranks: RankPool) -> None:
    reference, expected = with_runs(Untidy, "auto", data=lambda: InOrder(rows(), ROWS))
    answers = two_ranks.run(with_runs, Untidy, PLANS[plan], 2)
    assert_compiled(*[result for result, _ in answers])
    assert_equals_one_device([result for result, _ in answers], reference)
    for _, kept in answers:
        assert kept[0] == expected[0] == 18, "training_step runs once in each step"
        assert kept == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("plan", list(PLANS))
def test_accumulated_gradients(plan: str, two_ranks: RankPool) -> None:
    reference, expected = with_runs(Reading, "auto", data=lambda: InOrder(rows(), ROWS), accumulate_grad_batches=4)
    answers = two_ranks.run(with_runs, Reading, PLANS[plan], 2, accumulate_grad_batches=4)
    assert_compiled(*[result for result, _ in answers])
    assert_equals_one_device([result for result, _ in answers], reference)
    assert [kept[0] for _, kept in answers] == [expected[0]] * 2


class KeepsGradients(ByHand):
    """Gradients lie in ``p.grad`` from one batch to the next; what is looked at is a gradient."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.runs += 1
        optimizer: Any = self.optimizers()
        loss = self.loss(batch)
        self.manual_backward(loss)
        gradient: Any = self.last.weight.grad
        norm = gradient.norm()
        self.log("norm", norm)
        if batch_idx % 3 == 2:
            self.kept.append(norm.item())
            for p in self.parameters():
                p.grad = None if p.grad is None else p.grad / 3
            optimizer.step()
            optimizer.zero_grad(set_to_none=batch_idx == 2)
        self.log("loss", loss, on_step=True, on_epoch=True)


@pytest.mark.parametrize("make", [ByHand, KeepsGradients])
@pytest.mark.parametrize("plan", ["zero2", *PLANS])
def test_optimization_by_hand(make: type[Counting], plan: str, two_ranks: RankPool) -> None:
    reference, expected = with_runs(make, "auto", data=lambda: InOrder(rows(), ROWS))
    answers = two_ranks.run(with_runs, make, PLANS.get(plan, {"data_parallel": plan}), 2)
    assert_compiled(*[result for result, _ in answers])
    assert_equals_one_device([result for result, _ in answers], reference)
    for _, kept in answers:
        assert kept == pytest.approx(expected, rel=1e-5)


class Taught(Counting):
    """A teacher follows in the step, in several ways, before and behind where it is read; its norm is bounded."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(torch.nn.Sequential(self.first, torch.nn.Tanh(), self.last)).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        own = [*self.first.parameters(), *self.last.parameters()]
        with torch.no_grad():
            for slow, fast in zip(self.teacher.parameters(), own, strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
            target = self.teacher(x).softmax(1)
            torch._foreach_lerp_(list(self.teacher.parameters()), own, 0.1)
            again = self.teacher(x).softmax(1)
            self.teacher[0].weight.copy_(self.teacher[0].weight / self.teacher[0].weight.norm().clamp(min=1.0))
        logits = self.last(torch.tanh(self.first(x)))
        loss = F.cross_entropy(logits, y)
        return loss + F.mse_loss(logits.softmax(1), target) + F.mse_loss(logits.softmax(1), again)


@pytest.mark.parametrize("late", [{}, {"overlap_iterations": True, "bucket_size_mb": 0.0005}], ids=["", "overlaps"])
@pytest.mark.parametrize("plan", list(PLANS))
def test_parameters_that_the_step_writes_into(plan: str, late: dict[str, Any], two_ranks: RankPool) -> None:
    reference, _ = with_runs(Taught, "auto", data=lambda: InOrder(rows(), ROWS))
    results = [result for result, _ in two_ranks.run(with_runs, Taught, {**PLANS[plan], **late}, 2)]
    assert_compiled(*results)
    assert_equals_one_device(results, reference)


class Bounded(ByHand):
    """Bounds parameters behind their update; of one with a single element a rank has nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.full((1,), 2.0))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch) + (self.scale * self.last.bias).square().sum())
        optimizer.step()
        for p in self.parameters():
            p.data.clamp_(-0.5, 0.5)
            self.kept += [p.abs().max().item(), p.amin().item(), torch.linalg.vector_norm(p, torch.inf).item()]


@pytest.mark.parametrize("plan", list(PLANS))
def test_extremes_of_what_a_rank_may_have_nothing_of(plan: str, two_ranks: RankPool) -> None:
    reference, expected = with_runs(Bounded, "auto", data=lambda: InOrder(rows(), ROWS))
    answers = two_ranks.run(with_runs, Bounded, PLANS[plan], 2)
    assert_compiled(*[result for result, _ in answers])
    assert_equals_one_device([result for result, _ in answers], reference)
    for _, kept in answers:
        assert kept == pytest.approx(expected, rel=1e-5, abs=1e-7)


class Swallowing(Counting):
    """One rank alone does what no graph can, and shrugs."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        h = torch.tanh(self.first(batch[0]))
        with contextlib.suppress(Exception):
            if batch_idx == 2 and self.global_rank == 1:
                h.untyped_storage()
        return F.cross_entropy(self.last(h), batch[1])


def test_what_can_be_no_graph_is_an_error_on_all_ranks(two_ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"untyped_storage.* \(.*_in_parts.py:\d+\).* use data_par") as caught:
        two_ranks.run(with_runs, Swallowing, PLANS["zero3"], 2)
    assert caught.value.type_names == ["ConfigurationError"] * 2


@pytest.mark.parametrize("make", [Untidy, ByHand])
def test_layers_to_share_are_found_from_a_followed_step(make: type[Counting], two_ranks: RankPool) -> None:
    """Python runs once in the first step, too: on whole layers until it is done, and the graph is that of parts."""
    reference, expected = with_runs(make, "auto", data=lambda: InOrder(rows(), ROWS))
    options = {"tensor_parallel_size": 2, "tensor_parallel_plan": "auto"}
    answers = two_ranks.run(with_runs, make, options, 2)
    assert_compiled(*[result for result, _ in answers])
    assert_equals_one_device([result for result, _ in answers], reference)
    for _, kept in answers:
        assert kept == pytest.approx(expected, rel=1e-5)
