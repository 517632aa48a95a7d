"""Factories without ``dtype``: the precision decides what they make, and it is around the step, not the graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.strategy.small import Net, assert_as_eager


class Noisy(Net):
    """Noise and weights of positions, both of the default dtype."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, *rest = batch
        return self.loss((x + torch.rand(x.shape) * torch.linspace(0, 1, x.shape[-1]), *rest))


@pytest.mark.parametrize("precision", ["64-true", "bf16-true", "32-true"])
def test_what_factories_make_is_eagers(precision: Any) -> None:
    assert_as_eager(Noisy, precision=precision)


class Mixed(Net):
    """Noise in single precision, of which a value is read where the default is the precision's."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        try:
            noise = torch.rand(8)
        finally:
            torch.set_default_dtype(before)
        return self.loss(batch) * (1 + noise.sum().item()) + noise.mean()


@pytest.mark.parametrize("precision", ["64-true", "bf16-true"])
def test_a_default_of_a_part_of_the_step_is_eagers(precision: Any) -> None:
    assert_as_eager(Mixed, precision=precision)


def test_a_default_of_a_part_of_the_step_differs_from_that_of_the_program() -> None:
    """Graphs then run where the default is another one than for some of their calls."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert_as_eager(Mixed)
    finally:
        torch.set_default_dtype(before)
