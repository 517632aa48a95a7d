"""Optimization by hand: the iteration is a graph, and equals the eager Trainer's."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_spmd import messages
from tests.helpers.by_hand import (
    MODULES,
    Alone,
    ByHand,
    Gan,
    Joint,
    SeveralSteps,
    ZeroedFirst,
    assert_bitwise,
    assert_close,
    data,
    fit,
    fit_on_ranks,
    state_of,
)
from tests.helpers.by_hand_rare import RARE
from tests.helpers.ranks import RankPool
from tests.helpers.training import QUIET

ALL = {**MODULES, **RARE}
ONCE = ("Gan", "ZeroedFirst", "Normalized", "Retained", "OfInputs", "NothingToStep")
GRAPHS = {
    **dict.fromkeys(ONCE, 1),
    **dict.fromkeys(("Penalized", "Accumulated", "AccumulatedNorms", "Toggled", "ChangesGradients"), 4),
    "OncePerEpoch": 3,
}
"""Graphs of a run, where not two: with or without a step, momentum, or gradients of the batch before."""
PLANS: dict[str, dict[str, Any]] = {
    "replicate": {},
    "zero2": {"data_parallel": "zero2"},
    "zero3": {"data_parallel": "zero3"},
    "tp2": {"tensor_parallel_size": 2},
    "zero3 tp2": {"data_parallel": "zero3", "tensor_parallel_size": 2},
}


@functools.cache
def one_device(name: str) -> dict[str, Any]:
    """What ranks are compared with."""
    return state_of(*fit(ALL[name], "auto", precision="64-true"))


@pytest.mark.parametrize("name", MODULES)
def test_one_device_is_bitwise_the_eager_trainer(name: str) -> None:
    assert_as_eager(name)


@pytest.mark.parametrize("name", RARE)
def test_rare_ways_are_bitwise_the_eager_trainer(name: str) -> None:
    assert_as_eager(name)


def assert_as_eager(name: str) -> None:
    theirs = fit(ALL[name], "auto", batches=50)
    ours = fit(ALL[name], "spmd", batches=50)
    assert ours[1].strategy.mode == "compiled"
    assert 0 < ours[1].strategy.captures <= GRAPHS.get(name, 2)
    assert ours[1].global_step == theirs[1].global_step
    assert_bitwise(state_of(*ours), state_of(*theirs))


def assert_ranks_equal_one_device(pool: RankPool, name: str, plan: str) -> None:
    for state, mode, captures in pool.run(fit_on_ranks, ALL[name], PLANS[plan], pool.size):
        assert mode == "compiled"
        assert 0 < captures <= GRAPHS.get(name, 2)
        assert_close(state, one_device(name))


FEW = (
    ("Gan", "replicate"),
    ("Penalized", "zero3"),
    ("Averaged", "zero2"),
    ("SeveralSteps", "tp2"),
    ("OfData", "zero3"),
)
# a norm of a DTensor is no number of the whole; no plan for parametrized layers or norms between split ones
ODD = (("InHooks", "zero3"), ("InHooks", "tp2"), ("Normalized", "tp2"), ("AccumulatedNorms", "tp2"))
OTHERS = [(n, p) for n in ALL for p in list(PLANS)[:4] if (n, p) not in (*FEW, *ODD)]


@pytest.mark.parametrize(("name", "plan"), FEW)
def test_two_ranks_equal_one_device(two_ranks: RankPool, name: str, plan: str) -> None:
    assert_ranks_equal_one_device(two_ranks, name, plan)


@pytest.mark.parametrize(("name", "plan"), OTHERS)
def test_two_ranks_equal_one_device_in_all_ways(two_ranks: RankPool, name: str, plan: str) -> None:
    assert_ranks_equal_one_device(two_ranks, name, plan)


@pytest.mark.parametrize("name", ["Gan", "Penalized", "Accumulated", "Averaged"])
def test_four_ranks_equal_one_device(four_ranks: RankPool, name: str) -> None:
    assert_ranks_equal_one_device(four_ranks, name, "zero3 tp2")


def _with_checkpoints(make: type[ByHand], strategy: Any, folder: Path, epochs: int, resume: Path | None = None) -> Any:
    torch.manual_seed(7)
    module = make()
    keep = ModelCheckpoint(dirpath=folder, every_n_train_steps=4, save_top_k=-1, filename="{step}", save_last=True)
    flags = {**QUIET, "enable_checkpointing": True, "limit_val_batches": 2, "num_sanity_val_steps": 1}
    trainer = L.Trainer(
        strategy=strategy, devices=1, max_epochs=epochs, callbacks=[keep], limit_train_batches=8, val_check_interval=4,
        **flags,
    )  # fmt: skip
    loader = DataLoader(data(), batch_size=8)
    trainer.fit(module, loader, loader, ckpt_path=resume)
    return module, trainer


class ValidatedGan(Gan):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.tell_apart(*batch))


def test_checkpoints_and_validation_are_those_of_the_eager_trainer(tmp_path: Path) -> None:
    """Steps are counted as Lightning does, two a batch; a run that goes on ends as one that was never interrupted."""
    folders = [tmp_path / name for name in ("theirs", "ours", "half", "rest")]
    theirs = _with_checkpoints(ValidatedGan, "auto", folders[0], 2)
    ours = _with_checkpoints(ValidatedGan, "spmd", folders[1], 2)
    _with_checkpoints(ValidatedGan, "spmd", folders[2], 1)
    resumed = _with_checkpoints(ValidatedGan, "spmd", folders[3], 2, folders[2] / "last.ckpt")
    assert ours[1].strategy.mode == "compiled"
    assert sorted(p.name for p in folders[0].iterdir()) == sorted(p.name for p in folders[1].iterdir())
    assert_bitwise(state_of(*ours), state_of(*theirs))
    states = [state_of(*run) for run in (resumed, theirs)]
    assert_bitwise(*[{key: state[key] for key in ("weights", "optimizers")} for state in states])
    assert resumed[1].global_step == theirs[1].global_step == 32


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
        self.log("rate", 2 * self.lr_schedulers()[0].get_last_lr()[0])


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
    SwapsData: "tensor.data = ... in the step",
}


@pytest.mark.parametrize("make", EAGER)
def test_what_is_no_graph_runs_eagerly(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_runs_eagerly(make, EAGER[make], monkeypatch)


@pytest.mark.parametrize("make", [SchedulerFirst, LooksAtRate, StaysFrozen])
def test_what_decides_between_steps_is_a_graph(make: Any) -> None:
    theirs, ours = fit(make, "auto", batches=12), fit(make, "spmd", batches=12)
    assert ours[1].strategy.mode == "compiled"
    assert_bitwise(state_of(*ours), state_of(*theirs))


def assert_runs_eagerly(make: Any, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str] = []
    for name in ("rank_zero_info", "_warn"):
        monkeypatch.setattr(messages, name, lambda text, *_, **__: texts.append(text))
    theirs = fit(make, "auto", batches=6)
    ours = fit(make, "spmd", batches=6)
    assert ours[1].strategy.mode == "eager"
    assert any(reason in text for text in texts), texts
    assert_bitwise(state_of(*ours), state_of(*theirs))


class ListsOfWeights(SeveralSteps):
    """Operators on lists name no result: a graph shows the update by its writes alone."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.net.parameters(), lr=0.01, foreach=True)


def test_a_weight_that_was_updated_is_cast_again() -> None:
    theirs, ours = (fit(ListsOfWeights, s, batches=6, precision="bf16-mixed") for s in ("auto", "spmd"))
    assert ours[1].strategy.mode == "compiled"
    assert_bitwise(state_of(*ours), state_of(*theirs))


class ReadsTheRateTooLate(Alone):
    """Computes with the rate behind the scheduler's step."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()
        schedule: Any = self.lr_schedulers()
        schedule.step()
        self.log("rate", 1e3 * schedule.get_last_lr()[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def _on_ranks() -> tuple[str, list[tuple[float, ...]]]:
    module, trainer = fit(ReadsTheRateTooLate, "spmd", 2, batches=4)
    return str(trainer.strategy.mode), module.seen


def test_ranks_may_read_the_rate_behind_the_schedulers_step(two_ranks: RankPool) -> None:
    seen = fit(ReadsTheRateTooLate, "auto", batches=4)[0].seen
    assert two_ranks.run(_on_ranks) == [("compiled", seen)] * 2
