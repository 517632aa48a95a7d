"""Switches that kernels look at when they run, set in a part of a step: a graph has those of its own time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch import Tensor, nn
from torch.backends import mkldnn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.strategy.small import Quiet, assert_as_eager, run


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    mkldnn.set_flags(True)


class Convolves(Quiet):
    """A layer with another kernel in oneDNN, which rounds otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.steps = nn.Conv1d(1, 6, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.layer(x[:, None]).mean(-1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        return self.loss(batch)


class Within(Convolves):
    """Without oneDNN in a part of each step."""

    def forward(self, x: Tensor) -> Tensor:
        with mkldnn.flags(enabled=False):
            return super().forward(x)


class Sometimes(Convolves):
    """In a part of some steps."""

    def forward(self, x: Tensor) -> Tensor:
        with mkldnn.flags(enabled=self.steps % 3 != 2):
            return super().forward(x)


class ForGood(Convolves):
    """From the middle of a step on."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        noise = self.layer(batch[0][:, None]).mean()
        mkldnn.set_flags(self.steps < 7)
        return super().training_step(batch, batch_idx) + noise


class ForGoodBehind(Convolves):
    """Behind the calls of a step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        mkldnn.set_flags(self.steps < 7)
        return loss


@pytest.mark.parametrize("make", [Within, Sometimes, ForGood, ForGoodBehind])
def test_kernels_see_what_they_see_in_eager_training(make: type[Convolves]) -> None:
    class Anew(make):  # type: ignore[misc, valid-type]
        def on_fit_start(self) -> None:
            mkldnn.set_flags(True)

    assert_as_eager(Anew, mode="eager" if make is Within else "compiled")


def test_the_line_is_named() -> None:
    warnings = run(Within, "spmd").warnings
    assert any("torch.backends.mkldnn.flags" in w and f"{__file__}:" in w for w in warnings), warnings


def test_what_holds_in_all_of_a_step_is_no_reason() -> None:
    mkldnn.set_flags(False)
    assert_as_eager(Convolves)


class Attends(Quiet):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        h = self.first(x).tanh()[None, None]
        with sdpa_kernel(self.backend(batch_idx)):
            h = F.scaled_dot_product_attention(h, h, h)
        return F.cross_entropy(self.last(h[0, 0]), y)

    def backend(self, batch_idx: int) -> SDPBackend:
        return SDPBackend.MATH


class AttendsInTurn(Attends):
    def backend(self, batch_idx: int) -> SDPBackend:
        return SDPBackend.MATH if batch_idx % 3 else SDPBackend.FLASH_ATTENTION


@pytest.mark.parametrize("make", [Attends, AttendsInTurn])
def test_attention_is_the_operator_that_the_step_has_chosen(make: type[Attends]) -> None:
    assert_as_eager(make)


class BeforeBackward(Convolves):
    def on_before_backward(self, loss: Tensor) -> None:
        mkldnn.set_flags(self.steps < 3)

    def on_after_backward(self) -> None:
        mkldnn.set_flags(True)


def test_a_hook_before_the_backward_pass_is_told_that_it_came_too_late() -> None:
    result = run(BeforeBackward, "spmd")
    assert result.mode == "eager"
    assert any("between training_step and the backward pass" in w for w in result.warnings), result.warnings
