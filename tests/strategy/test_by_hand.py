"""Optimization by hand: the iteration is a graph, and equals the eager Trainer's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_spmd import messages
from tests.helpers.by_hand import (
    MODULES,
    Alone,
    Gan,
    Joint,
    SeveralSteps,
    ZeroedFirst,
    assert_close,
    fit,
    fit_on_ranks,
    state_of,
)
from tests.helpers.ranks import RankPool

GRAPHS = {"Penalized": 4, "Accumulated": 4, "Toggled": 4}
"""Graphs of a run, where more than two: with and without a step, with and without gradients of the batch before."""


def assert_bitwise(ours: Any, theirs: Any) -> None:
    mine, spec = pytree.tree_flatten(ours)
    others, other_spec = pytree.tree_flatten(theirs)
    assert spec == other_spec
    for one, other in zip(mine, others, strict=True):
        same = torch.equal(one, other) if isinstance(one, Tensor) else one == other
        assert same, f"{one} is not {other}"


@pytest.mark.parametrize("name", MODULES)
def test_one_device_is_bitwise_the_eager_trainer(name: str) -> None:
    theirs = fit(MODULES[name], "auto")
    ours = fit(MODULES[name], "spmd")
    assert ours[1].strategy.mode == "compiled"
    assert 0 < ours[1].strategy.captures <= GRAPHS.get(name, 2)
    assert ours[1].global_step == theirs[1].global_step
    assert_bitwise(state_of(*ours), state_of(*theirs))


@pytest.mark.parametrize("name", MODULES)
def test_two_ranks_equal_one_device(two_ranks: RankPool, name: str) -> None:
    theirs = state_of(*fit(MODULES[name], "auto", precision="64-true"))
    for state, mode, captures in two_ranks.run(fit_on_ranks, name, {}, 2):
        assert mode == "compiled"
        assert 0 < captures <= GRAPHS.get(name, 2)
        assert_close(state, theirs)


class HookedGan(Gan):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert any(p.grad is not None for group in optimizer.param_groups for p in group["params"])


class SharedGan(ZeroedFirst):
    def configure_optimizers(self) -> Any:
        everything = [*self.generator.parameters(), *self.critic.parameters()]
        return [torch.optim.SGD(everything, lr=0.1), torch.optim.SGD(self.critic.parameters(), lr=0.1)]


class SchedulerFirst(Joint):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.lr_schedulers()[0].step()
        return super().training_step(batch, batch_idx)


class LooksAtRate(Joint):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)
        self.log("rate", self.lr_schedulers()[0].get_last_lr()[0])


class SwapsData(Alone):
    """Weights change hands by ``p.data``, and come back before the step ends."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        weight = self.net[0].weight
        before = weight.data
        weight.data = before * 0.5
        loss = self.loss(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        weight.data = before
        optimizer.step()
        self.log("loss", loss)


class StaysFrozen(Gan):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        self.critic[0].bias.requires_grad_(False)


EAGER = {
    HookedGan: "HookedGan.on_before_optimizer_step is overridden",
    SharedGan: "critic.0.weight is in two optimizers",
    SchedulerFirst: "RMSprop steps after its scheduler in the same batch",
    LooksAtRate: "reads what scheduler.step() changes",
    SwapsData: "assigns `.data` of a tensor",
    StaysFrozen: "critic.0.bias.requires_grad",
}


@pytest.mark.parametrize("make", EAGER)
def test_what_is_no_graph_runs_eagerly(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str] = []
    for name in ("rank_zero_info", "_warn"):
        monkeypatch.setattr(messages, name, lambda text, *_, **__: texts.append(text))
    theirs = fit(make, "auto", batches=6)
    ours = fit(make, "spmd", batches=6)
    assert ours[1].strategy.mode == "eager"
    assert any(EAGER[make] in text for text in texts), texts
    assert_bitwise(state_of(*ours), state_of(*theirs))


class ListsOfWeights(SeveralSteps):
    """Operators on lists name no result: a graph shows the update by its writes alone."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.net.parameters(), lr=0.01, foreach=True)


def test_a_weight_that_was_updated_is_cast_again() -> None:
    theirs, ours = (fit(ListsOfWeights, s, batches=6, precision="bf16-mixed") for s in ("auto", "spmd"))
    assert ours[1].strategy.mode == "compiled"
    assert_bitwise(state_of(*ours), state_of(*theirs))
