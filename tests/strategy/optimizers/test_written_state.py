"""Steps that look at the optimizer's state, write into it, or put something else there."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.ranks import RankPool
from tests.helpers.training import InOrder, assert_equals_one_device
from tests.strategy.small import ROWS, Quiet, assert_as_eager, rows, run


class _Momentum(Quiet):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, eps=1e-3)

    @property
    def state(self) -> dict[str, Tensor]:
        entries = self.trainer.optimizers[0].state.get(self.first.weight, {})
        return {name: entry for name, entry in entries.items() if entry.dim()}


class ZeroesRows(_Momentum):
    """Of units that are drawn anew, as sparse autoencoders do."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if batch_idx == 4:
            for entry in self.state.values():
                entry[:2] = 0
        return loss


class PutsResults(_Momentum):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if batch_idx == 4:
            for name, entry in self.state.items():
                self.trainer.optimizers[0].state[self.first.weight][name] = torch.ones_like(entry) * loss.detach()
        return loss


class RateOfLoss(_Momentum):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=torch.tensor(0.01), foreach=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if batch_idx > 2:
            self.trainer.optimizers[0].param_groups[0]["lr"] = loss.detach() * 0.1
        return loss


@pytest.mark.parametrize("accumulate", [1, 3])
def test_rows_of_state_that_a_step_zeroes(accumulate: int) -> None:
    assert_as_eager(ZeroesRows, accumulate_grad_batches=accumulate)


@pytest.mark.parametrize("make", [PutsResults, RateOfLoss])
def test_results_of_the_step_in_state_and_groups(make: type[_Momentum]) -> None:
    assert_as_eager(make)
    assert_as_eager(make, accumulate_grad_batches=3)


@pytest.mark.parametrize(
    ("make", "plan"), [(ZeroesRows, "replicate"), (PutsResults, "replicate"), (PutsResults, "zero2")]
)
def test_written_state_on_ranks(two_ranks: RankPool, make: type[_Momentum], plan: str) -> None:
    results = two_ranks.run(run, make, {"data_parallel": plan}, 2, max_epochs=2)
    assert_equals_one_device(results, run(make, "auto", data=_in_order, max_epochs=2))


class Copies(Quiet):
    """What callbacks keep of a run."""

    def on_train_epoch_end(self) -> None:
        optimizer = self.trainer.optimizers[0]
        first = next(iter(optimizer.state_dict()["state"].values()))
        again = next(iter(copy.deepcopy(optimizer.state_dict())["state"].values()))
        assert again["momentum_buffer"].equal(first["momentum_buffer"])
        torch.save(optimizer.state_dict(), io.BytesIO())
        assert copy.deepcopy(self.first).weight.equal(self.first.weight)


@pytest.mark.parametrize("plan", ["zero2", "zero3"])
def test_state_and_layers_in_parts_can_be_copied_and_saved(two_ranks: RankPool, plan: str) -> None:
    results = two_ranks.run(run, Copies, {"data_parallel": plan}, 2, max_epochs=1)
    assert_equals_one_device(results, run(Copies, "auto", data=_in_order, max_epochs=1))


def _in_order() -> InOrder:
    return InOrder(rows(), ROWS)


class StartsAnew(Quiet):
    """Momentum that is None begins anew, in torch; checkpoints of older torch have it, too."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx in (0, 3):
            for entries in self.trainer.optimizers[0].state.values():
                entries["momentum_buffer"] = None


class BeginsWithNone(Quiet):
    def on_train_start(self) -> None:
        optimizer = self.trainer.optimizers[0]
        for parameter in optimizer.param_groups[0]["params"]:
            optimizer.state[parameter]["momentum_buffer"] = None


@pytest.mark.parametrize("make", [StartsAnew, BeginsWithNone])
def test_state_that_is_none(make: type[Quiet], two_ranks: RankPool) -> None:
    assert_as_eager(make)
    results = two_ranks.run(run, make, {"data_parallel": "zero2"}, 2, max_epochs=2)
    assert_equals_one_device(results, run(make, "auto", data=_in_order, max_epochs=2))


class SetsWholeState(Quiet):
    def on_train_epoch_start(self) -> None:
        for parameter, entries in self.trainer.optimizers[0].state.items():
            for name in entries:
                entries[name] = torch.zeros_like(parameter)


@pytest.mark.parametrize("plan", ["replicate", "zero2", "zero3"])
def test_whole_state_that_a_hook_sets(two_ranks: RankPool, plan: str) -> None:
    results = two_ranks.run(run, SetsWholeState, {"data_parallel": plan}, 2, max_epochs=3)
    assert results[0].captures == 2
    assert_equals_one_device(results, run(SetsWholeState, "auto", data=_in_order, max_epochs=3))
