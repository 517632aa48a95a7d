"""Where a graph's operators and the user's Python meet in unusual ways: as in eager training, or eager with a line."""

from __future__ import annotations

import copy
from array import array
from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.overrides import wrap_torch_function

from tests.helpers.ranks import RankPool
from tests.helpers.training import InOrder, assert_compiled, deviation
from tests.strategy.small import ROWS, Quiet, assert_as_eager, rows, run


class Counts(Quiet):
    """Logs what Python sees, and knows the number of its step."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        return self.loss(batch)

    def see(self, value: float) -> None:
        self.log("seen", value)


# ---------------------------------------------------------------------- functions that only the dispatcher shows
@torch.jit.script
def _turned(x: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1).transpose(0, 1).tanh().transpose(0, 1)


class Scripted(Counts):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(_turned(self.first(x)))


class ScriptedTeacher(Counts):
    """In a list, with views of its weights and statistics of its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.teachers = [torch.jit.script(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)))]

    def loss(self, batch: Any) -> Tensor:
        with torch.no_grad():
            wanted = self.teachers[0](batch[0]).softmax(-1)
        return super().loss(batch) + F.cross_entropy(self(batch[0]), wanted)


class Inverts(Counts):
    """A function of C++ that makes views of views."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + torch.linalg.tensorinv(self.first.weight[:4].reshape(2, 2, 6)[..., :4]).mean()


# ---------------------------------------------------------------------- numbers, lists and attributes
class Celu(Counts):
    """The gradient takes the inverse, which of 1 is 1."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.celu(self.first(x), (3.0, 2.5, 1.0, 0.5)[self.steps % 4]))


class Lerp(Counts):
    """The gradient takes 1 - s, which of 0.5 is 0.5."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.last(torch.lerp(hidden, hidden * 2, (0.3, 0.5, 0.6)[self.steps % 3]))


class ZerosOfEitherSign(Counts):
    def loss(self, batch: Any) -> Tensor:
        root = torch.sqrt(torch.full((3,), complex(-1.0, (0.0, -0.0)[self.steps % 2])))
        return super().loss(batch) + (self.last.bias * root.imag).sum()


class Rows(list[int]):
    pass


class ListsOfAClass(Counts):
    def loss(self, batch: Any) -> Tensor:
        if self.steps == 1:
            self.chosen = Rows([0, 1])
        self.chosen[0] = self.steps % 3
        hidden = self.first(batch[0])
        pair: Any = type(self.chosen)([hidden[0], hidden[1]])  # type: ignore[list-item]
        return super().loss(batch) + hidden[self.chosen].mean() + torch.stack(pair).square().mean()


class OtherSequences(Counts):
    """They change in place from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.queue, self.numbers = deque([0, 1], maxlen=2), array("l", [0, 1])

    def loss(self, batch: Any) -> Tensor:
        self.queue.append(self.steps % 3)
        self.numbers[0] = self.steps % 4
        hidden = self.first(batch[0])
        chosen = hidden[self.queue] * hidden[self.numbers]  # type: ignore[index]
        self.sizes = Rows([hidden.shape[0] if self.steps % 2 else 2, -1])
        return super().loss(batch) + chosen.mean() + hidden.view(self.sizes).square().mean()


class AttributesOfResults(Counts):
    def loss(self, batch: Any) -> Tensor:
        hidden = self.first(batch[0])
        self.see(float(hasattr(hidden, "tag")))
        hidden.tag = 1  # type: ignore[attr-defined]
        return super().loss(batch) + hidden.mean()


class CopiesWithViews(Counts):
    """A deep copy of a tensor and a view of it is a tensor and a view of it."""

    def loss(self, batch: Any) -> Tensor:
        x = batch[0] * 2
        for one in ({"whole": x, "row": [x[0]]}, {"row": [x[0]], "whole": x}):
            found = copy.deepcopy(one)
            found["whole"].add_(1)  # type: ignore[union-attr]
            self.log(f"row of {list(one)}", found["row"][0].sum())
        return super().loss(batch)


class AsksInBetween(Counts):
    def loss(self, batch: Any) -> Tensor:
        held = self.first(batch[0]).clone().detach_()
        self.see(float(held.requires_grad))
        held.requires_grad_()
        (gradient,) = torch.autograd.grad(F.cross_entropy(self.last(held), batch[1]), held)
        return super().loss(batch) + (self.first(batch[0]) * gradient).sum()


class KeepsWhatItInferred(Counts):
    """A hook reads parts of what the step computed without autograd."""

    def loss(self, batch: Any) -> Tensor:
        with torch.inference_mode():
            self.kept = self(batch[0]).softmax(1)
        return super().loss(batch)

    def on_train_batch_end(self, *_: Any) -> None:
        assert self.kept.is_inference()
        self.see(self.kept[0].sum().item() + self.kept.clone().max().item())


