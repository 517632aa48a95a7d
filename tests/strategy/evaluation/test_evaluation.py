"""Validation and test steps as graphs: what one device computes, whatever the ranks hold."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_spmd.parallel.parallel_plan import ShardedStatePlan
from tests.helpers import simulate
from tests.helpers.ranks import RankPool
from tests.helpers.training import QUIET, Result, assert_bitwise, fit
from tests.strategy.evaluations import (
    ROWS,
    ByLoader,
    Everything,
    InGraphs,
    Loaders,
    assert_same_metrics,
    evaluate,
    joined,
    made,
)
from tests.strategy.small import Net


def test_one_device_is_bitwise_the_plain_trainer() -> None:
    ours, theirs = evaluate(Everything, True), evaluate(Everything, False)
    assert (ours.captures, ours.eager_steps) == (2, 0), ours.warnings
    assert ours.validated == theirs.validated
    assert ours.tested == theirs.tested
    for a, b in zip(ours.predicted[0], theirs.predicted[0], strict=True):
        assert a.keys() == b.keys()
        assert all(torch.equal(torch.as_tensor(a[k]), torch.as_tensor(b[k])) for k in b)
    for a, b in zip(ours.outputs, theirs.outputs, strict=True):
        assert all(torch.equal(a[k], b[k]) for k in b)


@pytest.mark.parametrize("count", [24, pytest.param(20, marks=pytest.mark.long), 21])
def test_two_ranks_equal_one_device(two_ranks: RankPool, count: int) -> None:
    """24 rows: whole batches; 20: a smaller last one; 21: in which the ranks hold three rows and two."""
    theirs = evaluate(Everything, False, sizes=(count,))
    results = two_ranks.run(evaluate, Everything, True, 2, sizes=(count,))
    for ours in results:
        assert (ours.captures, ours.eager_steps) == (1 if count == 24 else 2, 0), ours.warnings
        assert_same_metrics(ours, theirs)
    for key in ("class", "logits", "target"):
        torch.testing.assert_close(joined(results, key), joined([theirs], key), rtol=1e-5, atol=1e-6)


def test_several_dataloaders_equal_one_device(two_ranks: RankPool) -> None:
    sizes = (16, 20)
    theirs = evaluate(ByLoader, False, sizes=sizes)
    assert set(theirs.validated[1]) == {"loss/dataloader_idx_1", "scaled/dataloader_idx_1", "own_1"}
    results = [evaluate(ByLoader, True, sizes=sizes), *two_ranks.run(evaluate, ByLoader, True, 2, sizes=sizes)]
    for ours in results:
        assert ours.captures > 0
        assert ours.eager_steps == 0, ours.warnings
        assert_same_metrics(ours, theirs)
    torch.testing.assert_close(joined(results[1:], None), joined([theirs], None), rtol=1e-5, atol=1e-6)


class LooksAtMemory(Everything):
    """Validation cannot be followed, test and predict can."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        loss.untyped_storage()
        self.log("val/loss", loss, sync_dist=True)


def test_what_cannot_be_followed_runs_eagerly_and_says_so(two_ranks: RankPool) -> None:
    theirs = evaluate(LooksAtMemory, False, sizes=(24,))
    results = [
        evaluate(LooksAtMemory, True, sizes=(24,)),
        *two_ranks.run(evaluate, LooksAtMemory, True, 2, sizes=(24,)),
    ]
    for rank, ours in enumerate(results):
        assert (ours.captures, ours.eager_steps) == (0, 3)
        assert_same_metrics(ours, theirs)
        told = [w for w in ours.warnings if "runs validation_step eagerly" in w]
        assert len(told) == (0 if rank == 2 else 1)  # ranks above 0 say nothing
        assert all("test_evaluation.py:" in w and "untyped_storage" in w for w in told)


class Steady(Everything):
    """Without dropout in training, for comparisons across numbers of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Identity()


class FallsBackLater(Steady):
    """Eager from the second batch on: keys that graphs have logged go on in such steps."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if self.trainer.global_step >= 8:
            loss.untyped_storage()
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if batch_idx >= 1:
            loss.untyped_storage()
        self.log("val", loss, on_step=True, sync_dist=True)
        self.log("largest", loss, reduce_fx="max")
        self.accuracy.update(self(batch[0]), batch[1])
        self.log("accuracy", self.accuracy)

    test_step = validation_step


def test_a_step_may_fall_back_after_its_first_batches(two_ranks: RankPool) -> None:
    theirs = evaluate(FallsBackLater, False, sizes=(24,))
    for ours in two_ranks.run(evaluate, FallsBackLater, True, 2, sizes=(24,)):
        assert ours.eager_steps == 4  # two of three batches, in validation and test
        for mine, reference in zip(ours.validated + ours.tested, theirs.validated + theirs.tested, strict=True):
            del mine["largest"]  # each rank's own, as in any eager evaluation
            assert mine == pytest.approx({k: v for k, v in reference.items() if k != "largest"}, rel=1e-5)


