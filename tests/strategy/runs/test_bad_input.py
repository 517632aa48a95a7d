"""What bad input gets: an error or an announcement that names the user's thing and the fix, on every rank, in time."""

from __future__ import annotations

import inspect
import math
import random
import re
from collections.abc import Callable
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_spmd import BatchError, ConfigurationError, SPMDStrategy
from tests.helpers.ranks import RankPool
from tests.helpers.training import InOrder, Result, assert_compiled, assert_equals_one_device
from tests.strategy.small import ROWS, Net, Quiet, assert_as_eager, loader_of, rows, run


# ---------------------------------------------------------------------- things that Python does with what it reads
class Item(Quiet):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("read", float(f"{loss.item():.4f}"))
        return loss


class Branch(Quiet):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if math.fsum([loss]) > 1.0:
            loss = loss * 0.5
        return loss


class ToNumpy(Quiet):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("read", math.fsum([loss.detach().numpy()]))
        return loss


class PythonRandom(Quiet):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * (1 + random.randbytes(1)[0] / 256)


class NumpyRandom(Quiet):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        order = np.arange(3)
        np.random.shuffle(order)
        return self.loss(batch) * (1.0 + float(order[0]))


class LateBranch(Quiet):
    """Looks at the loss from the third batch on, inside an accumulation of four."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if batch_idx >= 2 and math.fsum([loss]) > 1.0:
            loss = loss * 2
        return loss


@pytest.mark.parametrize("make", [Item, Branch, ToNumpy, PythonRandom, NumpyRandom])
def test_what_python_reads_and_draws_is_as_in_eager_training(make: type[Net]) -> None:
    assert_as_eager(make)


@pytest.mark.parametrize("make", [Item, Branch, LateBranch])
def test_reads_within_an_accumulation_lose_no_gradient(make: type[Net]) -> None:
    assert_as_eager(make, accumulate_grad_batches=4)


@pytest.mark.parametrize("make", [Item, Branch, PythonRandom])
def test_two_ranks_read_and_draw_together(two_ranks: RankPool, make: type[Net]) -> None:
    results = two_ranks.run(run, make, "spmd", 2)
    assert_compiled(*results)
    assert_equals_one_device(results, run(make, "auto", data=lambda: InOrder(rows(), ROWS)))


# ---------------------------------------------------------------------- things that one graph cannot express
class Selects(Quiet):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        kinds = torch.linalg.lstsq(batch[0], batch[0], driver="gelsy").rank  # HERE
        return self.loss(batch) * (1 + 0.01 * kinds.sum())


class Sparse(Quiet):
    def forward(self, x: Tensor) -> Tensor:
        kinds = x.to_sparse()  # HERE
        return self.last(torch.tanh(torch.sparse.mm(kinds, self.first.weight.T)))


def said(result: Result) -> list[str]:
    """What the run says of steps that are no graph."""
    return [text for text in result.warnings if "eagerly" in text]


@pytest.mark.parametrize("make", [Selects, Sparse])
def test_the_announcement_names_the_line(make: type[Net]) -> None:
    source, first = inspect.getsourcelines(make)
    line = first + next(i for i, text in enumerate(source) if "# HERE" in text)
    assert any(f"test_bad_input.py:{line}" in text for text in said(assert_as_eager(make, "eager")))


@pytest.mark.parametrize("accumulate", [1, 4])
def test_two_ranks_fall_back_together(two_ranks: RankPool, accumulate: int) -> None:
    flags = {"accumulate_grad_batches": accumulate}
    results = two_ranks.run(run, Sparse, "spmd", 2, **flags)
    assert [result.mode for result in results] == ["eager", "eager"]
    assert any("test_bad_input.py" in text for text in said(results[0]))
    for name, value in run(Sparse, "auto", data=lambda: InOrder(rows(), ROWS), **flags).weights.items():
        torch.testing.assert_close(results[0].weights[name], value, rtol=1e-4, atol=1e-5)
        assert results[0].weights[name].equal(results[1].weights[name])


class OneRankBranches(Quiet):
    """Rank 1 alone does what a graph cannot express."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if self.global_rank == 1:
            loss.detach().untyped_storage()
        return loss