class GivesANumber(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, k: int) -> Any:  # type: ignore[override]
        ctx.k = k
        return x * k, k, x.sign()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, number: Any, sign: Tensor) -> Any:  # type: ignore[override]
        assert number is None
        return gradient * ctx.k + sign, None


class Square(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:  # type: ignore[override]
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return 2 * ctx.saved_tensors[0] * gradient


_square = Square.apply
"""As tutorials have it; kept before any step has begun."""


class AppliesWhatItHasKept(Counts):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(_square(self.first(x)))


class MaskOfItself(Counts):
    """A mask without dimensions, as ``Wishart.rsample`` has it."""

    def loss(self, batch: Any) -> Tensor:
        large = self.first(batch[0]).mean() > 0
        chosen = large[large]
        self.see(float(chosen.numel()))
        return super().loss(batch) * (1 + chosen.numel())


class _Same(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class TwoGradientsOfTheInput(Counts):
    """Their histories are added to weights' gradients in the order in which they were made."""

    def loss(self, batch: Any) -> Tensor:
        loss = _Same.apply(super().loss(batch))  # with Python in its backward pass
        x = batch[0].clone().requires_grad_()
        scores = self(x).sum(0)
        found = [torch.autograd.grad(score, x, create_graph=True)[0] for score in scores]
        return loss + sum(gradient.square().mean() for gradient in found)


@wrap_torch_function(lambda x, *_: (x,))
def _scaled(x: Tensor, module: Any, seen: dict[str, Tensor]) -> Tensor:
    """A function of a library that others may override, as torch's own may be."""
    module.calls += 1
    seen["input"] = x
    return x * module.factor


_scaled.__module__ = None  # type: ignore[assignment] # as functions are that were made without one


class CallsOfOthers(Counts):
    """Their Python runs in every step."""

    calls, factor = 0, 1.0

    def forward(self, x: Tensor) -> Tensor:
        self.factor = 1.0 + self.steps % 3
        written: dict[str, Tensor] = {}  # the very dictionary that it fills
        found = super().forward(_scaled(x, self, written))
        self.see(float(self.calls))
        return found + written["input"].mean()


class Distances(nn.Module):
    """A distance with a weight, and a factor that Python has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.calls = nn.Parameter(torch.ones(3)), 0

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        self.calls += 1
        return ((a - b).abs() * self.weight).sum(1) * (1 + self.calls % 3)


class TorchCallsBack(Counts):
    """A function of torch calls one of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.distances = Distances()

    def loss(self, batch: Any) -> Tensor:
        out = self(batch[0])
        three = out, out.roll(1, 0), out.roll(2, 0)
        apart = F.triplet_margin_with_distance_loss(*three, distance_function=self.distances)
        by_function = F.triplet_margin_with_distance_loss(*three, distance_function=lambda a, b: self.distances(a, b))
        return super().loss(batch) + apart + 0.5 * by_function


class Pads(Counts):
    """Which part is the longest differs from step to step."""

    def loss(self, batch: Any) -> Tensor:
        hidden = self.first(batch[0])
        parts = [hidden[batch[1] == k] for k in range(3)]
        return super().loss(batch) + nn.utils.rnn.pad_sequence(parts).square().sum()


class OutputsThatAreNoTensors(Counts):
    def forward(self, x: Tensor) -> Tensor:
        hidden, k, _ = GivesANumber.apply(self.first(x), self.steps % 3 + 1)  # type: ignore[misc]
        return self.last(hidden) / k


GRAPHS: list[type[Counts]] = [
    Scripted, ScriptedTeacher, Inverts, Celu, Lerp, ZerosOfEitherSign, ListsOfAClass, OtherSequences,
    MaskOfItself, TwoGradientsOfTheInput,
    AttributesOfResults, CopiesWithViews, AsksInBetween, OutputsThatAreNoTensors, CallsOfOthers, TorchCallsBack, Pads,
    KeepsWhatItInferred, AppliesWhatItHasKept,
]  # fmt: skip


@pytest.mark.parametrize("make", GRAPHS)
def test_it_is_a_graph_and_as_in_eager_training(make: type[Counts]) -> None:
    assert_as_eager(make, mode="split" if make in (AsksInBetween, TwoGradientsOfTheInput) else "compiled")


@pytest.mark.parametrize("make", [Scripted, ScriptedTeacher, CopiesWithViews, OutputsThatAreNoTensors, CallsOfOthers])
def test_on_two_ranks_it_is_one_devices(two_ranks: RankPool, make: type[Counts]) -> None:
    reference = run(make, "auto", data=lambda: InOrder(rows(), ROWS), max_epochs=1)
    results = two_ranks.run(run, make, "spmd", 2, max_epochs=1)
    assert_compiled(*results)
    for result in results:
        assert deviation(result, reference).weights < 1e-6


# ---------------------------------------------------------------------- what hooks put into the batch
class GivesAParameter(Counts):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return *batch, self.first.weight

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch[:2]) + batch[2].square().sum()


class GivesAViewOfOne(GivesAParameter):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return *batch, self.first.weight[:3]


class GivesWhatALayerMade(Counts):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return self.first(batch[0]), batch[1]

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x.tanh())


