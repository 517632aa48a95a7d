"""Numbers that torch's C++ takes as plain ones, others in each step: one graph does for all that it treats alike."""

from __future__ import annotations

import operator
import random
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_spmd.ir.node_info import NodeInfo, Section
from lightning_spmd.ir.unify import Apart
from lightning_spmd.stages.capture.numbers.opened import Made, is_open, open_numbers, samples_of, stretch_of
from tests.helpers.ranks import RankPool
from tests.helpers.training import assert_bitwise, assert_compiled, assert_equals_one_device
from tests.strategy.reads_and_sizes.test_numbers_of_counts import Counting, _as_two_ranks_have_them, train
from tests.strategy.small import run


class Drawing(Counting):
    """A loss with numbers that Python draws in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.rows, self.gru = nn.LayerNorm(6), nn.BatchNorm1d(6), nn.GRU(6, 6, 2, dropout=0.1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.number = random.Random(self.global_step)
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Rate(Drawing):
    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return F.dropout(self.wide(x), self.number.uniform(0.05, 0.45)).square().mean()


class Rates(Drawing):
    """Three of one number, and one of another."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        rate, slope = self.number.uniform(0.05, 0.45), self.number.uniform(0.05, 0.45)
        hidden = F.dropout(F.dropout(self.wide(x), rate), 1 - rate)
        return F.leaky_relu(F.dropout(hidden, slope), rate).square().mean()


class Smoothing(Drawing):
    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return F.cross_entropy(self(x), y, label_smoothing=self.number.uniform(0.01, 0.24))


class Focal(Drawing):
    """A whole exponent, whose power has a gradient."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        chance = self(x).softmax(1)[:, 0]
        return ((1 - chance) ** self.number.randint(4, 7) * chance.log()).mean().neg()


class Exponent(Drawing):
    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return self.wide(x).abs().pow(self.number.uniform(1.1, 1.9)).mean()


class Base(Drawing):
    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return (self.number.uniform(1.1, 1.9) ** self.wide(x)).mean()


class Margin(Drawing):
    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        hidden = self.wide(x)
        return F.triplet_margin_loss(hidden, hidden.roll(1, 0), x, margin=self.number.uniform(0.1, 0.9))


class Delta(Drawing):
    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        loss = F.huber_loss(self.wide(x), x, delta=self.number.uniform(0.1, 0.9))
        return loss + F.smooth_l1_loss(self.wide(x), x, beta=self.number.uniform(0.1, 0.9))


class Between(Drawing):
    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return torch.lerp(self.wide(x), self.wide(x.flip(0)), self.number.uniform(0.1, 0.9)).square().mean()


class Order(Drawing):
    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return torch.linalg.vector_norm(self.wide(x), self.number.uniform(1.1, 1.9), dim=1).mean()


class Celu(Drawing):
    """Torch computes with it in single precision."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return F.celu(self.wide(x), self.number.uniform(1.1, 1.9)).square().mean()


class Attributes(Drawing):
    """Of modules, as schedules set them."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        self.norm.eps, self.rows.momentum = self.number.uniform(1e-6, 1e-4), self.number.uniform(0.05, 0.2)
        self.gru.dropout = self.number.uniform(0.05, 0.2)
        return self.gru(self.rows(self.norm(self.wide(x)))[None])[0].square().mean()


class Attention(Drawing):
    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        rows, rate = self.wide(x)[None, None], self.number.uniform(0.05, 0.2)
        return F.scaled_dot_product_attention(rows, rows, rows, dropout_p=rate, scale=1.1 + rate).square().mean()


class Padding(Drawing):
    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        ends = torch.linspace(0, self.number.uniform(1.1, 1.9), 8)
        return (F.pad(self.wide(x), (1, 1), value=self.number.uniform(0.1, 0.9)) * ends).square().mean()


class Checkpointed(Drawing):
    """What the part computes with is the same when it is computed again."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        rate = self.number.uniform(0.05, 0.2)
        return checkpoint(lambda x: F.dropout(self.wide(x).tanh(), rate), x, use_reentrant=False).square().mean()


class Schedule(Drawing):
    """From 0 on, over a quarter, at which there is a graph of its own."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return F.dropout(self.wide(x), self.global_step / 60).square().mean()


@pytest.mark.parametrize("make", [Rate, Smoothing, Delta, Attributes])
def test_sizes_that_vary(make: type[Drawing]) -> None:
    ours = train(make, "spmd", range(9, 15))
    assert_compiled(ours)
    assert ours.captures <= 5
    assert_bitwise(ours, train(make, "auto", range(9, 15)))


class OfMask(Drawing):
    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        chosen, beta = x[mask], self.number.uniform(0.1, 0.9)
        return F.smooth_l1_loss(self.wide(chosen), chosen, beta=beta)


class OfCount(Drawing):
    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        chosen = x[mask]
        return F.smooth_l1_loss(self.wide(chosen), chosen, beta=1 / (1.5 + len(chosen)))


class Read(Drawing):
    """Each of the numbers is what Python makes of a value that it has read before."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        loss = F.smooth_l1_loss(self.wide(x), x, beta=0.1 + abs(self.wide(x).mean().item()))
        return loss + F.huber_loss(self.wide(x), x, delta=0.1 + loss.item() / 4)


