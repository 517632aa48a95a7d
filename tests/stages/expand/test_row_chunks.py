"""The loss in chunks: what is made of a head's rows, forward and backward, in a loop; equal to the whole."""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from lightning_spmd.cost.memory import peak_bytes
from lightning_spmd.ir.aliasing import storage_roots
from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.ir.steps import CapturedStep, ShardedStep
from lightning_spmd.stages import BuildOptions, build
from lightning_spmd.stages.expand.loss_chunks.row_chunks import chunk_losses
from tests.helpers.tiny_capture import capture_module

CLASSES, WIDTH, LENGTH = 397, 16, 6


class Head(nn.Module):
    def __init__(self, tied: bool = False, bias: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(CLASSES, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=bias)
        if tied:
            self.head.weight = self.table.weight
        self.register_buffer("weight", torch.rand(CLASSES) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(self.table(x))))


def flat(scores: Tensor, y: Tensor, **more: Any) -> Tensor:
    return F.cross_entropy(scores.view(-1, CLASSES), y.view(-1), **more)


def some(y: Tensor) -> Tensor:
    return torch.where(y % 3 == 0, -100, y)


def in_place(m: Head, s: Tensor, y: Tensor) -> Tensor:
    s.div_(1.3)
    return flat(s, y)


def smooth_by_hand(m: Head, s: Tensor, y: Tensor) -> Tensor:
    p = F.log_softmax(s, -1).view(-1, CLASSES)
    wanted = torch.full_like(p, 0.1 / (CLASSES - 1)).scatter_(1, y.view(-1, 1), 0.9)
    return -(wanted * p).sum(-1).mean()


def masked(m: Head, s: Tensor, y: Tensor) -> Tensor:
    mask = (y % 2 == 0).float().view(-1)
    return (flat(s, y, reduction="none") * mask).sum() / mask.sum()


def focal(m: Head, s: Tensor, y: Tensor) -> Tensor:
    p = F.log_softmax(s, -1).gather(-1, y[..., None]).squeeze(-1)
    return (-((1 - p.exp()) ** 2) * p).mean()


Loss = Callable[[Head, Tensor, Tensor], Any]
LOSSES: dict[str, Loss] = {
    "mean": lambda m, s, y: flat(s, y),
    "sum": lambda m, s, y: flat(s, y, reduction="sum") / 100,
    "shifted": lambda m, s, y: flat(s[:, :-1].float().reshape(-1, CLASSES), y[:, 1:].reshape(-1)),
    "shifted and transposed": lambda m, s, y: F.cross_entropy(s[:, :-1].transpose(1, 2), y[:, 1:]),
    "ignored": lambda m, s, y: flat(s, some(y)),
    "weights": lambda m, s, y: flat(s, some(y), weight=m.weight),
    "smooth": lambda m, s, y: flat(s, y, label_smoothing=0.1),
    "smooth, ignored": lambda m, s, y: flat(s, some(y), label_smoothing=0.1),
    "smooth, weights": lambda m, s, y: flat(s, some(y), label_smoothing=0.1, weight=m.weight),
    "smooth by hand": smooth_by_hand,
    "z-loss": lambda m, s, y: flat(s, y) + 1e-3 * s.logsumexp(-1).square().mean(),
    "masked": masked,
    "accuracy": lambda m, s, y: (flat(s, y), (s.argmax(-1) == y).float().mean()),
    "largest": lambda m, s, y: (flat(s, y), s.detach().max()),
    "focal": focal,
    "capped": lambda m, s, y: flat(30 * torch.tanh(s / 30), y),
    "in place": in_place,
    "soft targets": lambda m, s, y: F.cross_entropy(
        s.view(-1, CLASSES), F.one_hot(y.view(-1), CLASSES).float() * 0.9 + 0.1 / CLASSES
    ),
    "logistic": lambda m, s, y: F.binary_cross_entropy_with_logits(s, F.one_hot(y, CLASSES).float()),
    "scaled": lambda m, s, y: flat(s, y) / 4 * 1024.0,
}


def captured(loss: Loss, rows: int = 8, **head: bool) -> tuple[CapturedStep, list[Tensor]]:
    torch.manual_seed(0)
    batch = [torch.randint(CLASSES, (rows, LENGTH)) for _ in range(2)]
    return capture_module(Head(**head), lambda m, x, y: loss(m, m(x), y), batch)


def run(step: ShardedStep, live: list[Tensor]) -> list[Tensor]:
    with torch.no_grad():
        return fx.Interpreter(step.graph_module).run(*(v.clone() for v in live))


def sides(made: tuple[CapturedStep, list[Tensor]], **options: Any) -> tuple[ShardedStep, ShardedStep, str]:
    plain, ours = (build(made[0], (), BuildOptions(**more)) for more in ({}, {"loss_chunks": 4, **options}))
    for got, wanted in zip(run(ours.main, made[1]), run(plain.main, made[1]), strict=True):
        torch.testing.assert_close(got, wanted, rtol=2e-5, atol=2e-7)
    (remark,) = ours.remarks
    return plain.main, ours.main, remark


def widest(step: ShardedStep) -> int:
    """Elements of the largest value in memory of its own that has a number for each class of a row."""
    nodes = (n for n, root in storage_roots(step.graph_module.graph).items() if n is root and n.op == "call_function")
    shapes = [n.meta["val"].shape for n in nodes if isinstance(n.meta["val"], TensorSpec)]
    return max(math.prod(shape) for shape in shapes if CLASSES in shape and WIDTH not in shape)


