"""``nn.Parameter`` of what the step has computed: copies of layers for an inner loop, prompts, layers that are made."""

from __future__ import annotations

import copy
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_spmd import SPMDStrategy
from lightning_spmd.stages.capture.follow.recorder import Recorder
from tests.helpers.ranks import RankPool
from tests.helpers.training import Result, assert_bitwise, assert_equals_one_device
from tests.strategy import small
from tests.strategy.small import ROWS, Net, assert_as_eager, loader_of, rows, run


class InnerLoop(small.Quiet):
    """First-order MAML (Finn et al., 2017): a copy is trained, and its gradients are the layer's."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        inner = copy.deepcopy(self.first)
        optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            F.cross_entropy(self.last(torch.tanh(inner(x))), y).backward()
            optimizer.step()
        self.zero_grad()
        loss = F.cross_entropy(self.last(torch.tanh(inner(x))), y)
        found = torch.autograd.grad(loss, list(inner.parameters()), retain_graph=True)
        return loss + sum((p * g).sum() for p, g in zip(self.first.parameters(), found, strict=True))


class InnerLoops(small.Quiet):
    """Optimizers ask parameters whether they are leaves: here of copies, that calls have written into."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        h = batch[0]
        for _ in range(3):
            h = self.first(h)[:, :6]
            torch.optim.SGD(copy.deepcopy(self.first).parameters(), lr=0.1)
        return F.cross_entropy(self.last(self.first(h)), batch[1])


def test_known_paths_are_not_made_again_for_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    made, original = list[int](), Recorder.so_far
    monkeypatch.setattr(Recorder, "so_far", lambda own: made.append(1) or original(own))
    seen = list[int]()

    class Counts(L.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            seen.append(len(made))

    ours = run(InnerLoops, callbacks=lambda: [Counts()])
    assert_bitwise(ours, run(InnerLoops, "auto"))
    assert seen[0] > 0
    assert seen[2] == seen[-1]


class InnerLoopByHand(small.Quiet):
    """The copy's gradients are put into those of the layer (Reptile's are differences of weights)."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        outer: Any = self.optimizers()
        inner = copy.deepcopy(self.first)
        optimizer = torch.optim.AdamW(inner.parameters(), lr=0.01)
        for _ in range(2):
            optimizer.zero_grad()
            self.manual_backward(F.cross_entropy(self.last(torch.tanh(inner(x))), y))
            optimizer.step()
        outer.zero_grad()
        self.manual_backward(F.cross_entropy(self.last(torch.tanh(self.first(x))), y))
        for mine, theirs in zip(self.first.parameters(), inner.parameters(), strict=True):
            mine.grad.add_((mine - theirs).detach())  # type: ignore[union-attr]
        outer.step()


class Prompt(small.Quiet):
    """It is what a parameter is: for ``isinstance``, for lists and functional calls, in print."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        prompt = nn.Parameter(x.mean(0))
        own = nn.ParameterList([prompt, nn.Parameter(torch.zeros(6), requires_grad=False)])
        kinds = type(prompt) is nn.Parameter, isinstance(prompt, nn.Parameter), prompt.is_leaf, prompt.requires_grad
        assert kinds == (True,) * 4
        assert [p.requires_grad for p in own] == [True, False]
        (gradient,) = torch.autograd.grad(self.loss((x + sum(own), y)), [prompt])
        half = {name: nn.Parameter(p.detach() / 2) for name, p in self.last.named_parameters()}
        scores = torch.func.functional_call(self.last, half, (torch.tanh(self.first(x - gradient)),))
        return F.cross_entropy(scores, y) + self.loss(batch)

    def on_train_end(self) -> None:
        assert "Parameter containing" in repr(nn.Parameter(torch.zeros(2)))


class DrawnLayer(small.Quiet):
    """A random layer for each step, which is not trained."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        drawn = nn.Linear(6, 6)
        return self.loss((x + drawn(x).detach(), y))


class HookedCopy(small.Quiet):
    """A hook that autograd calls once it has added to a copy's gradient updates the copy."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        def update(p: Any) -> None:
            p.data.sub_(p.grad, alpha=0.1)

        inner = copy.deepcopy(self.first)
        for p in inner.parameters():
            p.register_post_accumulate_grad_hook(update)
        F.cross_entropy(self.last(torch.tanh(inner(batch[0]))), batch[1]).backward()
        self.zero_grad()
        return self.loss(batch) + F.cross_entropy(self.last(torch.tanh(inner(batch[0]))), batch[1])


class Replaced(small.Quiet):
    """The layer's weight is another parameter for one of two calls."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        before = self.last.weight
        self.last.weight = nn.Parameter(before.detach() * 0.9)
        loss = self.loss(batch)
        self.last.weight = before
        return loss + self.loss(batch)


class Joins(small.Quiet):
    """A layer is made in the first step, joins the optimizer there, and is trained from then on."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if not hasattr(self, "more"):
            self.more = nn.Linear(6, 6)
            self.optimizers().add_param_group({"params": list(self.more.parameters())})  # type: ignore
        return self.loss((self.more(batch[0]), batch[1]))


class Grows(small.Quiet):
    """Every fourth layer is a new one with the old one's weights; none of them is trained."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx % 4 == 1:
            old, self.first = self.first, nn.Linear(6, 10)
            with torch.no_grad():
                self.first.weight.copy_(old.weight)
        return self.loss(batch)


class KeptLeaf(small.Quiet):
    """A leaf that a step makes takes part in all steps, and gets gradients that nobody looks at."""

    shift: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.shift is None:
            self.shift = torch.zeros(6, requires_grad=True)
        return self.loss((batch[0] + self.shift, batch[1]))


@pytest.mark.parametrize(
    ("make", "mode"),
    [
        (InnerLoop, "split"),
        (InnerLoopByHand, "compiled"),
        (Prompt, "compiled"),
        (DrawnLayer, "compiled"),
        (HookedCopy, "eager"),
        (Replaced, "compiled"),
        (Joins, "compiled"),
        (Grows, "compiled"),
        (KeptLeaf, "compiled"),
    ],
)
def test_parameters_of_results_are_followed(make: type[Net], mode: str) -> None:
    assert_as_eager(make, mode=mode)


def _on_ranks(make: type[Net], data_parallel: Any) -> Result:
    return run(make, SPMDStrategy(data_parallel=data_parallel), 2)


@pytest.mark.parametrize(
    ("make", "data_parallel"),
    [
        (InnerLoop, "replicate"),
        (InnerLoop, "zero2"),
        (InnerLoopByHand, "zero2"),
        (Replaced, "zero3"),
        (KeptLeaf, "zero2"),
    ],
)
def test_they_are_on_ranks(two_ranks: RankPool, make: type[Net], data_parallel: str) -> None:
    ours = two_ranks.run(_on_ranks, make, data_parallel)
    assert all(result.mode in ("compiled", "split") for result in ours), ours[0].warnings
    assert_equals_one_device(ours, run(make, "auto", data=lambda: loader_of(rows(), ROWS)))
