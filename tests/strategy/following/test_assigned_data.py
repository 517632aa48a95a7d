"""``p.data = x``: a write where nothing else has the memory of either; elsewhere the step runs eagerly."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from lightning_spmd import SPMDStrategy
from tests.helpers.ranks import RankPool
from tests.helpers.training import Result, assert_bitwise, assert_compiled, assert_equals_one_device
from tests.strategy import small
from tests.strategy.small import ROWS, Net, assert_as_eager, loader_of, rows, run


class Quiet(small.Quiet):
    """Nothing but the step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)


class HalfTheWeights(Quiet):
    """Computes with half the weights, and puts the others back."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        weight = self.first.weight
        before = weight.data
        weight.data = before * 0.5
        loss = self.loss(batch)
        weight.data = before
        return loss


class Assigning(torch.optim.SGD):
    """As many published optimizers end their step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Tensor | None:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in group["params"]:
                p.data = p.data - group["lr"] * p.grad
        return loss


class AssignedByTheOptimizer(Quiet):
    def configure_optimizers(self) -> Any:
        return Assigning(self.parameters(), lr=0.1)


class Slow(Quiet):
    """A slow copy of a layer follows it, as in BYOL, MoCo and DINO."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = copy.deepcopy(self.first).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for slow, fast in zip(self.slow.parameters(), self.first.parameters(), strict=True):
            slow.data = slow.data * 0.9 + fast.data * 0.1
        return self.loss(batch) + self.slow.weight.sum() * 0.01


class InPlace(Quiet):
    """``p.data *= x`` ends by assigning ``p.data`` to itself; a result of the step likewise."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.first.weight.data *= 0.99
        self.first.bias.data[:2] -= 0.01
        h = batch[0] * 2
        h.data += 1
        return self.loss((h, batch[1]))


class Chained(Quiet):
    """Assigned twice, swapped, and what was assigned is written to."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        weight, bias = self.first.weight, self.first.bias
        weight.data = weight.data * 0.99
        weight.data = weight.data + 0.001
        new = bias.data * 0.5
        bias.data = new
        new.add_(0.1)  # which is the bias now
        return self.loss(batch)


class ValueKept(Quiet):
    """What was assigned is kept: it is the parameter, which the optimizer updates."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        new = self.first.weight.data * 0.99
        self.first.weight.data = new
        self.kept = [new]
        return self.loss(batch)

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append(float(self.kept[0].sum()))


class BehindUse(Quiet):
    """Assigned between the layer's use and the backward pass, which needs its weight."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        for p in self.parameters():
            p.data = p.data * 0.9
        return loss


class AliasUsed(Quiet):
    """What the parameter was is used again."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        before = self.first.bias.data
        self.first.bias.data = before * 0.9
        return self.loss(batch) + before.sum() * self.first.weight.sum()


class HeldOutside(Quiet):
    """Somebody has the memory of the parameter since before the step."""

    def __init__(self) -> None:
        super().__init__()
        self.views = [self.first.bias.detach()]
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.first.bias.data = self.first.bias.data * 0.9
        self.seen.append(float(self.views[0].sum()))
        return self.loss(batch) + self.views[0].sum() * self.first.weight.sum()


def _stepped(delta: Tensor) -> Tensor:
    """A step of projected gradient ascent; it has a history."""
    return (delta + 0.1 * delta.grad.sign()).clamp(-0.3, 0.3)  # type: ignore[union-attr]


class Perturbed(Quiet):
    """Adversarial training (Madry et al., 2018) as most write it: the step moves a leaf of its own."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        delta = torch.zeros_like(x, requires_grad=True)
        for _ in range(2):
            self.loss((x + delta, y)).backward()
            delta.data = _stepped(delta)
            delta.grad.zero_()  # type: ignore[union-attr]
        self.zero_grad()
        return self.loss((x + delta.detach(), y))


class Perturbations(Perturbed):
    """The perturbations are kept, each with memory of its own from the next one on."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        delta, kept = torch.zeros_like(x, requires_grad=True), list[Tensor]()
        for _ in range(2):
            self.loss((x + delta, y)).backward()
            kept.append(_stepped(delta))
            delta.data = kept[-1]
        self.zero_grad()
        return self.loss((x + kept[0].detach() - kept[1].detach(), y))


class FreePerturbation(Quiet):
    """A leaf that the module keeps goes on through all steps (Shafahi et al., 2019)."""

    delta: Tensor | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        if self.delta is None:
            self.delta = torch.zeros_like(x).requires_grad_()
        loss = self.loss((x + self.delta, y))
        (gradient,) = torch.autograd.grad(loss, [self.delta], retain_graph=True)
        self.delta.data = (self.delta + 0.1 * gradient.sign()).clamp(-0.3, 0.3)
        return loss