def test_one_rank_that_falls_back_takes_the_others_along(two_ranks: RankPool) -> None:
    first, second = two_ranks.run(run, OneRankBranches, "spmd", 2)
    assert (first.mode, second.mode) == ("eager", "eager")
    assert any("test_bad_input.py" in text for text in said(first))


class OnlyOnRankZero(Quiet):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return loss * 2 if self.global_rank == 0 else loss


def test_a_training_step_that_is_another_on_each_rank_is_named(two_ranks: RankPool) -> None:
    """The ranks go on as DDP's do, and keep one model."""
    first, second = two_ranks.run(run, OnlyOnRankZero, "spmd", 2)
    assert (first.mode, second.mode) == ("eager", "eager")
    told = r"the ranks call different things: rank 0 calls mul at .*test_bad_input\.py:\d+, rank 1 is done"
    assert any(re.search(told, text) for text in said(first)), first.warnings
    assert all(second.weights[name].equal(value) for name, value in first.weights.items())


# ---------------------------------------------------------------------- errors on every rank
def _error(make: Callable[[], L.LightningModule], strategy: Any = "spmd", **settings: Any) -> tuple[str, str]:
    """(type, message) of what the run raises."""
    try:
        run(make, strategy, 2, **settings)
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def _short_labels(items: list[Any]) -> Any:
    return {"image": torch.stack([i[0] for i in items]), "label": torch.stack([i[1] for i in items])[:-1]}


class TakesDict(Quiet):
    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(batch["image"])[: len(batch["label"])], batch["label"])


def _mismatched() -> Any:
    return loader_of(rows(32), collate_fn=_short_labels)


def test_a_batch_without_a_common_first_dimension_names_its_tensors(two_ranks: RankPool) -> None:
    for kind, message in two_ranks.run(_error, TakesDict, {"batch": "global"}, data=_mismatched):
        assert kind == "BatchError"
        assert re.search(r"batch\['image'\]: \(8, 6\), batch\['label'\]: \(7,\).*dimension 0", message)


def test_on_one_device_such_a_batch_trains() -> None:
    """Nothing is split there: a graph neural network's batch has no common dimension."""
    assert_as_eager(TakesDict, data=_mismatched)


class RankShapes(L.LightningDataModule):
    """Rank 1's rows are wider: somebody padded to the longest of each rank's batch."""

    def train_dataloader(self) -> Any:
        assert self.trainer is not None
        width = 6 + self.trainer.global_rank
        return loader_of([(F.pad(x, (0, width - 6)), y) for x, y in rows(32)])


class AnyWidth(Quiet):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:, :6])


def test_ranks_with_different_shapes_are_an_error_on_every_rank(two_ranks: RankPool) -> None:
    for kind, message in two_ranks.run(_error, AnyWidth, {"batch": "global"}, data=RankShapes):
        assert kind == "BatchError"
        assert re.search(r"rank 0: .*\[8, 6\].*rank 1: .*\[8, 7\].*pad", message, re.DOTALL)


class RankStructures(L.LightningDataModule):
    """Rank 1's batches carry one tensor more."""

    def train_dataloader(self) -> Any:
        assert self.trainer is not None
        more = self.trainer.global_rank == 1
        return loader_of([(*row, row[0]) if more else row for row in rows(32)])


def test_ranks_with_different_batch_structures_are_an_error_on_every_rank(two_ranks: RankPool) -> None:
    assert [kind for kind, _ in two_ranks.run(_error, Quiet, data=RankStructures)] == ["BatchError"] * 2


def test_an_exception_of_the_users_on_every_rank_is_the_users(two_ranks: RankPool) -> None:
    """What eager raises is raised, not hidden behind a message of ours."""
    assert {kind for kind, _ in two_ranks.run(_error, AlwaysRaises)} == {"ZeroDivisionError"}


