"""Parts of a step in full precision, or in another, under a precision that is on around the whole step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from tests.helpers.ranks import RankPool
from tests.helpers.training import InOrder, deviation
from tests.strategy.small import ROWS, Quiet, assert_as_eager, rows, run


class Kept(Quiet):
    """Logs the means of what it computed, and keeps the types."""

    def __init__(self) -> None:
        super().__init__()
        self.types: list[torch.dtype] = []

    def seen(self, value: Tensor) -> Tensor:
        self.types.append(value.dtype)
        self.log(f"mean{len(self.types) % 2}", value.float().mean())
        return value


class Product(Kept):
    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        with torch.autocast("cpu", enabled=False):
            return self.seen(hidden.float() @ self.last.weight.t()) + self.last.bias


class Layer(Kept):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            hidden = self.seen(self.first(x))
        return self.seen(self.last(torch.tanh(hidden)))


class WholeFunction(Kept):
    @torch.autocast("cpu", enabled=False)
    def forward(self, x: Tensor) -> Tensor:
        return self.seen(super().forward(x))


class OnAgainInside(Kept):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            hidden = self.seen(self.first(x))
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.seen(self.last(torch.tanh(hidden)))


class NowAndThen(Kept):
    """One path for each."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=self.trainer.global_step % 2 == 0):
            return self.seen(super().forward(x))


class InHalf(Kept):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            hidden = self.seen(self.first(x))
        return self.last(torch.tanh(hidden))


class _Product(Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x


class OwnFunction(Kept):
    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        return self.seen(_Product.apply(hidden, self.last.weight)) + self.last.bias


class InTheBackwardPass(Kept):
    """A hook in full precision, though the loss is not."""

    def loss(self, batch: Any) -> Tensor:
        hidden = torch.tanh(self.first(batch[0]))

        def turned(gradient: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                return (gradient.float() @ torch.eye(10)).to(gradient.dtype)

        hidden.register_hook(turned)
        return F.cross_entropy(self.last(hidden), batch[1])


PARTS = [Product, Layer, WholeFunction, OnAgainInside, NowAndThen, OwnFunction, InTheBackwardPass]


@pytest.mark.parametrize("make", [*PARTS, InHalf])
def test_a_part_has_the_precision_that_it_asks_for(make: type[Kept]) -> None:
    assert_as_eager(make, precision="bf16-mixed")


@pytest.mark.parametrize("make", [Product, OnAgainInside, OwnFunction])
def test_on_two_ranks_it_does_as_well(two_ranks: RankPool, make: type[Kept]) -> None:
    reference = run(make, "auto", data=lambda: InOrder(rows(), ROWS), max_epochs=1, precision="bf16-mixed")
    for result in two_ranks.run(run, make, "spmd", 2, max_epochs=1, precision="bf16-mixed"):
        assert result.mode == "compiled", result.warnings
        assert deviation(result, reference).weights < 1e-3
