"""Steps that read two dozen values on several ranks before they have a graph: pieces of them run, each once."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_spmd import stages
from lightning_spmd.stages.capture.pieces import PiecewiseTrace
from lightning_spmd.stages.capture.record.recorder import Recorder
from lightning_spmd.strategy.graphs.building import GraphBuilder
from tests.helpers.ranks import RankPool
from tests.helpers.training import InOrder, Result, assert_compiled, assert_equals_one_device
from tests.strategy.small import ROWS, Net, Quiet, rows, run

PLANS: dict[str, Any] = {
    "replicate": {},
    "zero3": {"data_parallel": "zero3"},
    "tensor": {"tensor_parallel_size": 2, "tensor_parallel_plan": {"first": "colwise", "last": "rowwise"}},
}


class Reads(Quiet):
    """Keeps what it has read."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[float]] = []


class Writes(Reads):
    """In-place writes, and views, between reads, into results and a buffer; branches."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(10))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        (x, y), seen = batch, list[float]()
        self.average.mul_(0.9)
        seen.append(self.average.sum().item() + 1)
        hidden = torch.tanh(self.first(x))
        table = hidden.detach().clone()
        columns, flipped = table[:, 2:5], table.t()
        for turn in range(4):
            seen.append(table.square().sum().item())
            columns.mul_(1.1 + 0.1 * turn)
            seen.append(flipped[3].square().sum().item())
            if seen[-1] > 1.5:
                table.add_(0.1)
            else:
                table[:, 0] = 0.5
            seen.append(columns.square().mean().item())
            flipped[turn].zero_()
            seen.append(table[:, turn].abs().sum().item() + 1)
            hidden = hidden * (1 + 0.01 * math.tanh(seen[-1]))
            seen.append(hidden.abs().mean().item())
        self.average.add_(hidden.detach().square().mean(0), alpha=0.1)
        seen.append(self.average.sum().item())
        largest, places = table.max(1)
        seen += [largest.square().mean().item(), float(places.float().mean().item())]
        self.seen.append(seen)
        loss = F.cross_entropy(self.last(hidden), y)
        return loss * (1 + 0.1 * seen[4]) / (1 + loss.item())


class Turns(Reads):
    """The same layers more often, as values say; the second derivative is read too."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        (x, y), seen = batch, list[float]()
        x = x.clone().requires_grad_()
        hidden = torch.tanh(self.first(x))
        for turn in range(9):
            seen.append(hidden.abs().mean().item())
            if batch_idx % 2 and turn > 5:
                hidden = hidden * 1.1
                seen.append(hidden.abs().max().item())
            hidden = hidden * (0.9 if seen[-1] > 0.4 else 1.01)
        scores = self.last(hidden)
        (slopes,) = torch.autograd.grad(scores.square().sum(), x, create_graph=True)
        seen += [slopes.norm().item(), slopes.abs().max().item()]
        (curves,) = torch.autograd.grad(slopes.square().sum(), self.first.weight, retain_graph=True)
        seen.append(curves.norm().item())
        self.seen.append(seen)
        return F.cross_entropy(scores, y) + 0.1 * slopes.square().mean()


class ByHand(Reads):
    """Backward passes and steps between reads, of gradients and of weights that have moved."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        seen: list[float] = []
        for _ in range(4):
            loss = self.loss(batch)
            self.log("loss", loss)
            seen.append(loss.item())
            optimizer.zero_grad()
            self.manual_backward(loss)
            gradients = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
            seen.append(gradients[0].norm().item())
            seen.append(sum(gradient.abs().sum().item() for gradient in gradients))
            optimizer.step()
            seen.append(self.first.weight.square().sum().item())
            with torch.no_grad():
                self.last.bias.mul_(0.9)
            seen.append(self.last.bias.square().sum().item() + 1)
        self.seen.append(seen)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01, eps=1e-5)


class Validates(Reads):
    """An evaluation that reads."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        hidden, seen = torch.tanh(self.first(batch[0])), list[float]()
        for _ in range(8):
            seen.append(hidden.abs().mean().item())
            hidden = hidden * (0.9 if seen[-1] > 0.4 else 1.01)
            hidden.add_(0.01 * seen[-1])
        self.seen.append(seen)
        self.log("val_loss", F.cross_entropy(self.last(hidden), batch[1]) * seen[-1])

    def val_dataloader(self) -> Any:
        return InOrder(rows(), ROWS, shuffle=False)


class Counted:
    """What was done for values that Python reads: pieces, and graphs of whole beginnings."""

    def __init__(self) -> None:
        self.pieces = self.beginnings = 0

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """A context in which they are counted."""
        piece, built = PiecewiseTrace.piece, GraphBuilder.beginning
        with (
            mock.patch.object(PiecewiseTrace, "piece", autospec=True, side_effect=piece) as pieces,
            mock.patch.object(GraphBuilder, "beginning", autospec=True, side_effect=built) as beginnings,
        ):
            yield
        self.pieces, self.beginnings = pieces.call_count, beginnings.call_count


