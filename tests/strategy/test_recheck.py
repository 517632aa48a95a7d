"""The net below the guards: values that hide from every guard are found by tracing the step again, and never used."""

from __future__ import annotations

import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_spmd.errors import ConfigurationError, StaleGraphError
from lightning_spmd.strategy import recheck
from lightning_spmd.strategy.recheck import Schedule
from tests.helpers.ranks import RankError, RankPool, with_captured_steps
from tests.helpers.training import InOrder, Result, assert_compiled, assert_equals_one_device
from tests.strategy.hidden_values import HIDDEN, line_of, look_at_every_use
from tests.strategy.small import ROWS, Net, Quiet, assert_as_eager, loader_of, rows, run


@pytest.fixture(autouse=True)
def hidden() -> Iterator[None]:
    HIDDEN.value = 1.0
    yield
    HIDDEN.value = 1.0


@pytest.fixture
def at_every_use(monkeypatch: pytest.MonkeyPatch) -> None:
    look_at_every_use(monkeypatch.setattr)


@pytest.fixture
def no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recheck, "ALLOWANCE_SECONDS", 1e9)


# ---------------------------------------------------------------------- values that change from step to step
class Hides(Net):
    """Its loss is scaled by what ``hidden`` gives."""

    def on_train_start(self) -> None:
        HIDDEN.value = 1.0

    def hidden(self) -> Any:
        return HIDDEN.value

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * self.hidden()  # HERE


class EachStep(Hides):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        HIDDEN.value *= 0.9


class InClock(EachStep):
    """A branch that depends on a clock; here one that a hook sets."""

    def hidden(self) -> Any:
        return 1.0 if HIDDEN.value > 0.75 else 0.5


class Raising(EachStep):
    def hidden(self) -> Any:
        return 1.0 if HIDDEN.value > 0.75 else math.fsum([self.first.weight.sum()]) + 0.5  # HERE