class ByHand(Drawing):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = F.smooth_l1_loss(F.dropout(self.wide(x), self.number.uniform(0.05, 0.2)), x, beta=0.3)
        self.manual_backward(loss)
        optimizer.step()
        return loss


class Hook(Drawing):
    """Behind the call whose gradient it is, and in the backward pass."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        hidden, rate = self.wide(x), self.number.uniform(0.05, 0.2)
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: F.dropout(gradient, rate))
        return hidden.square().mean()


MOST: dict[type[Drawing], int] = {
    **dict.fromkeys((Rate, Rates, Smoothing, Focal, Exponent, Base, Margin, Delta, Between, Order, Celu), 2),
    **dict.fromkeys((Attributes, Attention, Padding, Checkpointed), 2),
    **dict.fromkeys((Schedule, OfMask, OfCount, Read, ByHand, Hook), 4),
}
"""So many graphs at most, with that of the first step."""


@pytest.mark.parametrize("make", MOST)
def test_one_graph_does_for_all(make: type[Drawing]) -> None:
    ours = train(make, "spmd", range(12, 13))
    assert_compiled(ours)
    assert ours.captures <= MOST[make]
    assert_bitwise(ours, train(make, "auto", range(12, 13)))


class Ends(Drawing):
    """Dropout draws nothing at 0, and what is left of 1 is 0; norms and powers have kernels of their own."""

    numbers = 0.0, 0.3, 1.0, 0.41, 0.5, 0.25, 0.07, 0.0, 2.0, 0.99999

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        number = self.numbers[self.global_step % len(self.numbers)]
        dropped = F.dropout(self.wide(x), min(number, 1.0)).square().mean()
        smooth = F.cross_entropy(self(x), y, label_smoothing=min(number, 1.0))
        return dropped + smooth + torch.linalg.vector_norm(self.wide(x).tanh() + 3, number, dim=1).mean()


class Exponents(Drawing):
    """The gradient of a power of 0 is 0, also where ``0 * x ** -1`` is none."""

    numbers: tuple[float, ...] = 5, 6, 0, 1, 2, 3, 4, 7, 9, 0, 11

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        number = self.numbers[self.global_step % len(self.numbers)]
        return ((self.wide(x).abs() * (x > 0)) ** number).mean() + self.wide(x).square().mean()


class Powers(Exponents):
    numbers = 1.7, 1.4, 1.6, 0.0, 1.1, 1.0, 2.0, 3.7, 0.0, 5.5


class TwoExponents(Drawing):
    """Whole ones that are often equal, and another one that differs from one of them by a constant."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        one, other = self.number.choice([(6, 6), (4, 7), (7, 5), (5, 6)])
        hidden = self.wide(x).sigmoid() + 0.5
        return (hidden**one).mean() + (hidden**other * x).mean() + (hidden**-one).mean()


class Rounded(Drawing):
    """The gradient of a gradient of a power: C++ subtracts 1 twice, which is not to subtract 2."""

    def __init__(self) -> None:
        super().__init__()
        self.double()

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        x = x.double().requires_grad_()
        power = (self.wide(x).sigmoid() * 1e-6) ** self.number.uniform(0.001, 0.2)
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(power.sum(), x, create_graph=True)
        return gradient.square().sum() * 30


class Tiny(Drawing):
    """Torch divides by it in single precision, in which it is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.double()

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        hidden = self.wide(x.double()).abs()
        return F.celu(hidden, (0.4, 0.3, 0.2, 1e-46, 0.6)[self.global_step % 5]).mean() + hidden.square().mean()


@torch.library.custom_op("plain_numbers::steep", mutates_args=())
def _steep(x: Tensor, number: float) -> Tensor:
    return x * (1.0 if number < 0.6 else -1.0) if number != 0.35 else x + 2


@_steep.register_fake
def _(x: Tensor, number: float) -> Tensor:
    return x * (1.0 if number < 0.6 else -1.0)


_library = torch.library.Library("plain_numbers", "FRAGMENT")
_library.define("between(Tensor x, float number) -> Tensor")
_library.impl("between", lambda x, number: x * (1.0 if number < 0.996 else -1.0), "CompositeImplicitAutograd")


class OfOthers(Drawing):
    """Operators that decide on a number wherever they like."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        number = (0.7, 0.4, 0.35, 0.2, 0.999, 0.9955)[self.global_step % 6]
        hidden = torch.ops.plain_numbers.between(self.wide(x), number)
        return (hidden * torch.ops.plain_numbers.steep(x, number)).mean() + hidden.mean()


