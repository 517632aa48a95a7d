"""Mixture-of-experts routing on each rank's own rows, and every use that would see the difference refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.activations import activation_collectives
from tests.helpers.simulate import assert_equals_one_device
from tests.helpers.tiny_capture import capture_function

ROWS, EXPERTS = 12, 4


def _experts(p: dict[str, Tensor], x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    sorted_ids, order = torch.sort(ids)
    ends = torch.histc(sorted_ids.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0, dtype=torch.int32)
    y = torch._grouped_mm((x * p["scale"])[order], p["w"], offs=ends).relu() + p["bias"][sorted_ids]
    return y, order, ends


def _inverse_by_write(order: Tensor) -> Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(ROWS)
    return inverse


def _run(function: Any, split: tuple[int, ...]) -> Any:
    torch.manual_seed(0)
    parameters = {
        "w": torch.randn(EXPERTS, 8, 8).requires_grad_(),
        "scale": torch.randn(8).requires_grad_(),
        "bias": torch.randn(EXPERTS, 8).requires_grad_(),
    }
    batch = [torch.randn(ROWS, 8), torch.randint(0, EXPERTS, (ROWS,))]
    captured, live = capture_function(lambda p, _, x, i: function(p, x, i), parameters, {}, batch)
    return assert_equals_one_device(captured, live, split)[0]


@pytest.mark.parametrize("split", [(6, 6), (7, 5), (3, 4, 5)], ids=str)
@pytest.mark.parametrize("inverse", [_inverse_by_write, torch.argsort], ids=["write", "argsort"])
def test_sorted_rows_that_are_put_back_need_no_collective(inverse: Any, split: tuple[int, ...]) -> None:
    def function(p: dict[str, Tensor], x: Tensor, ids: Tensor) -> Tensor:
        y, order, _ = _experts(p, x, ids)
        return (y[inverse(order)] * x).square().mean()

    assert activation_collectives(_run(function, split)) == []


def _sum_weighted_by_place(p: dict[str, Tensor], x: Tensor, ids: Tensor) -> Tensor:
    return (_experts(p, x, ids)[0] * torch.arange(float(ROWS))[:, None]).mean()


def _sorted_rows_beside_plain_rows(p: dict[str, Tensor], x: Tensor, ids: Tensor) -> Tensor:
    return (_experts(p, x, ids)[0] * x).square().mean()


def _returned(p: dict[str, Tensor], x: Tensor, ids: Tensor) -> Any:
    y = _experts(p, x, ids)[0]
    return y.square().mean(), y


def _first_of_the_sorted(p: dict[str, Tensor], x: Tensor, ids: Tensor) -> Tensor:
    return _experts(p, x, ids)[0][0].square().mean()


def _running_sum(p: dict[str, Tensor], x: Tensor, ids: Tensor) -> Tensor:
    return _experts(p, x, ids)[0].cumsum(0).square().mean()


def _order_as_numbers(p: dict[str, Tensor], x: Tensor, ids: Tensor) -> Tensor:
    y, order, _ = _experts(p, x, ids)
    return (y * order[:, None]).mean()


def _ends_as_numbers(p: dict[str, Tensor], x: Tensor, ids: Tensor) -> Tensor:
    y, order, ends = _experts(p, x, ids)
    return (y[_inverse_by_write(order)] * x).mean() * ends.float().square().sum()


@pytest.mark.parametrize(
    "function",
    [
        _sum_weighted_by_place,
        _sorted_rows_beside_plain_rows,
        _returned,
        _first_of_the_sorted,
        _running_sum,
        _order_as_numbers,
        _ends_as_numbers,
    ],
)
def test_what_sees_the_order_gets_the_one_device_order(function: Any) -> None:
    _run(function, (7, 5))