class LogsTime(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("seconds", time.perf_counter() % 10.0)  # HERE: float32 on its way
        return self.loss(batch)


class Returns(Hides):
    def training_step(self, batch: Any, batch_idx: int) -> Any:  # HERE
        return {"loss": self.loss(batch), "rate": HIDDEN.value}


class ReturnsEachStep(Returns, EachStep):
    pass


@pytest.mark.usefixtures("captured_steps")
def test_what_changes_at_each_step_is_eager_before_it_did_harm() -> None:
    ours = assert_as_eager(EachStep, mode="eager")
    anew, eagerly = (w for w in ours.warnings if "strategy='spmd'" in w)
    assert "builds a graph anew before it was ever used with an old value" in anew
    assert "trains eagerly from here on" in eagerly
    assert all(line_of(Hides) in w for w in (anew, eagerly))
    assert "now: aten.mul.Tensor(" in anew


@pytest.mark.usefixtures("captured_steps")
def test_a_value_that_changes_once_at_the_beginning_costs_a_graph() -> None:
    ours = assert_as_eager(InClock)
    assert ours.captures == 3
    (told,) = [w for w in ours.warnings if "strategy='spmd'" in w]
    assert "1.0)\n" in told
    assert "0.5)\n" in told


@pytest.mark.usefixtures("captured_steps")
def test_a_step_that_cannot_be_captured_any_more_is_eager() -> None:
    ours = assert_as_eager(Raising, mode="eager")
    assert any("cannot be captured any more" in w and line_of(Raising.hidden) in w for w in ours.warnings)


@pytest.mark.usefixtures("captured_steps")
def test_a_clock_that_is_logged_is_not_frozen() -> None:
    ours = run(LogsTime)
    assert ours.mode == "eager"
    seconds = [entry["seconds"] for entry in ours.logged]
    assert len(set(seconds)) == len(seconds)
    (told,) = [w for w in ours.warnings if line_of(LogsTime) in w]
    assert "calls perf_counter()" in told


@pytest.mark.usefixtures("captured_steps")
def test_plain_values_that_are_returned_are_not_frozen() -> None:
    ours = assert_as_eager(ReturnsEachStep, mode="eager")
    told = [w for w in ours.warnings if "was: training_step returns {'loss': <output 1>, 'rate': 0.81}" in w]
    assert len(told) == 1
    assert line_of(Returns.training_step) in told[0]


class Iterates(Hides):
    """Takes the next number of an iterator: what graphs and traces take of it is gone for good."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = itertools.count(1)

    def hidden(self) -> Any:
        return float(next(self.numbers))  # HERE


@pytest.mark.usefixtures("captured_steps")
def test_an_iterator_that_each_step_advances_is_announced() -> None:
    ours = assert_as_eager(Iterates, mode="eager")
    assert len([w for w in ours.warnings if line_of(Iterates.hidden) in w and "self.numbers, a count" in w]) == 1


# ---------------------------------------------------------------------- values that change later
class AtEpochs(Hides):
    def on_train_epoch_start(self) -> None:
        HIDDEN.value = 1.0 / (1 + self.current_epoch)


class AtStep(Hides):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        HIDDEN.value = 1.0 if self.global_step < 9 else 0.5


def stale(make: Callable[[], Net], **settings: Any) -> str:
    """Text of the error that a run ends in."""
    with pytest.raises(StaleGraphError) as caught:
        run(make, **settings)
    return str(caught.value)


@pytest.mark.usefixtures("captured_steps")
@pytest.mark.usefixtures("no_limit")
def test_what_changes_with_the_epoch_is_an_error_that_names_line_values_and_steps() -> None:
    told = stale(AtEpochs)
    assert told.startswith("training_step does something else than its graph, and no value that is watched has changed")
    assert line_of(Hides) in told
    assert "was: aten.mul.Tensor(getitem, 1.0)" in told
    assert "now: aten.mul.Tensor(getitem, 0.5)" in told
    assert "The graph was right at step 4; 1 step was made with it since" in told


@pytest.mark.usefixtures("captured_steps")
@pytest.mark.usefixtures("no_limit")
def test_what_changes_in_mid_run_is_found_when_the_number_of_uses_has_doubled() -> None:
    """Use 16 is step 16: the first step has a graph of its own."""
    told = stale(AtStep, max_epochs=10, data=lambda: InOrder(rows(200), ROWS))
    assert "The graph was right at step 8; 7 steps were made with it since" in told


class Logs(Net):
    """Logs more, less, or something else once a hidden number changed."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if HIDDEN.value == 1.0:
            self.log("big", loss, prog_bar=HIDDEN.value == 1.0)
        else:
            self.log("small", loss)  # HERE
        return loss


class LogsAtEpochs(AtEpochs, Logs):
    training_step = Logs.training_step


@pytest.mark.usefixtures("captured_steps")
@pytest.mark.usefixtures("no_limit")
def test_another_recorded_call_is_told() -> None:
    told = stale(LogsAtEpochs)
    assert line_of(Logs) in told
    assert "was: self.log('big', <output 0>, prog_bar=True)" in told
    assert "now: self.log('small', <output 0>)" in told


class HidesTensor(AtEpochs):
    """Makes a tensor of a hidden number; a list of tensors that nobody guards."""

    def hidden(self) -> Any:
        return torch.tensor([HIDDEN.value, 1.0]).mean()  # HERE


@pytest.mark.usefixtures("captured_steps")
@pytest.mark.usefixtures("no_limit")
def test_a_tensor_made_of_a_hidden_value_is_told() -> None:
    told = stale(HidesTensor)
    assert line_of(HidesTensor.hidden) in told
    assert "tensor([1., 1.])" in told
    assert "tensor([0.5000, 1.0000])" in told


@pytest.mark.usefixtures("captured_steps")
@pytest.mark.usefixtures("no_limit")
@pytest.mark.parametrize("accumulated", [2, 3])
def test_graphs_of_accumulated_batches_are_looked_at(accumulated: int) -> None:
    """Forward alone, forward with gradients, and with the optimizer; the last micro-batches of an epoch as well."""
    settings: dict[str, Any] = {"accumulate_grad_batches": accumulated, "data": lambda: InOrder(rows(22 * ROWS), ROWS)}
    assert line_of(Hides) in stale(AtEpochs, **settings)


class Hooked(Quiet):
    """Hooks on gradients: a graph up to ``p.grad`` and one for the update."""

    def on_after_backward(self) -> None:
        for p in self.parameters():
            assert p.grad is not None
            p.grad.mul_(1.0)


class HookedHides(Hooked, AtEpochs):
    pass


@pytest.mark.usefixtures("captured_steps")
@pytest.mark.usefixtures("no_limit")
def test_the_graph_up_to_gradients_is_looked_at() -> None:
    told = stale(HookedHides)
    assert line_of(Hides) in told
    assert told.startswith("training_step")


# ---------------------------------------------------------------------- no false alarm, no trace
def assert_no_alarm(make: type[Net], captures: int) -> None:
    ours = assert_as_eager(make)
    assert ours.captures == captures
    assert not [w for w in ours.warnings if "strategy='spmd'" in w]


class Prints(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        sys.stdout.write("in the step\n")
        print("by Python")
        self.print("through Lightning")
        return super().training_step(batch, batch_idx)


@pytest.mark.usefixtures("captured_steps")
@pytest.mark.usefixtures("at_every_use")
def test_looking_leaves_no_trace(capsys: pytest.CaptureFixture[str]) -> None:
    """Random numbers, logged values and weights are bitwise eager's; nothing is printed or logged a second time."""
    ours = assert_as_eager(Prints)
    assert ours.captures == 2
    (told,) = [w for w in ours.warnings if "spmd" in w or "training_step" in w]
    assert "training_step prints ('in the step')" in told
    assert "self.print" in told
    printed = capsys.readouterr().out.splitlines()
    assert printed.count("through Lightning") == printed.count("by Python") == 2 * 18
    assert printed.count("in the step") == 18 + 2  # once a capture


class SameNumberTwice(Net):
    """A counter becomes the number that stands beside it: then nobody can tell which of the two is which."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss((torch.group_norm(batch[0], 2, None, None, self.global_step), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.usefixtures("captured_steps")
@pytest.mark.usefixtures("at_every_use")
def test_a_number_that_is_frozen_in_one_trace_alone_is_compared_by_value() -> None:
    assert_no_alarm(SameNumberTwice, 1)


@dataclass
class Output:
    loss: Tensor
    beta: float


class Moves(Net):
    """A number that a hook changes at every batch: after two changes an input, which a trace has as a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.beta = 1.0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.beta *= 0.9

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch) * self.beta**2
        self.log("beta", self.beta)
        return {"loss": loss, "more": Output(loss.detach(), 2 * self.beta)}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.usefixtures("captured_steps")
@pytest.mark.usefixtures("at_every_use")
def test_numbers_that_became_inputs_are_compared_by_value() -> None:
    assert_no_alarm(Moves, 3)


class Turned(Net):
    """Batch norm of a transposed input: kernels lay it out otherwise than torch's shape functions say."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(10)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x)).unsqueeze(1).expand(-1, 4, -1)
        return self.last(self.norm(hidden.transpose(1, 2)).transpose(1, 2).mean(1))


@pytest.mark.usefixtures("at_every_use")
def test_copies_that_the_first_run_put_in_do_not_count() -> None:
    assert_no_alarm(Turned, 2)


def plans_at_every_use(make: type[Net], strategy: Any) -> tuple[Result, tuple[int, float]]:
    count = Schedule.is_due
    look_at_every_use()
    seen: list[tuple[int, float]] = []

    class Watched(make):  # type: ignore[misc, valid-type]
        def on_train_batch_end(self, *_: Any) -> None:
            seen.append(self.trainer.strategy.rechecks)

    try:
        return run(Watched, strategy, 2), seen[-1]
    finally:
        Schedule.is_due = count  # type: ignore[method-assign]


class WithAdam(Quiet):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


@pytest.mark.parametrize("plan", ["replicate", "zero3"])
def test_two_ranks_look_together(two_ranks: RankPool, plan: str) -> None:
    answers = two_ranks.run(with_captured_steps, plans_at_every_use, WithAdam, {"data_parallel": plan})
    assert_compiled(*[result for result, _ in answers])
    reference = run(WithAdam, "auto", data=lambda: InOrder(rows(), ROWS))
    assert_equals_one_device([result for result, _ in answers], reference)
    assert [count for _, (count, _) in answers] == [17, 17]
    assert answers[0][1] == answers[1][1]  # of the same times


class OneRankHides(Hides):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_rank == 1 and self.global_step >= 3:
            HIDDEN.value = 0.5


def run_without_limit(make: type[Net], strategy: Any, **settings: Any) -> Result:
    recheck.ALLOWANCE_SECONDS, before = 1e9, recheck.ALLOWANCE_SECONDS
    HIDDEN.value = 1.0
    try:
        return run(make, strategy, 2, **settings)
    finally:
        recheck.ALLOWANCE_SECONDS = before


def test_a_difference_on_one_rank_ends_all_ranks(two_ranks: RankPool) -> None:
    with pytest.raises(RankError) as caught:
        two_ranks.run(with_captured_steps, run_without_limit, OneRankHides, "spmd")
    assert caught.value.type_names == ["StaleGraphError"] * 2
    assert str(caught.value).count("does something else than its graph (on rank 1)") == 2


class OneRankAtOnce(Hides):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        HIDDEN.value = 1.0 + self.global_step * self.global_rank


def test_a_harmless_difference_on_one_rank_ends_in_the_comparison_of_the_new_graphs(two_ranks: RankPool) -> None:
    with pytest.raises(RankError) as caught:
        two_ranks.run(run_without_limit, OneRankAtOnce, "spmd")
    assert caught.value.type_names == ["RankDisagreementError"] * 2
    assert line_of(Hides) in str(caught.value)


def test_where_there_is_no_eager_path_a_value_of_each_step_is_an_error(two_ranks: RankPool) -> None:
    with pytest.raises(RankError) as caught:
        two_ranks.run(run_without_limit, EachStep, {"data_parallel": "zero3"})
    assert caught.value.type_names == [ConfigurationError.__name__] * 2
    assert line_of(Hides) in str(caught.value)


def other_batches_later() -> Any:
    """Ranks that share layers hold the same first two batches, and then their own."""
    samples = rows()
    if os.environ["RANK"] == "1":
        samples = samples[: 2 * ROWS] + samples[: 2 * ROWS : -1]
    return loader_of(samples)


def test_ranks_that_share_layers_must_go_on_to_hold_the_same_batches(two_ranks: RankPool) -> None:
    plan = {"tensor_parallel_size": 2, "tensor_parallel_plan": {"first": "colwise", "last": "rowwise"}}
    with pytest.raises(RankError) as caught:
        two_ranks.run(run_without_limit, WithAdam, plan, data=other_batches_later, use_distributed_sampler=False)
    assert caught.value.type_names == ["BatchError"] * 2
    assert "ranks 0 and 1 share layers but hold different batches" in str(caught.value)


class HidesInValidation(WithAdam):
    def on_validation_epoch_start(self) -> None:
        HIDDEN.value = 1.0 / (1 + self.current_epoch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch) * HIDDEN.value)  # HERE


def test_graphs_of_validation_are_looked_at(two_ranks: RankPool) -> None:
    with pytest.raises(RankError) as caught:
        two_ranks.run(
            run_without_limit, HidesInValidation, {"data_parallel": "zero3"}, limit_val_batches=4, data=evaluated
        )
    assert caught.value.type_names == ["StaleGraphError"] * 2
    assert "validation_step does something else than its graph" in str(caught.value)
    assert line_of(HidesInValidation) in str(caught.value)


def evaluated() -> InOrder:
    return InOrder(rows(), ROWS, evaluation=rows(4 * ROWS))