class GivesViews(Counts):
    """Two tensors of the batch have memory in common, of which the step writes one."""

    sometimes = False

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        rows = batch[0][:2]
        return *batch, rows.clone() if self.sometimes and self.steps % 3 else rows

    def loss(self, batch: Any) -> Tensor:
        x, y, first = batch
        before = super().loss((x * 1, y))
        first.mul_(0)
        return before + super().loss((x * 1, y))


class GivesViewsSometimes(GivesViews):
    sometimes = True


class ReadsViews(GivesViews):
    """The same where nobody writes: a graph."""

    def loss(self, batch: Any) -> Tensor:
        return Counts.loss(self, batch[:2]) + self(batch[2]).mean()


class KeepsAView(Counts):
    """A hook keeps a view of the batch, into which the step writes."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.view = batch[0][:2]

    def loss(self, batch: Any) -> Tensor:
        before = super().loss((batch[0] * 1, batch[1]))
        self.view.mul_(0)
        return before + super().loss((batch[0] * 1, batch[1]))


@pytest.mark.parametrize(
    ("make", "mode"),
    [
        (GivesAParameter, "compiled"),
        (GivesAViewOfOne, "eager"),
        (GivesWhatALayerMade, "eager"),
        (GivesViews, "eager"),
        (GivesViewsSometimes, "compiled"),
        (ReadsViews, "compiled"),
        (KeepsAView, "eager"),
    ],
)
def test_what_a_hook_puts_into_the_batch_is_what_it_is(make: type[Counts], mode: str) -> None:
    assert_as_eager(make, mode=mode)


def test_what_a_hook_puts_into_the_batch_is_trained_on_ranks(two_ranks: RankPool) -> None:
    reference = run(GivesWhatALayerMade, "auto", data=lambda: InOrder(rows(), ROWS), max_epochs=1)
    for result in two_ranks.run(run, GivesWhatALayerMade, "spmd", 2, max_epochs=1):
        assert deviation(result, reference).weights < 1e-6


# ---------------------------------------------------------------------- eager with a line
class WritesElementByElement(Counts):
    def loss(self, batch: Any) -> Tensor:
        x = batch[0].clone().apply_(lambda value: value * 2)
        return super().loss((x, batch[1]))


class WritesIntoExpanded(Counts):
    def loss(self, batch: Any) -> Tensor:
        try:
            torch.zeros(1, 6).expand(4, 6).add_(batch[0][:1])
        except RuntimeError:
            self.see(1.0)
        return super().loss(batch)


class Traces(Counts):
    """A program is recorded by a mode of torch's."""

    def loss(self, batch: Any) -> Tensor:
        program = make_fx(lambda x: x.sin() * 2)(batch[0].detach().clone())
        return super().loss((program(batch[0]), batch[1]))


class GivesSparse(Counts):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch[0].to_sparse(), batch[1]

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.last(torch.sparse.mm(batch[0], self.first.weight.t())), batch[1])


class Pulls(Counts):
    def loss(self, batch: Any) -> Tensor:
        out, pull = torch.func.vjp(self.first, batch[0])
        return super().loss(batch) + pull(torch.ones_like(out))[0].square().mean()


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (WritesElementByElement, "apply_"),
        (WritesIntoExpanded, "expand"),
        (Traces, "ProxyTorchDispatchMode"),
        (GivesSparse, "sparse"),
        (Pulls, "what a transform of torch.func has returned"),
    ],
)
def test_it_is_eager_with_its_line(make: type[Counts], named: str) -> None:
    warnings: Sequence[str] = assert_as_eager(make, mode="eager").warnings
    ours = [w for w in warnings if "'spmd'" in w and named in w]
    assert any(f"{__file__}:" in w or make is GivesSparse for w in ours), warnings


class ChangesTheLoss(Counts):
    def on_before_backward(self, loss: Tensor) -> None:
        loss.mul_(2)


def test_a_hook_that_changes_the_loss_is_told() -> None:
    warnings = run(ChangesTheLoss, "spmd").warnings
    assert any("changes the loss in place; in this step the backward pass ran without" in w for w in warnings), warnings


class ReturnsAConstant(Counts):
    def loss(self, batch: Any) -> Tensor:
        return torch.tensor(1.0)


@pytest.mark.parametrize("strategy", ["auto", "spmd"])
def test_a_constant_loss_is_torchs_error(strategy: str) -> None:
    with pytest.raises(RuntimeError, match="does not require grad"):
        run(ReturnsAConstant, strategy)
