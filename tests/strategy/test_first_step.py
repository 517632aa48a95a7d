"""State that an optimizer would create in its first step: made before it where that changes nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.ranks import RankPool
from tests.helpers.training import TrainingCase, assert_bitwise, assert_compiled, one_device, train, train_on
from tests.strategy.small import Net, assert_as_eager, run

# SGD's momentum begins as the first gradient, Lion counts in Python
GRAPHS = {
    "adamw": 1,
    "adamw_fused": 1,
    "rmsprop_centered": 1,
    "nadam": 1,
    "adadelta": 1,
    "adagrad": 1,
    "sgd": 2,
    "lion": 2,
}


@pytest.mark.parametrize(("name", "graphs"), GRAPHS.items())
def test_one_graph_where_the_first_step_is_like_the_others(name: str, graphs: int) -> None:
    case = TrainingCase("mlp", name, batches=4, count=64)
    ours = train(case, "spmd")
    assert_bitwise(ours, one_device(case))
    assert ours.captures == graphs


@pytest.mark.parametrize("data_parallel", ["replicate", "zero2", "zero3"])
def test_ranks_make_their_parts(two_ranks: RankPool, data_parallel: str) -> None:
    case = TrainingCase("mlp", "adamw", batches=4, count=64)
    for ours in train_on(two_ranks, case, {"data_parallel": data_parallel}):
        assert_compiled(ours)
        assert ours.captures == 1
        assert len(ours.optimizer_state) >= 3 * 4


class Custom(torch.optim.Optimizer):
    """An average of gradients; ``use`` does with it what it likes."""

    def __init__(self, parameters: Any, use: Callable[..., Tensor]) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.use = use

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in group["params"]:
                new = not self.state[p]
                if new:
                    self.state[p]["average"] = torch.zeros_like(p)
                p.add_(self.use(self.state[p]["average"], p.grad, new), alpha=-group["lr"])
        return loss


def plain_at_first(average: Tensor, gradient: Tensor, new: bool) -> Tensor:
    average.lerp_(gradient, 0.1)
    return gradient if new else average


def scaled_at_first(average: Tensor, gradient: Tensor, new: bool) -> Tensor:
    return average.lerp_(gradient, 1.0 if new else 0.1)


def alike(average: Tensor, gradient: Tensor, new: bool) -> Tensor:
    return average.lerp_(gradient, 0.1)


def looks_later(average: Tensor, gradient: Tensor, new: bool) -> Tensor:
    """Cannot be captured once there is a state: after a first step as a graph training is eager."""
    scale = 1.0 if new else math.fsum([average.abs().sum() > 0])
    return average.lerp_(gradient, 0.1) * scale


@pytest.mark.parametrize(("use", "captures"), [(alike, 1), (plain_at_first, 2), (scaled_at_first, 2), (looks_later, 0)])
def test_a_first_step_of_its_own_keeps_its_graph(use: Callable[..., Tensor], captures: int) -> None:
    class Module(Net):
        def configure_optimizers(self) -> Any:
            return Custom(self.parameters(), use)

    ours = assert_as_eager(Module, mode="eager" if use is looks_later else "compiled")
    assert ours.captures == captures


class OneTensorTwice(torch.optim.Optimizer):
    """Keeps one tensor under two names: what is added to the one is read from the other, or from itself."""

    def __init__(self, parameters: Any, written: str) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.written = written

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["written"] = state["read"] = torch.zeros_like(p)
                state[self.written].add_(p.grad)
                p.add_(state["read"], alpha=-group["lr"])
        return loss


@pytest.mark.parametrize("written", ["written", "read"])
def test_a_state_under_two_names_stays_one_tensor(written: str) -> None:
    class Module(Net):
        def configure_optimizers(self) -> Any:
            return OneTensorTwice(self.parameters(), written)

    assert_as_eager(Module)


def stops_later(average: Tensor, gradient: Tensor, new: bool) -> Tensor:
    if not new:
        raise KeyboardInterrupt
    return gradient


def test_an_interruption_leaves_no_state_behind() -> None:
    """Of the second capture, which finds the state that was made for it."""
    optimizers: list[Custom] = []

    class Module(Net):
        def configure_optimizers(self) -> Any:
            optimizers.append(Custom(self.parameters(), stops_later))
            return optimizers[0]

    with pytest.raises((KeyboardInterrupt, SystemExit)):
        run(Module)
    assert not optimizers[0].state