def _fitted(make: type[Reads], strategy: Any, devices: int, **flags: Any) -> tuple[Result, Any, bytes, Counted]:
    kept: list[Reads] = []

    def made() -> Reads:
        kept.append(make())
        return kept[0]

    counted = Counted()
    with counted.active():
        data = None if devices > 1 else lambda: InOrder(rows(), ROWS, shuffle=False)
        result = run(made, strategy, devices, data=data, max_epochs=2, **flags)
    return result, kept[0].seen, torch.get_rng_state().numpy().tobytes(), counted


def _assert_read_as_on_one_device(make: type[Reads], plan: Any, ranks: RankPool, **flags: Any) -> Counted:
    """Losses, weights, what was read, and torch's random state behind the fit."""
    theirs, told, state, _ = _fitted(make, "auto", 1, **flags)
    ours = ranks.run(_fitted, make, plan or "spmd", 2, **flags)
    assert_compiled(*(result for result, *_ in ours))
    assert_equals_one_device([result for result, *_ in ours], theirs)
    for _, seen, state_here, _ in ours:
        assert state_here == state
        for mine, its in zip(seen, told, strict=True):
            assert mine == pytest.approx(its, rel=1e-5)
    return ours[0][3]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("make", [Writes, Turns, ByHand])
def test_two_dozen_values_are_one_devices(make: type[Reads], plan: str, two_ranks: RankPool) -> None:
    counted = _assert_read_as_on_one_device(make, PLANS[plan], two_ranks)
    if (make, plan) == (Writes, "tensor"):  # what is left lies in columns, which overlap with those that are written
        assert counted.beginnings > 15
        return
    assert counted.pieces > 15
    assert counted.beginnings < 8


def test_evaluation_reads_in_pieces(two_ranks: RankPool) -> None:
    counted = _assert_read_as_on_one_device(Validates, PLANS["zero3"], two_ranks, limit_val_batches=3)
    assert counted.pieces > 5


class Drops(Net):
    """Dropout, and other draws, between reads. What is read is also kept as a tensor, which the step's graph gives."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.dropout(torch.tanh(self.first(batch[0])))
        self.pairs: list[tuple[float, Tensor]] = []
        for turn in range(6):
            mean = hidden.square().mean()
            self.pairs.append((mean.item(), mean.detach()))
            hidden = self.dropout(hidden) + 0.1 * torch.rand(3 if turn % 2 else ()).sum()
            noise = torch.randn(10)
            self.pairs.append((noise.sum().item(), noise.sum()))
            hidden = hidden + 0.01 * noise
        return F.cross_entropy(self.last(hidden), batch[1])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for read, kept in self.pairs:
            assert read == pytest.approx(float(kept), rel=1e-5)


def _dropped(plan: Any) -> tuple[Result, int]:
    counted = Counted()
    with counted.active():
        result = run(Drops, plan or "spmd", 2, max_epochs=1)
    return result, counted.pieces


@pytest.mark.parametrize("plan", PLANS)
def test_pieces_draw_the_numbers_of_the_graph(plan: str, two_ranks: RankPool) -> None:
    (first, pieces), (second, _) = two_ranks.run(_dropped, PLANS[plan])
    assert_compiled(first, second)
    assert pieces > 5


class ManyReads(Quiet):
    """So many reads, with the same calls in front of each."""

    count = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = torch.tanh(self.first(batch[0]))
        for _ in range(self.count):
            hidden = torch.tanh(hidden * (1 + 0.01 * hidden.square().mean().item()))
        return F.cross_entropy(self.last(hidden), batch[1])


def _work(count: int) -> tuple[int, int]:
    """Operators that are recorded, and nodes that are expanded, in a first step with so many reads."""
    expanded, original = list[int](), stages.expand

    def expand(captured: Any, *args: Any) -> Any:
        expanded.append(len(captured.graph_module.graph.nodes))
        return original(captured, *args)

    make = type("ManyReads", (ManyReads,), {"count": count})
    record = Recorder._record
    with (
        mock.patch.object(stages, "expand", expand),
        mock.patch.object(Recorder, "_record", autospec=True, side_effect=record) as recorded,
    ):
        run(make, "spmd", 2, max_epochs=1, limit_train_batches=1)
    return recorded.call_count, sum(expanded)


def test_the_first_step_captures_nothing_once_for_each_read(two_ranks: RankPool) -> None:
    """Twice as many reads are twice as much work, not four times as much."""
    few, more, most = (two_ranks.run(_work, count)[0] for count in (6, 12, 24))
    for kind in range(2):
        assert most[kind] - more[kind] <= 2.1 * (more[kind] - few[kind])
