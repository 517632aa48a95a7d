"""What training_step says in Python holds for that step; never a constant."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor

from lightning_spmd.errors import SPMDError
from tests.helpers.ranks import RankPool
from tests.strategy.small import Net, Quiet, assert_as_eager, run

Step = Callable[[Net, Any, int], Tensor]


def _module(step: Step) -> type[Net]:
    class Stepping(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return step(self, batch, batch_idx)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=30)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    return Stepping


def rate_of_the_optimizer(self: Net, batch: Any, _: int) -> Tensor:
    optimizer: Any = self.optimizers()
    self.log("rate", optimizer.param_groups[0]["lr"])
    return self.loss(batch)


def rate_of_the_scheduler(self: Net, batch: Any, _: int) -> Tensor:
    scheduler: Any = self.lr_schedulers()
    self.log("rate", scheduler.get_last_lr()[0])
    return self.loss(batch)


def rate_through_the_trainer(self: Net, batch: Any, _: int) -> Tensor:
    self.log("rate", self.trainer.optimizers[0].param_groups[0]["lr"])
    return self.loss(batch)


def loss_times_a_ramp(self: Net, batch: Any, _: int) -> Tensor:
    return self.loss(batch) * min(1.0, self.global_step / 7)


def loss_times_a_cosine(self: Net, batch: Any, _: int) -> Tensor:
    weight = 0.5 * (1 + math.cos(math.pi * self.global_step / 20))
    self.log("weight", weight)
    return self.loss(batch) * (0.1 + weight)


def name_with_the_batch_index(self: Net, batch: Any, batch_idx: int) -> Tensor:
    loss = self.loss(batch)
    self.log(f"loss_{batch_idx % 2}", loss)
    return loss


def tensor_of_the_step(self: Net, batch: Any, batch_idx: int) -> Tensor:
    return self.loss(batch) * (1 + torch.tensor(batch_idx) / 10)


@pytest.mark.parametrize(
    "step",
    [
        rate_of_the_optimizer, rate_of_the_scheduler, rate_through_the_trainer, loss_times_a_ramp, loss_times_a_cosine,
        name_with_the_batch_index, tensor_of_the_step,
    ],
)  # fmt: skip
def test_numbers_that_change_are_followed(step: Step) -> None:
    ours = assert_as_eager(_module(step))
    assert ours.captures <= 4


def seeds_torch(self: Net, batch: Any, batch_idx: int) -> Tensor:
    torch.manual_seed(batch_idx)
    return self.loss(batch)


def registers_a_buffer(self: Net, batch: Any, _: int) -> Tensor:
    if not hasattr(self, "count"):
        self.register_buffer("count", torch.zeros(()))
    self.count += 1  # type: ignore[operator]
    self.log("count", self.count)  # type: ignore[arg-type]
    return self.loss(batch)


@pytest.mark.parametrize("step", [seeds_torch, registers_a_buffer])
def test_what_a_step_does_happens_in_each_step(step: Step) -> None:
    assert_as_eager(_module(step))


class OwnGenerator(Net):
    """Draws from a generator that is no part of the run's random state."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def loss(self, batch: Any) -> Tensor:
        return super().loss((batch[0] + torch.rand(batch[0].shape, generator=self.generator), batch[1]))


def test_a_generator_of_ones_own_goes_on_in_each_step() -> None:
    assert_as_eager(OwnGenerator)


class StopsItself(Net):
    """Ends its epoch in the fourth batch, as a generator that is used up does."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 3:
            raise StopIteration
        return super().training_step(batch, batch_idx)


def test_a_stop_iteration_of_the_users_ends_the_epoch_as_in_eager_training() -> None:
    result = assert_as_eager(StopsItself)
    assert len(result.losses) == 9  # three epochs of three batches


class Stopping(torchmetrics.MeanMetric):
    """Raises what Lightning's loops take for the end of the data."""

    def update(self, value: Any, weight: Any = 1.0) -> None:
        raise StopIteration


class StoppingMetric(Net):
    def __init__(self) -> None:
        super().__init__()
        self.metric = Stopping()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.metric.update(loss)
        return loss


def test_a_stop_iteration_around_a_graph_does_not_end_the_run_mutely() -> None:
    with pytest.raises(SPMDError, match=r"a StopIteration was raised .* at .*test_python_in_training_step.py:\d+"):
        run(StoppingMetric)


def _exchanging(method: str) -> tuple[str, list[Any]]:
    answers: list[Any] = []

    class Exchanges(Quiet):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            strategy: Any = self.trainer.strategy
            mine = self.global_rank + batch_idx if method == "broadcast" else batch_idx % 2 == 1
            answers.append(getattr(strategy, method)(*([] if method == "barrier" else [mine])))
            return super().training_step(batch, batch_idx)

    result = run(Exchanges, "spmd", 2, max_epochs=1)
    return result.mode, answers


def test_ranks_exchange_what_a_step_asks_for_in_each_step(two_ranks: RankPool) -> None:
    for method in ("barrier", "broadcast", "reduce_boolean_decision"):
        for mode, answers in two_ranks.run(_exchanging, method):
            numbers = range(len(answers))
            wanted = {"barrier": [None for _ in numbers], "broadcast": list(numbers)}
            assert mode == "compiled"
            assert len(answers) > 2
            assert answers == wanted.get(method, [i % 2 == 1 for i in numbers])
