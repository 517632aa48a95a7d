"""Optimizers that write into views of parameters and state: what lies in chunks is updated as on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.helpers.simulated_training import SimulatedTraining, largest_difference, train_eagerly

PLANS = ("zero2", "zero3")
Update = Callable[[Tensor, Tensor, Tensor], object]


def _then(update: Callable[[Tensor, Tensor], object]) -> Update:
    """A step of gradient descent, and what comes after it."""
    return lambda p, g, m: (p.sub_(g, alpha=0.1), update(p, m))


def _seen_twice(p: Tensor, g: Tensor, m: Tensor) -> None:
    """Written and read by turns under two names."""
    same = p.view_as(p)
    same.sub_(g, alpha=0.1)
    m.lerp_(p, 0.5)
    same.mul_(0.99)
    m.add_(same, alpha=0.01)
    p.lerp_(m, 0.1)


WAYS: dict[str, Update] = {
    "all of it, flat": lambda p, g, m: p.view(-1).sub_(g.reshape(-1), alpha=0.1),
    "all of it, turned": lambda p, g, m: p.t().sub_(g.t(), alpha=0.1),
    "all of it, in a list": lambda p, g, m: torch._foreach_sub_([p.t()], [g.t()], alpha=0.1),
    "a row afterwards": _then(lambda p, m: p[0].mul_(0.5)),
    "a row before": lambda p, g, m: (p[0].mul_(0.5), p.sub_(g, alpha=0.1)),
    "a column": _then(lambda p, m: p[:, 1].mul_(0.5)),
    "a number": _then(lambda p, m: p.__setitem__((0, 1), 0.25)),
    "the diagonal": _then(lambda p, m: p.diagonal().mul_(0.5)),
    "halves": _then(lambda p, m: [half.mul_(0.5 + i) for i, half in enumerate(p.chunk(2, 1))]),
    "slices": lambda p, g, m: (p[:-1].sub_(g[:-1], alpha=0.1), p[-1:].sub_(g[-1:], alpha=0.2)),
    "state, turned": lambda p, g, m: (m.t().mul_(0.9).add_(g.t()), p.sub_(m, alpha=0.1)),
    "a row of state": lambda p, g, m: (m.mul_(0.9).add_(g), m[0].zero_(), p.sub_(m, alpha=0.1)),
    "two names": _seen_twice,
}
_SHORT = {
    "zero2": ("a row afterwards", "state, turned", "a row of state"),
    "zero3": ("all of it, flat", "a row before", "two names"),
}


class Updating(torch.optim.Optimizer):
    """Plain gradient descent, written in some way."""

    def __init__(self, parameters: Any, update: Update) -> None:
        super().__init__(parameters, {})
        self.update = update

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state["m"] = torch.zeros_like(p)
            self.update(p, p.grad, state["m"])


class Matrices(nn.Module):
    """Two products; three rows cannot be cut evenly."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        make = {"generator": generator, "dtype": torch.float64}
        self.a, self.b = (nn.Parameter(torch.randn(*shape, **make)) for shape in ((3, 4), (4, 2)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(torch.tanh(batch[0] @ self.a) @ self.b, batch[1])


def _batches() -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [[torch.randn(4, n, generator=generator, dtype=torch.float64) for n in (3, 2)] for _ in range(3)]


def _trained(update: Update, plan: str) -> None:
    ours, theirs = Matrices(), Matrices()
    optimizer, other = Updating(ours.parameters(), update), Updating(theirs.parameters(), update)
    training = SimulatedTraining(ours, optimizer, split=(3, 1), plan=plan)
    for batch in _batches():
        training.train(batch)
    train_eagerly(theirs, other, _batches())
    found = largest_difference(ours, optimizer, theirs, other)
    assert float(found.split()[0]) < 1e-12, found


def _cases() -> list[object]:
    pairs = [(way, plan) for way in WAYS for plan in PLANS]
    return [pytest.param(w, p, marks=() if w in _SHORT[p] else pytest.mark.long) for w, p in pairs]


@pytest.mark.parametrize(("way", "plan"), _cases())
def test_what_is_written_through_views_of_chunks_is_not_lost(way: str, plan: str) -> None:
    _trained(WAYS[way], plan)