def test_training_may_fall_back_after_its_first_batches(two_ranks: RankPool) -> None:
    """Batch norm then sees a rank's rows alone, as with DDP, so only the first of three epochs is one device's."""
    theirs = epoch_losses(train(FallsBackLater, "auto", limit_val_batches=0))
    first, second = two_ranks.run(train, FallsBackLater, "spmd", 2, limit_val_batches=0)
    assert any("untyped_storage" in text and "test_evaluation.py" in text for text in first.warnings), first.warnings
    assert epoch_losses(first)[0] == pytest.approx(theirs[0], rel=1e-5)
    assert epoch_losses(first) == pytest.approx(theirs, rel=0.1)
    assert first.final["loss_epoch"] == second.final["loss_epoch"]


def epoch_losses(result: Result) -> list[float]:
    return [row["loss_epoch"] for _, row in result.to_logger if "loss_epoch" in row]


class Unsplittable(Everything):
    """Test batches that have no common first dimension; every rank can go on with its own."""

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("loss", F.cross_entropy(self(batch["x"]), batch["y"]) * batch["scale"].mean(), sync_dist=True)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {"x": batch[0], "y": batch[1], "scale": torch.ones(3)} if self.trainer.testing else batch


def test_batches_that_cannot_be_split_run_eagerly_and_say_so(two_ranks: RankPool) -> None:
    theirs = evaluate(Unsplittable, False, sizes=(24,))
    for rank, ours in enumerate(two_ranks.run(evaluate, Unsplittable, True, 2, sizes=(24,))):
        assert (ours.captures, ours.eager_steps) == (1, 3)
        assert_same_metrics(ours, theirs)
        told = [w for w in ours.warnings if "runs test_step eagerly" in w and "no common first dimension" in w]
        assert len(told) == 1 - rank


@pytest.mark.parametrize("flags", [{"precision": "bf16-mixed"}, {"precision": "64-true"}, {"inference_mode": False}])
def test_precision_and_grad_modes_are_those_of_the_trainer(flags: dict[str, Any]) -> None:
    ours, theirs = evaluate(Everything, True, **flags), evaluate(Everything, False, **flags)
    assert (ours.captures, ours.eager_steps) == (2, 0)
    assert (ours.validated, ours.tested) == (theirs.validated, theirs.tested)
    for a, b in zip(ours.predicted[0], theirs.predicted[0], strict=True):
        assert a["logits"].dtype == b["logits"].dtype
        assert torch.equal(a["logits"], b["logits"])


def test_ranks_with_fewer_batches_to_validate_are_told_so(two_ranks: RankPool) -> None:
    with pytest.raises(AssertionError, match=r"different numbers of batches for validation: \[\[2\], \[1\]\]"):
        two_ranks.run(evaluate, Everything, True, 2, sizes=(9,))


class Gathers(Everything):
    """Lightning's recipe for the end of an epoch; the list's name is private."""

    def __init__(self) -> None:
        super().__init__()
        self._outputs: list[Any] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self._outputs.append({"loss": loss, "right": self(batch[0]).argmax(-1) == batch[1], "number": batch_idx})

    def on_validation_epoch_end(self) -> None:
        self.log("mean", torch.stack([o["loss"] for o in self._outputs]).mean())
        right = torch.cat([o["right"] for o in self._outputs]).float().mean()
        self.log("right", right, sync_dist=True)
        self.log("last", float(self._outputs[-1]["number"]))
        self._outputs.clear()


def test_a_list_that_the_step_appends_to_is_there_at_the_epochs_end(two_ranks: RankPool) -> None:
    theirs = evaluate(Gathers, False, sizes=(24,))
    results = [evaluate(Gathers, True, sizes=(24,)), *two_ranks.run(evaluate, Gathers, True, 2, sizes=(24,))]
    for ours in results:
        assert (ours.captures, ours.eager_steps) == (1, 0), ours.warnings
        assert_same_metrics(ours, theirs)


class LooksAtItsList(Gathers):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.log("many", float(len(self._outputs)))


def test_a_step_may_look_at_the_list_it_appends_to() -> None:
    ours, theirs = evaluate(LooksAtItsList, True), evaluate(LooksAtItsList, False)
    assert (ours.captures, ours.eager_steps) == (2, 0)
    assert ours.validated == theirs.validated


# ---------------------------------------------------------------------- parameters in chunks
@pytest.mark.parametrize("split", [(4, 4), (5, 3), (2, 2, 2, 2)])
def test_a_step_on_parameters_in_chunks_equals_one_device(split: tuple[int, ...]) -> None:
    """What these graphs are for: no rank has the parameters (ZeRO 3), every rank gathers them as it needs them."""
    strategy, module = InGraphs(), Everything()
    trainer = L.Trainer(strategy=strategy, devices=1, **QUIET)
    trainer.validate(module, Loaders((ROWS,)), verbose=False)
    assert strategy._evaluation.graphs is not None
    executable = strategy._evaluation.graphs.table.executables[0]
    x, y = (torch.stack(column) for column in zip(*made(ROWS, 5), strict=True))
    live = executable.inputs([x, y])
    simulate.assert_equals_one_device(executable.captured, live, split, plan=ShardedStatePlan(parameters=True))


