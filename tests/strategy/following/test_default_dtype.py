"""Factories without ``dtype``, and integers: the precision decides what is made of them, around the step alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.ranks import RankPool
from tests.helpers.training import InOrder, deviation
from tests.strategy.small import ROWS, Net, Quiet, assert_as_eager, rows, run


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


class OfIntegers(Net):
    """What becomes of integers and truth values, which the default decides as it decides what factories make."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        made = [y * 0.3, torch.sqrt(y), y / 7, torch.exp(-y), (y > 1) * 0.7, y.sum() * 0.01, (y * 1j * 0.3).imag]
        made += [torch.where(y > 1, 0.3, 0.7), torch.arange(3).sigmoid(), torch.tensor(0.1) * y, y**-0.5 * (y > 0)]
        return self.loss(batch) * (1 + 0.01 * sum(m.nan_to_num(posinf=1.0).mean() for m in made))


@pytest.mark.parametrize("precision", ["64-true", "bf16-true", "16-true"])
def test_what_becomes_of_integers_is_eagers(precision: Any) -> None:
    assert_as_eager(OfIntegers, precision=precision)


_made: dict[Any, torch.Tensor] = {}


@torch.library.custom_op("tests_default_dtype::halves", mutates_args=())
def halves(x: torch.Tensor) -> torch.Tensor:
    """An operator of others that makes a table once, of the dtype that is the default then."""
    if "table" not in _made:
        _made["table"] = torch.full((x.shape[-1],), 0.5)
    return torch.zeros(x.shape) + _made["table"]


@halves.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape)


class CallsOthers(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * halves(x.detach()))


@pytest.mark.parametrize("precision", ["64-true", "bf16-true"])
def test_operators_of_others_find_the_default_of_the_step(precision: Any) -> None:
    _made.clear()
    assert_as_eager(CallsOthers, precision=precision)
    _made.clear()
    run(CallsOthers, "spmd", precision=precision)
    assert _made["table"].dtype == {"64-true": torch.float64, "bf16-true": torch.bfloat16}[precision]


class OfIntegersQuietly(OfIntegers, Quiet):
    """Without dropout."""


def _on(strategy: Any, devices: int) -> Any:
    return run(OfIntegersQuietly, strategy, devices, data=lambda: InOrder(rows(), ROWS), precision="64-true")


@pytest.mark.parametrize("plan", ["spmd", {"data_parallel": "zero3"}])
def test_on_two_ranks(two_ranks: RankPool, plan: Any) -> None:
    results = two_ranks.run(_on, plan, 2)
    assert all(result.mode == "compiled" for result in results)
    found = deviation(results[0], _on("auto", 1))
    assert max(found.loss, found.weights) <= 1e-12, found
