"""``torch.func``: what a transform has returned is called behind it, and steps that run again because of one."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.helpers.ranks import RankPool
from tests.helpers.training import assert_equals_one_device
from tests.strategy.small import ROWS, Quiet, assert_as_eager, loader_of, rows, run


def _of_inputs(module: Quiet, x: Tensor) -> Tensor:
    out, pull = torch.func.vjp(module, x)
    return pull(out)[0].mean() + pull(2 * out.detach())[0].square().mean()


def _of_parameters(module: Quiet, x: Tensor) -> Tensor:
    parameters = dict(module.named_parameters())
    out, pull = torch.func.vjp(lambda own: torch.func.functional_call(module, own, (x,)), parameters)
    return sum((g.square().sum() for g in pull(torch.ones_like(out))[0].values()), out.mean())


def _with_dropout(module: Quiet, x: Tensor) -> Tensor:
    out, pull = torch.func.vjp(lambda x: module(F.dropout(x, 0.3)), F.dropout(x, 0.1))
    return pull(torch.ones_like(out))[0].mean()


def _eager_before(module: Quiet, x: Tensor) -> Tensor:
    out, pull = torch.func.vjp(module, x)
    x[:, 0].to_sparse()
    return pull(out)[0].mean()


def _eager_within(module: Quiet, x: Tensor) -> Tensor:
    def of(x: Tensor) -> Tensor:
        hidden = F.dropout(module(x), 0.3)
        return hidden.sum() * len(x.new_zeros(3).to_sparse())

    return torch.func.grad(of)(x).mean()


@pytest.mark.parametrize("make", [_of_inputs, _of_parameters, _with_dropout, _eager_before, _eager_within])
def test_a_step_that_runs_again_is_eagers(make: Callable[[Quiet, Tensor], Tensor]) -> None:
    class Module(Quiet):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return F.cross_entropy(self(batch[0]), batch[1]) + make(self, batch[0]) / 10

    assert_as_eager(Module, "eager", max_epochs=1)


class Counts(Quiet):
    """A step that begins anew counts, and draws Python's numbers, once."""

    begins_behind = 0

    def __init__(self) -> None:
        super().__init__()
        self.steps, self.drawn = 0, list[float]()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        self.steps += 1
        self.drawn.append(random.random())
        out = self(x)
        if self.steps > self.begins_behind:
            out, pull = torch.func.vjp(self, x)
            out = out + pull(torch.ones_like(out))[0].mean()
        return F.cross_entropy(out * self.drawn[-1], y) / self.steps

    def on_train_end(self) -> None:
        assert self.steps == len(self.drawn) == 6


class CountsLater(Counts):
    begins_behind = 3


@pytest.mark.parametrize("make", [Counts, CountsLater])
def test_what_a_step_changed_before_it_ran_again_is_put_back(make: type[Quiet]) -> None:
    assert_as_eager(make, "eager", max_epochs=1)


class DrawsBefore(Quiet):
    """Numbers of three generators are drawn, and read, before the step finds that it must run again."""

    first_at = 0

    def __init__(self) -> None:
        super().__init__()
        self.steps, self.own, self.pythons = 0, torch.Generator().manual_seed(1), random.Random(1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        drawn = torch.rand(()).item() + torch.rand((), generator=self.own).item() + self.pythons.random()
        loss = self.loss(batch) * drawn
        if self.steps > self.first_at:
            out, pull = torch.func.vjp(self, batch[0])
            loss = loss + pull(torch.ones_like(out))[0].square().mean()
        return loss


class DrawsBeforeLater(DrawsBefore):
    first_at = 3


@pytest.mark.parametrize("make", [DrawsBefore, DrawsBeforeLater])
def test_numbers_drawn_before_it_ran_again_are_drawn_once(make: type[Quiet]) -> None:
    assert_as_eager(make, "eager", max_epochs=1)


def _windows(x: Tensor) -> Tensor:
    h = torch.tanh(x)
    windows = h.as_strided((ROWS, 4, 3), (h.stride(0), h.stride(1), h.stride(1)))
    return (windows * torch.arange(3.0)).sum()


def _by_layout(x: Tensor) -> Tensor:
    h = x.t() * 2
    return h.sum() if h.t().is_contiguous() and not h.is_contiguous() else 10 * h.sum()


class Strides(Quiet):
    """Python and kernels see strides below a transform: of a result of the step, of one made there, of the batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        moved = sum(torch.func.grad(of)(given) for of in (_windows, _by_layout) for given in (x * 1, x))
        weight = self.first.weight.detach() * 1
        turned = torch.func.grad(lambda w: F.linear(x, w).sum())(weight)
        each = torch.func.vmap(torch.func.grad(lambda row: _row(self, row)))(x)
        return self.loss((x + 0.1 * (moved + each), y)) + (self.first.weight * turned).sum() / 100


def _row(module: Quiet, row: Tensor) -> Tensor:
    return module(row.unsqueeze(0)).view(-1).square().sum()


def test_strides_are_seen_below_transforms() -> None:
    assert assert_as_eager(Strides).captures == 2  # momentum begins as the first gradient


class StridesOfHalf(Quiet):
    """The same without numbers that depend on the order of rows."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        moved = torch.func.grad(_by_layout)(x) + torch.func.grad(_by_layout)(x * 1)
        each = torch.func.vmap(torch.func.grad(lambda row: _row(self, row)))(x)
        return self.loss((x + 0.1 * (moved + each), y))


def test_strides_are_seen_below_transforms_on_ranks(two_ranks: RankPool) -> None:
    ours = two_ranks.run(run, StridesOfHalf, "spmd", 2)
    assert_equals_one_device(ours, run(StridesOfHalf, "auto", data=lambda: loader_of(rows(), ROWS)))


class Keeps(Quiet):
    """Calls in each step what ``vjp`` has returned in the one before."""

    pull: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        weight = 1.0 if self.pull is None else self.pull(torch.ones(len(x), 3))[0].mean().detach()
        out, self.pull = torch.func.vjp(self, x)
        return F.cross_entropy(out, y) * weight


def test_what_an_earlier_step_has_returned_is_an_error_with_the_line() -> None:
    with pytest.raises(RuntimeError, match=r"torch.func.vjp has returned in an earlier step.*test_transforms.py:\d+"):
        run(Keeps, max_epochs=1)
