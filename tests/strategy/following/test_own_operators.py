"""Operators and functions of somebody's own: what is in their backward passes runs in every step, or the step is eager.

Functions in C++ are stood in for by what reaches torch as they do: scripted code, and calls past torch functions.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.helpers.ranks import RankPool
from tests.helpers.training import InOrder, assert_compiled, assert_equals_one_device, deviation
from tests.strategy.small import ROWS, Quiet, assert_as_eager, rows, run

OUTSIDE = {"factor": 1.0}


# ---------------------------------------------------------------------- operators with Python in their backward passes
@torch.library.custom_op("own_operators::square", mutates_args=())
def square(x: Tensor, k: float) -> Tensor:
    return x * x * k


@square.register_fake
def _(x: Tensor, k: float) -> Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.k = inputs[1]


square.register_autograd(lambda ctx, g: (2 * ctx.saved_tensors[0] * g * ctx.k, None), setup_context=_keep)


@torch.library.custom_op("own_operators::same", mutates_args=())
def same(x: Tensor) -> Tensor:
    return x.clone()


same.register_fake(torch.empty_like)
same.register_autograd(lambda ctx, g: g * OUTSIDE["factor"])


@torch.library.custom_op("own_operators::scaled", mutates_args=())
def scaled(xs: list[Tensor], ks: list[float]) -> list[Tensor]:
    return [x * k for x, k in zip(xs, ks, strict=True)]


@scaled.register_fake
def _(xs: list[Tensor], ks: list[float]) -> list[Tensor]:
    return [torch.empty_like(x) for x in xs]


scaled.register_autograd(
    lambda ctx, gs: ([g * k * OUTSIDE["factor"] for g, k in zip(gs, ctx.ks, strict=True)], None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "ks", inputs[1]),
)


class _Times(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, k: float) -> Tensor:
        ctx.k = k
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.own_operators.times(x, k)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g * ctx.k * OUTSIDE["factor"], None


LIBRARY = torch.library.Library("own_operators", "FRAGMENT")
LIBRARY.define("times(Tensor x, float k) -> Tensor")
LIBRARY.impl("times", lambda x, k: x * k, "CompositeExplicitAutograd")
LIBRARY.impl("times", lambda x, k: _Times.apply(x, k), "AutogradCPU")
LIBRARY.define("twice_times(Tensor x, float k) -> Tensor")
LIBRARY.impl("twice_times", lambda x, k: x * k * 2, "CompositeExplicitAutograd")
LIBRARY.impl("twice_times", lambda x, k: _Times.apply(x, k) * 2, "AutogradCPU")


class Squares(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, k: float) -> Tensor:
        _keep(ctx, (x, k), None)
        return x * x * k

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return 2 * ctx.saved_tensors[0] * g * ctx.k, None


kept_from_before = Squares.apply


class Anneals(Quiet):
    """What it uses has another number in each step, and another one outside."""

    def k(self) -> float:
        OUTSIDE["factor"] = 1 + 0.15 * self.global_step
        return 1.0 + 0.1 * self.global_step

    def between(self, x: Tensor, k: float) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self.first(x), self.k()))


class CustomOperator(Anneals):
    def between(self, x: Tensor, k: float) -> Tensor:
        return square(x, k)


class ReadsOutside(Anneals):
    def between(self, x: Tensor, k: float) -> Tensor:
        return same(x.tanh())


class OfLists(Anneals):
    def between(self, x: Tensor, k: float) -> Tensor:
        return sum(scaled([x, x.tanh()], [k, 0.5]))  # type: ignore[return-value]


class OfALibrary(Anneals):
    def between(self, x: Tensor, k: float) -> Tensor:
        return torch.ops.own_operators.times(x.tanh(), k)


class OfAWeight(Anneals):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.first(x).tanh(), square(self.last.weight, self.k()))


class InACheckpoint(Anneals):
    def between(self, x: Tensor, k: float) -> Tensor:
        return checkpoint(lambda x: square(x, k).tanh(), x, use_reentrant=False)  # type: ignore[return-value]


class KeptApply(Anneals):
    """As torch's documentation has it: ``function = MyFunction.apply``."""

    def between(self, x: Tensor, k: float) -> Tensor:
        return kept_from_before(x, k)


class ByHand(CustomOperator):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


@pytest.mark.parametrize(
    "make", [CustomOperator, ReadsOutside, OfLists, OfALibrary, OfAWeight, InACheckpoint, KeptApply, ByHand]
)
def test_python_in_the_backward_pass_of_an_operator_runs_in_every_step(make: type[Anneals]) -> None:
    assert_compiled(assert_as_eager(make))