class Sizes(Drawing):
    """A number that says how many there are."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        positions = torch.arange(0, 3, self.number.uniform(0.5, 0.98))
        return (self.wide(x).mean() * positions).square().sum() / len(positions) ** 2


class Kept(Drawing):
    """A tensor is made of the number, which no graph has as an argument."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        number, hidden = self.number.randint(4, 7), self.wide(x) + 1
        hidden[0, 0] = number
        return hidden.pow_(number).mean()


class Whole(Drawing):
    """A whole number that says where."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return self.wide(x).reshape(1, 1, 1, 1, 1, 1, *x.shape).cumsum(self.number.randint(4, 7)).square().mean()


@pytest.mark.parametrize("make", [
        Ends, Exponents, Powers, TwoExponents, Rounded, Tiny, OfOthers, Sizes, Kept, Whole,
    ],
)  # fmt: skip
def test_what_is_treated_otherwise(make: type[Drawing]) -> None:
    ours = train(make, "spmd", range(12, 13))
    assert_bitwise(ours, train(make, "auto", range(12, 13)))


@pytest.mark.parametrize("make", [Smoothing, Focal, Delta, Order, OfMask, Read])
def test_two_ranks(make: type[Drawing], two_ranks: RankPool) -> None:
    ours = two_ranks.run(run, make, "spmd", 2, max_epochs=3)
    assert_compiled(ours[0])
    assert_equals_one_device(ours, run(make, "auto", data=_as_two_ranks_have_them, max_epochs=3))


class Scaled(Drawing):
    """By factors of which torch makes sizes, and which it has no form for as recorded numbers."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        factor = self.number.uniform(1.05, 1.95)
        return F.interpolate(self.wide(x)[None], scale_factor=factor, recompute_scale_factor=True).square().mean()


def test_no_graph_for_each_number() -> None:
    ours = train(Scaled, "spmd", range(12, 13))
    assert ours.captures <= 9
    assert_bitwise(ours, train(Scaled, "auto", range(12, 13)))


@pytest.mark.parametrize("number", [0.3, -0.3, 1.7, -3.9, 4.1, 4, 5, -7, 1e9, 1e-9, 8.0, -(2**40)])
def test_samples_are_of_the_same_stretch(number: float) -> None:
    samples = samples_of([number, number])
    assert is_open(number)
    assert {stretch_of(n) for sample in samples for n in sample} == {stretch_of(number)}
    assert all(type(n) is type(number) for sample in samples for n in sample)
    assert len({n for n, _ in samples}) >= 2


@pytest.mark.parametrize("number", [0.0, 0.25, -0.5, 1.0, 3.75, 3, 0, -1, float("inf"), float("nan"), 2**60])
def test_numbers_of_their_own(number: float) -> None:
    assert not is_open(number)


def test_samples_keep_their_order() -> None:
    for low, other, high, equal in samples_of([0.1, 5.0, 0.6, 0.6]):
        assert low < high
        assert low < equal
        assert 4 <= other < 8


def _made(factor: float, one: float, other: float) -> Made:
    """What was recorded of a product with a number of C++'s, where two numbers of Python's were taken as plain ones."""
    graph = fx.Graph()
    x, *numbers = (graph.placeholder(name) for name in ("x", "one", "other"))
    for node, value in zip(numbers, (one, other), strict=True):
        node.meta["val"] = value
    graph.call_function(torch.ops.aten.mul.Tensor, (x, factor)).meta["info"] = NodeInfo(Section.FORWARD)
    decisions: list[Any] = [(node, node.meta["val"], "") for node in numbers]
    return Made(graph, decisions, {node: node.meta["val"] for node in numbers})


def test_a_constant_is_a_formula_of_one_number() -> None:
    made = [_made(1 - one, one, other) for one, other in ((0.3, 0.3), (0.1, 0.7), (0.9, 0.2), (0.6, 0.8))]
    decisions = open_numbers(made[0], made[1:])
    factor: Any = next(node.args[1] for node in made[0].graph.nodes if node.target is torch.ops.aten.mul.Tensor)
    assert (factor.target, factor.args[0], factor.args[1].name) == (operator.sub, 1, "one")
    assert [value for _, value, _ in decisions] == [(1 / 3,), (1 / 3,)]


def test_a_constant_of_one_of_two_numbers_is_none() -> None:
    made = [_made(1 - number, number, number) for number in (0.3, 0.1, 0.9, 0.6)]
    with pytest.raises(Apart, match="no formula, or no only one, of a number gives 0.7"):
        open_numbers(made[0], made[1:])
