"""Whoever holds a parameter from before it was sharded works with the part that took its place."""

from __future__ import annotations

import copy
import io
import weakref
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from tests.helpers.ranks import RankError, RankPool
from tests.helpers.training import InOrder, assert_equals_one_device, fit
from tests.strategy.small import ROWS, Quiet, rows, run

ZERO3 = {"data_parallel": "zero3"}
SPLIT = {"tensor_parallel_size": 2, "tensor_parallel_plan": "auto"}


def _in_order() -> InOrder:
    return InOrder(rows(), ROWS)


class Held(Quiet):
    def __init__(self) -> None:
        super().__init__()
        self.held = list(self.parameters())


class InTheLoss(Held):
    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + 0.01 * torch.stack([p.square().sum() for p in self.held]).sum()


class FromTheStart(Quiet):
    """Taken from the module once the Trainer has set it up; "auto" shares layers at the first batch."""

    def on_train_start(self) -> None:
        self.held = dict(self.named_parameters())

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + 0.01 * self.held["first.weight"].square().sum()


class WrittenInAHook(Held):
    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for parameter in self.held:
                parameter.mul_(0.99)


class ReadInAHook(Held):
    def on_train_batch_end(self, *_: Any) -> None:
        total = sum(p.detach().abs().sum() for p in self.held)
        self.log("total", total.full_tensor() if hasattr(total, "full_tensor") else total)


class ClippedByHand(Held):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        torch.nn.utils.clip_grad_norm_(self.held, 0.1)
        optimizer.step()
        self.log("clipped", loss, on_step=True, on_epoch=True)


class Optimized(Held):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.held[:2], lr=0.1, momentum=0.9)


class AddedLater(Held):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.last.parameters(), lr=0.1)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.trainer.optimizers[0].add_param_group({"params": self.held[:2], "lr": 0.05})


class FrozenInAHook(Held):
    def on_train_epoch_start(self) -> None:
        self.held[0].requires_grad_(self.current_epoch != 1)


class Copied(Held):
    def on_train_epoch_end(self) -> None:
        torch.save(self.held, io.BytesIO())
        assert copy.deepcopy(self.held)[0].shape == self.held[0].shape == self.first.weight.shape
        assert len(self.held[0]) == 10
        assert repr(self.held[0]) == repr(self.first.weight)
        assert isinstance(self.held[0], torch.nn.Parameter)


@pytest.mark.parametrize("plan", [ZERO3, SPLIT], ids=["zero3", "split"])
@pytest.mark.parametrize(
    "make",
    [InTheLoss, FromTheStart, WrittenInAHook, ReadInAHook, ClippedByHand, Optimized, AddedLater, FrozenInAHook, Copied],
)
def test_parameters_that_a_list_holds(make: type[Quiet], plan: dict[str, Any], two_ranks: RankPool) -> None:
    results = two_ranks.run(run, make, plan, 2)
    assert results[0].mode == "compiled"
    assert_equals_one_device(results, run(make, "auto", data=_in_order))


def _one_plan_after_the_other(*plans: Any) -> list[float]:
    module, losses = InTheLoss(), []
    for plan in plans:
        losses += fit(module, _in_order(), plan, 1 if plan == "auto" else 2, [], max_epochs=1)[0].losses
    return losses


def test_under_one_plan_after_the_other(two_ranks: RankPool) -> None:
    torch.manual_seed(0)
    ours = two_ranks.run(_seeded, ZERO3, SPLIT, ZERO3)
    theirs = _seeded("auto", "auto", "auto")
    assert ours[0] == pytest.approx(theirs, abs=1e-5)


def _seeded(*plans: Any) -> list[float]:
    torch.manual_seed(0)
    return _one_plan_after_the_other(*plans)


class NotRegistered(Quiet):
    def __init__(self) -> None:
        super().__init__()
        self.scales = [torch.nn.Parameter(torch.full((3,), 0.1))]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + self.scales[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters(), *self.scales], lr=0.1)


def test_parameters_that_only_the_optimizer_has_are_named(two_ranks: RankPool) -> None:
    with pytest.raises(RankError, match="the optimizer trains parameters that the module does not have"):
        two_ranks.run(run, NotRegistered, ZERO3, 2, max_epochs=1)


class KeepsAGraph(Quiet):
    """Torch cannot move a parameter in parts whose node of autograd something holds, at the end of the run."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.kept = self.last.weight.norm() + 1


class KeepsAReference(Quiet):
    def on_train_start(self) -> None:
        self.__dict__["kept"] = weakref.ref(self.last.weight)


@pytest.mark.parametrize("make", [KeepsAGraph, KeepsAReference])
def test_a_run_ends_though_something_holds_its_parameters(make: type[Quiet], two_ranks: RankPool) -> None:
    assert_equals_one_device(two_ranks.run(run, make, ZERO3, 2), run(make, "auto", data=_in_order))


class Another(Quiet):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
        del self.first, self.last

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def _two_modules(strategy: Any, devices: int) -> list[float]:
    L.seed_everything(3)
    trainer: Any = None
    losses: list[float] = []
    for make in (Quiet, Another):
        module = make()
        if trainer is None:
            result, trainer = fit(module, _in_order(), strategy, devices, [], max_epochs=1)
            losses += result.losses
        else:
            trainer.fit_loop.max_epochs = 2
            trainer.fit(module, _in_order())
            losses.append(float(trainer.callback_metrics["loss"]))
    return losses


def test_one_trainer_shares_layers_of_one_module_after_the_other(two_ranks: RankPool) -> None:
    assert two_ranks.run(_two_modules, SPLIT, 2)[0] == pytest.approx(_two_modules("auto", 1), abs=1e-5)
