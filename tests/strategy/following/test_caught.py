"""Errors of the user's Python in a step: caught as eager catches them, or told with the user's line."""

from __future__ import annotations

import contextlib
import logging
import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_spmd import _private_api as private
from tests.helpers.ranks import RankPool
from tests.helpers.training import InOrder, assert_compiled, assert_equals_one_device
from tests.strategy.small import ROWS, Quiet, assert_as_eager, rows, run


class Catches(Quiet):
    """Divisions, logarithms and powers of numbers that are read or drawn, and ``except`` around them."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, weight = self.loss(batch), 0.5
        try:
            weight = 1 / (int((batch[1] == 0).sum()) - 2)
        except ZeroDivisionError:
            loss = loss * 0.7
        with contextlib.suppress(ZeroDivisionError):
            weight = weight + 7 // random.randint(0, 2)
        try:
            perplexity = math.exp(loss.item() * 650)
        except OverflowError:
            perplexity = 1e300
        self.log("perplexity", math.log(perplexity))
        return loss * (3 + weight) * self.logarithm(loss)

    def logarithm(self, loss: torch.Tensor) -> float:
        try:
            return abs(math.log(loss.item() - 1.0))
        except ValueError:
            return 0.1


def test_what_is_caught_is_a_decision() -> None:
    ours = assert_as_eager(Catches, max_epochs=2)
    assert ours.captures > 3


def test_all_ranks_catch_alike(two_ranks: RankPool) -> None:
    ours = two_ranks.run(run, Catches, "spmd", 2, max_epochs=1)
    assert_compiled(*ours)
    assert_equals_one_device(ours, run(Catches, "auto", data=lambda: InOrder(rows(), ROWS), max_epochs=1))


class OutOfRange(Quiet):
    """Labels that are too large for a table, from a step on in which the graph is final."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.table, self.first_bad, self.steps = nn.Embedding(3, 2), first, 0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.steps == self.first_bad:
            batch[1].fill_(5)
        self.steps += 1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0]).square().mean() + self.table(batch[1]).mean()  # HERE


@pytest.mark.parametrize("step", [1, 9], ids=["measured", "final"])
def test_an_error_of_a_graph_names_the_module_and_the_line(step: int) -> None:
    with pytest.raises(IndexError, match="index out of range") as raised:
        run(lambda: OutOfRange(step), "spmd")
    (note,) = raised.value.__notes__
    with open(__file__) as source:
        line = next(number for number, text in enumerate(source, 1) if "# HERE" in text)
    assert "aten.embedding.default in module 'table'" in note
    assert note.endswith(f"{__file__}:{line}")
    assert "tlparse" not in str(raised.value)


class ShapesThatDoNotFit(Quiet):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        try:
            scores = self(x[:, :5])
        except RuntimeError:
            scores = self(x)
        return torch.nn.functional.cross_entropy(scores, y)


class _Logged(logging.Handler):
    """What torch logs of shape functions."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def logged() -> Iterator[list[logging.LogRecord]]:
    handler, logger = _Logged(), logging.getLogger("torch._subclasses.fake_tensor")
    logger.addHandler(handler)
    yield handler.records
    logger.removeHandler(handler)


def test_torch_logs_no_traceback_of_shapes_that_were_tried(logged: list[logging.LogRecord]) -> None:
    run(ShapesThatDoNotFit, max_epochs=1)
    assert not logged


def test_torch_logs_those_of_others_as_ever(logged: list[logging.LogRecord]) -> None:
    private.FakeTensorMode()
    with FakeTensorMode(), pytest.raises(RuntimeError):
        torch.ones(2, 3) @ torch.ones(2, 3)
    assert logged


class DtypesThatKernelsRefuse(Quiet):
    """Every call is tried in a cheaper dtype first; fake tensors would let all of them pass."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        try:
            scores = self(x.half())
        except RuntimeError:
            scores = self(x)
        try:
            loss = F.cross_entropy(scores, y.int())
        except RuntimeError:
            loss = F.cross_entropy(scores, y)
        return loss * self.weight(x)

    def weight(self, x: torch.Tensor) -> float:
        """An error where nobody uses the result."""
        with contextlib.suppress(RuntimeError):
            torch.cdist(x.bfloat16(), x.bfloat16())
            return 1.0
        return 0.5


