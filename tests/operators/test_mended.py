"""What the sweep and a close look at the rules found wrong once, and what a refusal names."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.operators.cases import Sample, Split, sample_of
from tests.operators.check import EQUAL, REFUSED, REPLICATED, Checker, Outcome


def values(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def whole(*shape: int, below: int) -> Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(sum(shape)))


def with_nan(*shape: int) -> Tensor:
    found = values(*shape)
    found.view(-1)[1] = torch.nan
    return found


def rows_first(x: Tensor) -> Tensor:
    """What ends with the batch behind another dimension: its rows are several ranges of the result."""
    return x.transpose(0, 1).flatten(0, 1)


def assign(x: Tensor, where: Any, value: Any) -> Tensor:
    found = x * 1
    found[where] = value
    return found


def images(*shape: int) -> Tensor:
    return values(*shape).contiguous(memory_format=torch.channels_last)


class Twice(torch.autograd.Function):
    """Its gradient is written into an empty tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        found = torch.empty(gradient.shape, dtype=gradient.dtype)
        torch.mul(gradient, 2, out=found)
        return found


def check(sample: Sample, split: Split) -> Outcome:
    return Checker(sample, split.batch).check(split)


ROWS: dict[str, tuple[Sample, tuple[int, int]]] = {
    # a rank's piece of size one or zero is another kind of tensor to torch
    "squeeze": (sample_of(torch.squeeze, values(5, 1, 3, 1)), (4, 1)),
    "squeeze of no rows": (sample_of(torch.squeeze, values(5, 1, 3, 1)), (0, 5)),
    "hstack of rows": (sample_of(lambda x: torch.hstack((x, x * 2)), values(5)), (1, 4)),
    "a loss of one row": (sample_of(F.multilabel_margin_loss, values(5), whole(5, below=5)), (4, 1)),
    "a target of one row": (sample_of(F.multi_margin_loss, values(5), torch.tensor(3)), (4, 1)),
    "transform of no rows": (sample_of(torch.fft.fft2, values(4, 3, 6)), (4, 0)),
    "extremes of no rows": (sample_of(lambda x: (torch.amax(x, 0), x.max(), x.min()), values(4, 3)), (0, 4)),
    "statistics of no rows": (
        sample_of(lambda x: F.batch_norm(x, None, None, training=True), values(5, 3)), (5, 0),
    ),
    # dimensions that are numbered the other way round
    "renorm": (sample_of(torch.renorm, values(5, 5, 5), 2, 1, 0.5), (4, 1)),
    # the mean over rows of a loss of rows
    "mean of a loss of rows": (sample_of(F.multilabel_margin_loss, values(9, 5), whole(9, 5, below=5)), (8, 1)),
    # operands that happen to have as many entries as there are rows
    "test elements": (sample_of(torch.isin, torch.arange(5.0).double(), torch.arange(5.0).double().flip(0)), (3, 2)),
    # the rows are several ranges of a dimension
    "one row of several ranges": (sample_of(lambda x: rows_first(x)[7], values(4, 3, 2)), (3, 1)),
    "ranges with shares": (sample_of(lambda x: torch.cat([x, torch.cat([x, x])]).flip(1)[:, 0], values(4, 3)), (3, 1)),
    "joined blocks put together": (
        sample_of(lambda x: torch.cat([x[:, 0], x.flatten(0, 1)]).cumsum(0), values(4, 2, 3)), (3, 1),
    ),
    # maximum and minimum compare, which a NaN may survive or not
    "maximum of NaN": (sample_of(lambda x: (x.amax(), x.amin(0)), with_nan(4, 3).flip(0)), (1, 3)),
    "largest norm of NaN": (
        sample_of(lambda x: torch.linalg.vector_norm(x, torch.inf), with_nan(4, 3).flip(0)), (3, 1),
    ),
    # a variance that subtracts large numbers from each other knows nothing
    "variance far from zero": (sample_of(lambda x: (x * 1e-3 + 1e3).var(0) * 1e6, values(6, 3)), (4, 2)),
    "variance of complex numbers": (
        sample_of(lambda x: torch.view_as_complex(x).var(0), values(5, 3, 2)), (3, 2),
    ),
    # rows of a split tensor, written through a view of a copy
    "rows assigned": (sample_of(lambda x: assign(x, slice(1, 3), 1.5), values(5, 3)), (4, 1)),
    "a row assigned": (sample_of(lambda x: assign(x, 0, x[-1]), values(5, 3)), (3, 2)),
    "a row assigned, no rows": (sample_of(lambda x: assign(x, 0, x[-1]), values(5, 3)), (5, 0)),
    "rows scaled in place": (sample_of(lambda x: assign(x, 1, assign(x, 2, 0.0)[3:].mul_(2)[0]), values(5, 3)), (3, 2)),
    # a rule for another form of the operator
    "a sum into a tensor": (
        sample_of(lambda x: (x, torch.sum(x.detach(), 0, out=torch.empty(3, dtype=torch.float64))), values(5, 3)),
        (3, 2),
    ),
    # a partial sum made of an empty tensor that has been written
    "a gradient in an empty tensor": (sample_of(lambda x, w: (x, Twice.apply(w)), values(4, 3), values(3)), (3, 1)),
    # what reads by place in a storage
    "places in what was gathered": (
        sample_of(lambda x: x.t().contiguous().t().as_strided((6, 2), (1, 6)), values(6, 6)), (5, 1),
    ),
    # torch's shape function takes views that its kernel refuses
    "pixels of a piece that lies channels-last": (
        sample_of(F.max_unpool2d, images(2, 2, 1, 2), torch.arange(8).view(2, 2, 1, 2), 3), (2, 0),
    ),
    # a copy that conjugates
    "lazily conjugated": (sample_of(torch.fft.ifft, values(5, 6)), (3, 2)),
    "a row of a number": (sample_of(torch.index_select, values(), 0, torch.zeros(1, dtype=torch.long)), (1, 0)),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_rows_are_split_as_if_they_were_not(name: str) -> None:
    sample, split = ROWS[name]
    batch = next(i for i, t in enumerate(sample.tensors) if t.ndim)
    outcome = check(sample, Split((batch,), split))
    assert outcome.kind in (EQUAL, REPLICATED), outcome


PARAMETERS: dict[str, tuple[Sample, int, int]] = {
    "one row of a split loss": (sample_of(F.multi_margin_loss, values(6), torch.tensor(3)), 0, 0),
    "groups of channels": (
        sample_of(torch.nn.functional.group_norm, values(2, 6, 3), 2, values(6), values(6)), 1, 0,
    ),
    "renorm": (sample_of(torch.renorm, values(4, 4, 4), 2, 1, 0.5), 0, 0),
    "moved dimensions": (sample_of(torch.movedim, values(4, 3, 2, 1), [0, -1, -2, -3], [-3, -2, -1, 0]), 0, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_split_as_if_they_were_not(name: str) -> None:
    sample, tensor, dim = PARAMETERS[name]
    size = sample.tensors[tensor].shape[dim]
    outcome = check(sample, Split((tensor,), (size // 2, size - size // 2), dim))
    assert outcome.kind in (EQUAL, REPLICATED), outcome


def test_norms_of_half_precision_do_not_overflow_on_the_way() -> None:
    x = torch.full((4, 3), 300.0, dtype=torch.float16)
    outcome = check(sample_of(lambda x: torch.linalg.vector_norm(x), x), Split((0,), (3, 1)))
    assert outcome.kind == EQUAL, outcome


REFUSALS: dict[str, tuple[Any, str]] = {
    "a value": (lambda x: x * float(x.sum()), r"the value of a tensor is read.*test_mended.py:\d+"),
    "a comparison": (
        lambda x: x * torch.allclose(x.long(), x.long()), r"aten.allclose.default reads the .*test_mended.py:\d+",
    ),
    "a shape": (
        lambda x: torch.linalg.lstsq(x, x).solution, r"the shape of what aten.*depends on the data.*test_mended.py:\d+",
    ),
    "a size": (lambda x: x[x > 0], r"the value of a tensor is read.*test_mended.py:\d+"),
    "positions": (
        lambda x: torch.tensor_split(x, torch.tensor([1, 2]) + x[0, 0].long()), r"positions.*test_mended.py:\d+",
    ),
    "sparse": (lambda x: x.to_sparse(), r"(sparse|depends on the data).*test_mended.py:\d+"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_what_one_graph_cannot_express_is_named_with_its_line(name: str) -> None:
    function, message = REFUSALS[name]
    outcome = check(sample_of(function, values(4, 3)), Split((0,), (3, 1)))
    assert outcome.kind == REFUSED
    assert re.search(message, outcome.reason), outcome.reason