@pytest.mark.parametrize("strategy", ["spmd", {"data_parallel": "zero3"}])
@pytest.mark.parametrize("make", [CustomOperator, ReadsOutside, OfALibrary, KeptApply])
def test_on_two_ranks_it_does_as_well(two_ranks: RankPool, make: type[Anneals], strategy: Any) -> None:
    results = two_ranks.run(run, make, strategy, 2, max_epochs=2)
    assert_compiled(*results)
    assert_equals_one_device(results, run(make, "auto", data=lambda: InOrder(rows(), ROWS), max_epochs=2))


class MoreThanAFunction(Anneals):
    def between(self, x: Tensor, k: float) -> Tensor:
        return torch.ops.own_operators.twice_times(x.tanh(), k)


# ---------------------------------------------------------------------- what torch does not dispatch
@torch.jit.script
def _calls_an_operator(x: Tensor, k: float) -> Tensor:
    return torch.ops.own_operators.square(x, k) * 2


@torch.jit.script
def _switches_gradients_off(x: Tensor, k: float) -> Tensor:
    with torch.no_grad():
        y = x.sigmoid() * k
    return x * y


class _TakesMemory(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():  # as a kernel bound to Python
            assert x.data_ptr()
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g * 2


class ScriptedOperator(Anneals):
    def between(self, x: Tensor, k: float) -> Tensor:
        return _calls_an_operator(x, k)


class ScriptedSwitch(Anneals):
    """Gradients are off where Python has not set that, as in the forward of a function in C++."""

    def between(self, x: Tensor, k: float) -> Tensor:
        return _switches_gradients_off(x, k)


class TakesMemory(Anneals):
    def between(self, x: Tensor, k: float) -> Tensor:
        return _TakesMemory.apply(x)  # type: ignore[return-value]


EAGER = [
    (MoreThanAFunction, "twice_times"),
    (ScriptedOperator, "code in C++ calls own_operators.square"),
    (ScriptedSwitch, "code in C++"),
    (TakesMemory, "takes the memory of a tensor"),
]


@pytest.mark.parametrize(("make", "named"), EAGER)
def test_what_no_graph_sees_is_eager_with_its_line(make: type[Quiet], named: str) -> None:
    warnings = assert_as_eager(make, mode="eager", max_epochs=2).warnings
    assert any("'spmd'" in w and named in w and f"{__file__}:" in w for w in warnings), warnings


@pytest.mark.parametrize("make", [ScriptedSwitch, TakesMemory])
def test_on_two_ranks_such_steps_are_one_devices(two_ranks: RankPool, make: type[Quiet]) -> None:
    reference = run(make, "auto", data=lambda: InOrder(rows(), ROWS), max_epochs=2)
    for result in two_ranks.run(run, make, "spmd", 2, max_epochs=2):
        assert result.captures == 0
        assert deviation(result, reference).weights < 1e-6


class SwitchedOff(Quiet):
    """Where Python has switched gradients off nothing is lost."""

    @torch.no_grad()
    def gate(self, x: Tensor) -> Tensor:
        return _switches_gradients_off(self.first(x), 2.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x) * self.gate(x))


def test_without_gradients_nothing_is_lost_and_it_is_a_graph() -> None:
    assert_compiled(assert_as_eager(SwitchedOff))


# ---------------------------------------------------------------------- autocast within their kernels
@torch.library.custom_op("own_operators::product", mutates_args=())
def product(x: Tensor, weight: Tensor) -> Tensor:
    return (x @ weight.t()).float()


@product.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


product.register_autograd(
    lambda ctx, g: (g @ ctx.saved_tensors[1], g.t() @ ctx.saved_tensors[0]),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
LIBRARY.define("other_product(Tensor x, Tensor weight) -> Tensor")
LIBRARY.impl("other_product", lambda x, weight: (x @ weight.t()).float(), "CPU")
torch.library.register_fake("own_operators::other_product", lambda x, w: x.new_empty(x.shape[0], w.shape[0]))


class Product(Quiet):
    """In float32, of which the kernel makes bfloat16 where autocast is on."""

    def forward(self, x: Tensor) -> Tensor:
        return product(self.first(x).tanh().float(), self.last.weight) + self.last.bias


class WithoutAGradient(Quiet):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            more = torch.ops.own_operators.other_product(self.first(x).tanh().float(), self.last.weight)
        return super().forward(x) + more


class OffAndOn(Product):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.trainer.global_step % 2 == 0):
            return super().forward(x)


class EagerStep(Product):
    def forward(self, x: Tensor) -> Tensor:
        assert x.clone().data_ptr()
        return super().forward(x)


@pytest.mark.parametrize(
    ("make", "mode"),
    [(Product, "compiled"), (WithoutAGradient, "compiled"), (OffAndOn, "compiled"), (EagerStep, "eager")],
)
@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_kernels_run_under_the_autocast_of_their_calls(make: type[Quiet], mode: str, precision: Any) -> None:
    assert_as_eager(make, mode, precision=precision)