def test_dtypes_that_kernels_refuse_are_caught() -> None:
    ours = assert_as_eager(DtypesThatKernelsRefuse, "eager", max_epochs=1)
    (warning,) = {text for text in ours.warnings if "eager" in text}
    assert "linear could not be recorded (RuntimeError: mat1 and mat2 must have the same dtype" in warning


class DtypesThatKernelsTake(Quiet):
    """Half and mixed precisions and inverses of complex matrices, of which neither zeros nor ones have one."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        try:
            scores = F.linear(torch.tanh(self.first(x)).bfloat16(), self.last.weight.bfloat16()).float()
        except RuntimeError:
            scores = self(x)
        gram = torch.complex(x.T @ x + 9 * torch.eye(6), x.T @ x)
        spread = torch.linalg.inv(gram).abs().sum() + torch.linalg.cholesky(gram @ gram.mH).abs().sum()
        return F.cross_entropy(scores, y) + F.embedding(y.int(), self.last.weight).mean() + spread


def test_dtypes_that_kernels_take_are_a_graph() -> None:
    assert_as_eager(DtypesThatKernelsTake, max_epochs=1)


class Recurrent(Quiet):
    """Its backward kernel gets memory that the forward kernel has made, in a form that is nobody else's business."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.recurrent = nn.LSTM(1, 6, batch_first=True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.way(batch[0]) + self.loss(batch)
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def way(self, x: torch.Tensor) -> torch.Tensor:
        return self.recurrent(x[..., None])[0].square().mean()


class ComputedTwice(Recurrent):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = True

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return checkpoint(self.way, batch[0], use_reentrant=False) + self.loss(batch)  # type: ignore[operator]


class Normed(Recurrent):
    """A kernel keeps means in another dtype than fake tensors say."""

    def way(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(self.first(x), (10,)).square().mean()


class NormedAndComputedTwice(ComputedTwice):
    def way(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(self.first(x), (10,)).square().mean()


class Segments(Quiet):
    """Lengths that are neither zeros nor ones."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden, lengths = self.first(batch[0]), torch.tensor([3, ROWS - 3], dtype=torch.int32)
        parts = torch.segment_reduce(hidden, "sum", lengths=lengths, axis=0)
        return parts.square().mean() + torch.repeat_interleave(parts, lengths, 0, output_size=ROWS).sum()


@pytest.mark.parametrize(
    ("make", "precision"),
    [
        *((make, "32-true") for make in (Recurrent, ComputedTwice, Segments)),
        *((make, "bf16-mixed") for make in (Normed, NormedAndComputedTwice, Segments)),
    ],
)
def test_kernels_are_not_tried_on_what_only_kernels_make(make: type[Quiet], precision: str) -> None:
    assert_as_eager(make, max_epochs=1, precision=precision)


class ChecksBehind(Recurrent):
    """The backward pass of ``eigvals`` checks that an inverse exists."""

    def way(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.eigvals(self.first(x).T[:6] @ x).abs().mean()


class ChecksBehindInTheStep(ChecksBehind):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = True

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        found = self.way(batch[0])
        (gradient,) = torch.autograd.grad(found, [self.first.weight], create_graph=True)
        return found + gradient.square().mean() + self.loss(batch)


@pytest.mark.parametrize("make", [ChecksBehind, ChecksBehindInTheStep])
def test_a_backward_pass_that_checks_values_is_a_graph(make: type[Quiet]) -> None:
    assert_as_eager(make, max_epochs=1)