# ---------------------------------------------------------------------- inside fit
def train(make: Callable[[], L.LightningModule], strategy: Any, devices: int = 1, **flags: Any) -> Result:
    L.seed_everything(11)
    data = Loaders((20,))
    settings = {"max_epochs": 3, "use_distributed_sampler": False, "num_sanity_val_steps": 0, **flags}
    return fit(make(), data, strategy, devices, **settings)[0]


class Noisy(Everything):
    """Dropout in training, and random numbers in validation too."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.2)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("noisy", F.cross_entropy(self(batch[0] + torch.randn_like(batch[0])), batch[1]))


VALIDATES = {"limit_val_batches": 1.0, "val_check_interval": 2, "num_sanity_val_steps": 2}


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.long), True])
def test_validation_in_mid_epoch_leaves_training_as_it_was(two_ranks: RankPool, overlap: bool) -> None:
    settings = {"overlap_iterations": overlap}
    without = two_ranks.run(train, Noisy, settings, 2, limit_val_batches=0)
    with_validation = two_ranks.run(train_in_graphs, Noisy, 2, settings, **VALIDATES)
    for ours, theirs in zip(with_validation, without, strict=True):
        assert ours.losses == theirs.losses
        assert all(torch.equal(ours.weights[k], v) for k, v in theirs.weights.items())


def train_in_graphs(
    make: Callable[[], L.LightningModule], devices: int = 1, settings: dict[str, Any] | None = None, **flags: Any
) -> Result:
    strategy = InGraphs(**(settings or {}))
    result = train(make, strategy, devices, **flags)
    assert strategy.eager_steps == 0
    assert strategy.evaluation_captures > 0
    assert strategy.captures > 0
    return result


def test_a_fit_with_validation_is_bitwise_the_plain_trainer_on_one_device() -> None:
    """Random numbers of validation included: one device draws eager's own."""
    assert_bitwise(train_in_graphs(Noisy, **VALIDATES), train(Noisy, "auto", **VALIDATES))


def test_a_fit_with_validation_equals_one_device(two_ranks: RankPool) -> None:
    theirs = train(Steady, "auto", **VALIDATES)
    for ours in two_ranks.run(train_in_graphs, Steady, 2, **VALIDATES):
        assert ours.losses == pytest.approx(theirs.losses, rel=1e-5)
        assert ours.final == pytest.approx(theirs.final, rel=1e-5)
        for (step, mine), (their_step, reference) in zip(ours.to_logger, theirs.to_logger, strict=True):
            assert step == their_step
            assert mine == pytest.approx(reference, rel=1e-4)


def test_random_numbers_of_evaluation_are_reproducible(two_ranks: RankPool) -> None:
    """Also where more was evaluated before: they follow from the place in the run."""
    first, again = (
        two_ranks.run(train_in_graphs, Noisy, 2, **{**VALIDATES, "num_sanity_val_steps": steps}) for steps in (2, 0)
    )
    assert math.isfinite(first[0].final["noisy"])
    assert first[0].final == again[0].final == first[1].final


class Draws(Everything):
    """Validation returns what it drew for each row."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return {"drawn": torch.rand_like(batch[0][:, 0])}


def test_every_batch_of_an_evaluation_draws_numbers_of_its_own(two_ranks: RankPool) -> None:
    results = two_ranks.run(evaluate, Draws, True, 2, sizes=(24,))
    drawn = torch.cat([output["drawn"] for result in results for output in result.outputs])
    assert len(drawn) == 24
    assert len(drawn.unique()) == 24


class CountsBatches(Everything):
    """A buffer written in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen += batch[0].shape[0]
        self.log("seen", self.seen, reduce_fx="max")


def test_buffers_written_in_evaluation_are_kept(two_ranks: RankPool) -> None:
    theirs = evaluate(CountsBatches, False)
    assert theirs.validated[0]["seen"] == 20
    for ours in [evaluate(CountsBatches, True), *two_ranks.run(evaluate, CountsBatches, True, 2)]:
        assert ours.captures > 0
        assert ours.validated == theirs.validated


class SwitchesDropoutOn(Net):
    """A submodule in training mode within evaluation: the flag is guarded."""

    def on_validation_start(self) -> None:
        self.dropout.train(self.trainer.current_epoch == 1)

    def on_validation_end(self) -> None:
        self.dropout.train()


def test_the_training_flag_of_a_submodule_is_seen() -> None:
    flags = {"limit_val_batches": 1.0}
    assert_bitwise(train_in_graphs(SwitchesDropoutOn, **flags), train(SwitchesDropoutOn, "auto", **flags))