@pytest.mark.parametrize("rows", [8, 2])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_in_chunks_is_that_of_the_whole(name: str, rows: int) -> None:
    """Chunks of the batch, and of the sequence where the batch has too few rows."""
    plain, ours, remark = sides(captured(LOSSES[name], rows))
    assert "is computed in 4 chunks" in remark or "is computed in 3 chunks" in remark, remark
    if name not in ("soft targets", "logistic"):
        assert widest(ours) <= widest(plain) / 2
        if rows == 8:  # else the gradient of the weight is larger
            assert peak_bytes(ours.graph_module.graph) < peak_bytes(plain.graph_module.graph)


@pytest.mark.parametrize("head", [{"tied": True}, {"bias": True}])
def test_tied_heads_and_biases(head: dict[str, bool]) -> None:
    assert "4 chunks" in sides(captured(LOSSES["mean"], **head))[2]


def test_two_heads() -> None:
    class Two(Head):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Linear(WIDTH, CLASSES)

        def forward(self, x: Tensor) -> Any:
            h = torch.tanh(self.layer(self.table(x)))
            return self.head(h), self.other(h)

    def step(m: Two, x: Tensor, y: Tensor) -> Tensor:
        one, other = m(x)
        return flat(one, y) + 0.5 * flat(other[:, :-1].reshape(-1, CLASSES), y[:, 1:].reshape(-1))

    torch.manual_seed(0)
    made = capture_module(Two(), step, [torch.randint(CLASSES, (8, LENGTH)) for _ in range(2)])
    assert sides(made)[2].count("in 4 chunks") == 2


def test_uneven_chunks() -> None:
    assert "4 chunks" in sides(captured(LOSSES["ignored"], rows=7))[2]


def test_a_budget_says_how_many() -> None:
    made = captured(LOSSES["mean"])
    score = 8 * LENGTH * CLASSES * 4
    _, ours, remark = sides(made, loss_chunks=None, loss_bytes=score)
    assert "chunks" in remark
    assert widest(ours) < 8 * LENGTH * CLASSES


STAYS: dict[str, tuple[Loss, str]] = {
    "its value is in its gradient": (lambda m, s, y: flat(s, y) ** 2, "pow.* needs a result of all rows"),
    "scores are returned": (lambda m, s, y: (flat(s, y), s.detach()), "returns or keeps"),
    "rows are compared": (
        lambda m, s, y: (flat(s, y), s.detach().view(-1, CLASSES).softmax(0).max()),
        "reads all rows .* at once",
    ),
    "random": (lambda m, s, y: flat(F.dropout(s, 0.1), y), "draws random numbers"),
}


@pytest.mark.parametrize("name", STAYS)
def test_why_a_loss_stays_whole(name: str) -> None:
    loss, why = STAYS[name]
    made = captured(loss)
    torch.manual_seed(0)
    step = build(made[0], (), BuildOptions(loss_chunks=4))
    (remark,) = step.remarks
    assert remark.startswith("loss_chunks: ")
    assert "stays whole" in remark
    assert re.search(why, remark), remark


def test_nothing_wide_is_left_alone() -> None:
    def step(m: nn.Module, x: Tensor) -> Tensor:
        return m(x).square().mean()

    torch.manual_seed(0)
    made = capture_module(nn.Linear(8, 8), step, [torch.randn(4, 8)])[0]
    before = str(made.graph_module.graph)
    done = ShardedStep(made.graph_module, made.signature, ())
    assert "no layer has more than twice" in chunk_losses(done, 4)
    assert str(done.graph_module.graph) == before


def test_layers_below_the_head_stay_as_they_are() -> None:
    """One that is as wide as the head, in front of it: it is not split, neither alone nor over the loop of the loss."""

    class Deep(Head):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, CLASSES), nn.Linear(CLASSES, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.down(F.gelu(self.up(self.table(x)))))

    torch.manual_seed(0)
    batch = [torch.randint(CLASSES, (8, LENGTH)) for _ in range(2)]
    remark = sides(capture_module(Deep(), lambda m, x, y: flat(m(x), y), batch))[2]
    assert remark.count("is computed in 4 chunks") == 1
    alone = sides(capture_module(Deep(), lambda m, x, y: m.down(F.gelu(m.up(m.table(x)))).square().mean(), batch))[2]
    assert "stays whole" in alone


def test_where_logits_are_the_peak_chunks_are_proposed() -> None:
    """On paper: nothing runs. Chunks that were asked for need no proposal."""

    def step(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(m(x), y)

    made = capture_module(nn.Linear(8, 40_000), step, [torch.zeros(512, 8), torch.zeros(512, dtype=torch.long)])[0]
    (remark,) = build(made, (), BuildOptions()).remarks
    assert re.match(
        r"loss_chunks: logits are the peak; SPMDStrategy\(loss_chunks=8\) would .* from \d+ to \d+ MiB", remark
    )
    (remark,) = build(made, (), BuildOptions(loss_chunks=8)).remarks
    assert "is computed in 8 chunks" in remark
    small = captured(LOSSES["mean"])[0]
    assert build(small, (), BuildOptions()).remarks == ()


def test_a_defect_of_the_search_leaves_the_graph_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise IndexError("out of range")

    module = importlib.import_module("lightning_spmd.stages.expand.loss_chunks.row_chunks")
    monkeypatch.setattr(module, "gradients_in_place", fails)
    made = captured(LOSSES["mean"])
    step = build(made[0], (), BuildOptions(loss_chunks=4))
    assert "stays whole: a defect of lightning_spmd, IndexError: out of range" in step.remarks[0]
    plain = build(made[0], (), BuildOptions())
    for got, wanted in zip(run(step.main, made[1]), run(plain.main, made[1]), strict=True):
        assert torch.equal(got, wanted)