class AlwaysRaises(Quiet):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) / (1 // 0)


# ---------------------------------------------------------------------- settings
def test_an_unknown_argument_of_the_strategy_is_named() -> None:
    with pytest.raises(TypeError, match="bucket_sise"):
        SPMDStrategy(bucket_sise=25)  # type: ignore[call-arg]


def test_an_unknown_strategy_name_is_named() -> None:
    with pytest.raises(ValueError, match=r"invalid strategy name: `strategy='spmdd'`"):
        L.Trainer(strategy="spmdd", accelerator="cpu", devices=1)


def test_tensors_left_on_another_device_are_named() -> None:
    class Left(Net):
        def __init__(self) -> None:
            super().__init__()
            self.prior = torch.zeros(3, device="meta")

    with pytest.raises(ConfigurationError, match=r"not on cpu: prior.*register_buffer"):
        run(Left)


def test_parameters_on_the_meta_device_are_named() -> None:
    class Meta(Net):
        def __init__(self) -> None:
            super().__init__()
            self.extra = nn.ParameterList([torch.empty(2, device="meta")])

    with pytest.raises(ConfigurationError, match=r"'extra' \(ParameterList\) has tensors on the meta device"):
        run(Meta)


def test_a_trainer_of_pytorch_lightning_is_explained() -> None:
    foreign = pytest.importorskip("pytorch_lightning")
    with pytest.raises((ValueError, TypeError), match="lightning"):
        foreign.Trainer(strategy=SPMDStrategy(), accelerator="cpu", devices=1, logger=False)


def test_a_module_of_pytorch_lightning_is_explained() -> None:
    foreign = pytest.importorskip("pytorch_lightning")

    class Foreign(foreign.LightningModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any: ...

        def configure_optimizers(self) -> Any: ...

    trainer = L.Trainer(strategy="spmd", accelerator="cpu", devices=1, logger=False)
    with pytest.raises(TypeError, match=r"LightningModule.*Foreign"):
        trainer.fit(Foreign(), loader_of(rows()))


# ---------------------------------------------------------------------- operators without a rule
@torch.library.custom_op("spmd_bad_input::centre", mutates_args=())
def centre(x: Tensor) -> Tensor:
    """Subtract each column's mean: a user's kernel, of which nobody knows that it needs all rows."""
    return x - x.mean(0)


@centre.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


centre.register_autograd(lambda context, gradient: centre(gradient))


class Centred(nn.Module):
    """The kernel in a module."""

    def forward(self, x: Tensor) -> Tensor:
        return centre(x)


class WithKernel(Quiet):
    def __init__(self) -> None:
        super().__init__()
        self.centred = Centred()

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + 0.01 * self.centred(self(batch[0])).square().mean()


def test_an_operator_that_must_fall_back_is_announced_and_right(two_ranks: RankPool) -> None:
    """The announcement names operator, module, line and cost, on one rank, once."""
    results = two_ranks.run(run, WithKernel, "spmd", 2)
    assert_compiled(*results)
    assert_equals_one_device(results, run(WithKernel, "auto", data=lambda: InOrder(rows(), ROWS)))
    told = {w for w in results[0].warnings if "spmd_bad_input.centre" in w}
    assert len(told) == 1
    text = told.pop()
    assert "in module 'centred'" in text
    assert "test_bad_input.py" in text
    assert re.search(r"gathered over data_parallel, \d+ bytes a step", text)
    assert "register_sharding" in text


class SumsOverRows(Quiet):
    """A running sum over the rows needs all of them on every rank, in their order."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + 0.01 * torch.logcumsumexp(self(batch[0]), dim=0).mean()


def test_an_operator_on_all_rows_equals_one_device(two_ranks: RankPool) -> None:
    """The global batch is rank 0's rows, then rank 1's: the order matters here."""
    order = [s + r + 2 * j for s in range(0, len(rows()), ROWS) for r in range(2) for j in range(ROWS // 2)]
    reference = run(SumsOverRows, "auto", data=lambda: InOrder([rows()[i] for i in order], ROWS))
    results = two_ranks.run(run, SumsOverRows, "spmd", 2)
    assert_compiled(*results)
    assert_equals_one_device(results, reference)


def test_batch_error_is_a_value_error() -> None:
    """So that code which knows nothing of this package catches it."""
    assert issubclass(BatchError, ValueError)
    assert issubclass(ConfigurationError, ValueError)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tensor_parallel_size": "2"}, "tensor_parallel_size='2': give a whole number"),
        ({"tensor_parallel_size": -1}, "tensor_parallel_size=-1: give a whole number"),
        ({"context_parallel_size": 1.5}, r"context_parallel_size=1\.5: give a whole number"),
        ({"passes": "fuse"}, r"passes='fuse': give a list of names, such as \['fuse'\]"),
        ({"dump_dir": 3}, "dump_dir=3: give the path of a folder"),
    ],
)
def test_options_of_another_kind_are_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        SPMDStrategy(**options)