class FromVector(Quiet):
    """``vector_to_parameters`` gives parameters the memory of one vector, which goes then."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        own = list(self.first.parameters())
        with torch.no_grad():
            vector_to_parameters(parameters_to_vector(own) * 0.99, own)
        return self.loss(batch)


class TiedBefore(Quiet):
    """A slow layer has the memory of the fast one since before the step, and memory of its own from then on."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = copy.deepcopy(self.first).requires_grad_(False)

    def on_train_start(self) -> None:
        for slow, fast in zip(self.slow.parameters(), self.first.parameters(), strict=True):
            slow.data = fast.data

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for slow, fast in zip(self.slow.parameters(), self.first.parameters(), strict=True):
            slow.data = slow.data * 0.9 + fast.data * 0.1
        return self.loss(batch) + self.slow.weight.square().sum() * 0.01


class ViewBefore(Quiet):
    """A view of a weight is kept since before the step, which assigns the weight's data."""

    def on_train_start(self) -> None:
        self.view = self.first.weight.detach()[0]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.first.weight.data = self.first.weight.data * 0.9
        return self.loss(batch) + (self.view * self.first.weight[1]).sum() * 0.1


class BothWritten(Quiet):
    """What was assigned has a history, and is written through the leaf that has its memory now."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        delta = torch.zeros_like(x, requires_grad=True)
        self.loss((x + delta, y)).backward()
        moved = _stepped(delta)
        delta.data = moved
        delta.data.mul_(0.5)
        self.zero_grad()
        return self.loss((x + moved.detach(), y))


class BothKept(Quiet):
    """The leaf and what was assigned to it are kept; a later step writes into one."""

    delta: Tensor | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        if self.delta is None:
            self.delta, self.whole = torch.zeros_like(x[0], requires_grad=True), x * 0.1
            self.delta.data = self.whole[0]
        self.delta.data.mul_(0.9)
        return self.loss((x + self.whole, y))


class SavedBefore(Quiet):
    """Autograd has saved a view of what is assigned to."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        scale = torch.ones(6, requires_grad=True)
        loss = self.loss((self.first(batch[0])[:, :6] * scale.view(1, 6), batch[1]))
        (gradient,) = torch.autograd.grad(loss, [scale], retain_graph=True)
        scale.data = scale - 0.1 * gradient
        return loss


class SavedValue(Quiet):
    """Autograd alone still has what was assigned, and a write through the leaf changes it there, as torch has it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        leaf = torch.zeros(ROWS, 10).requires_grad_()

        def part() -> Tensor:
            saved = torch.sigmoid(self.first(batch[0]))
            leaf.data = saved
            return saved.sum()

        loss = self.loss(batch) + part()
        leaf.data.mul_(0.5)
        return loss


@pytest.mark.parametrize("make", [Slow, Chained, InPlace, FreePerturbation, FromVector])
def test_assigned_results_are_writes(make: type[Net]) -> None:
    assert assert_as_eager(make).captures == 2  # momentum begins as the first gradient


@pytest.mark.parametrize("make", [Perturbed, Perturbations])
def test_leaves_of_the_step_are_written(make: type[Net]) -> None:
    assert_as_eager(make, mode="split")


@pytest.mark.parametrize(
    "make",
    [
        ValueKept,
        BehindUse,
        AliasUsed,
        HeldOutside,
        BothWritten,
        BothKept,
        SavedBefore,
        SavedValue,
        TiedBefore,
        ViewBefore,
    ],
)
def test_whose_memory_it_is_stays_right(make: type[Net]) -> None:
    modules: list[Any] = []

    def module() -> Any:
        modules.append(make())
        return modules[-1]

    theirs, ours = run(module, "auto"), run(module, "spmd")
    assert_bitwise(ours, theirs)
    assert getattr(modules[1], "seen", None) == getattr(modules[0], "seen", None)


def _on_ranks(make: type[Net], data_parallel: Any) -> Result:
    return run(make, SPMDStrategy(data_parallel=data_parallel), 2)


@pytest.mark.parametrize("data_parallel", ["replicate", "zero2"])
@pytest.mark.parametrize("make", [Slow, Chained])
def test_they_are_writes_on_ranks(two_ranks: RankPool, make: type[Net], data_parallel: str) -> None:
    ours = two_ranks.run(_on_ranks, make, data_parallel)
    assert_compiled(*ours)
    assert_equals_one_device(ours, run(make, "auto", data=lambda: loader_of(rows(), ROWS)))


@pytest.mark.parametrize("data_parallel", ["replicate", "zero2"])
def test_leaves_of_the_step_are_written_on_ranks(two_ranks: RankPool, data_parallel: str) -> None:
    ours = two_ranks.run(_on_ranks, Perturbed, data_parallel)
    assert {result.mode for result in ours} == {"split"}
    assert_equals_one_device(ours, run(Perturbed, "auto", data=lambda: loader_of(rows(), ROWS)))


@pytest.mark.parametrize(("make", "mode"), [(HalfTheWeights, "eager"), (AssignedByTheOptimizer, "split")])
def test_assigned_data_runs_eagerly(make: type[Net], mode: str) -> None:
    assert_as_eager(make, mode=mode)
