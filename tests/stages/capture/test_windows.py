"""Views by place that are windows along dimensions are recorded as those."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_spmd.stages.capture.rewrites.windows import as_windows
from tests.helpers.activations import activation_collectives
from tests.helpers.simulated_training import SimulatedTraining, Step, train_eagerly

_X = torch.arange(2 * 12 * 3.0).reshape(2, 12, 3)
_CASES: dict[str, tuple[Tensor, tuple[int, ...], tuple[int, ...]]] = {
    "chunks that overlap": (_X.view(2, 3, 4, 3), (2, 5, 4, 3), (36, 6, 3, 1)),
    "chunks in another order of memory": (_X.transpose(0, 1).contiguous().transpose(0, 1), (2, 5, 4, 3), (3, 12, 6, 1)),
    "windows of padded values": (_X, (2, 4, 6, 3), (36, 6, 3, 1)),
    "chunks side by side": (_X, (2, 3, 4, 3), (36, 12, 3, 1)),
    "windows of the last dimension": (_X, (2, 12, 2, 2), (36, 3, 1, 1)),
    "not from the start": (_X[:, 4:], (2, 3, 4, 3), (36, 6, 3, 1)),
}


@pytest.mark.parametrize("name", _CASES)
def test_they_are_the_same_view(name: str) -> None:
    source, size, stride = _CASES[name]
    found = as_windows(source, size, stride)
    assert found is not None
    assert (found.shape, found.stride(), found.data_ptr()) == (size, stride, source.data_ptr())


def _laid_out(base: Tensor, like: Tensor) -> Tensor:
    """What ``like`` is of ``_X``."""
    if like.stride()[:1] == (3,):
        return base.transpose(0, 1).contiguous().transpose(0, 1)
    return base.as_strided(like.shape, like.stride(), like.storage_offset())


@pytest.mark.parametrize("name", _CASES)
def test_gradients_are_the_same(name: str) -> None:
    source, size, stride = _CASES[name]
    ours, theirs = (_X.clone().requires_grad_() for _ in range(2))
    found = as_windows(_laid_out(ours, source), size, stride)
    assert found is not None
    other = _laid_out(theirs, source).as_strided(size, stride)
    weight = torch.randn(size, generator=torch.Generator().manual_seed(0))
    (found * weight).sum().backward()
    (other * weight).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("size", "stride", "offset"),
    [
        ((2, 3), (36, 1), None),  # the first of the positions alone
        ((12, 12), (3, 3), None),  # rows and positions are mixed
        ((24, 2, 2), (3, 1, 1), None),
        ((2, 12, 3), (36, 3, 1), 1),
        ((12, 2, 3), (3, 36, 1), None),  # in another order
        ((2, 4, 12, 3), (36, 6, 3, 1), None),  # windows reach into the next row
    ],
)
def test_other_views_stay_by_place(size: tuple[int, ...], stride: tuple[int, ...], offset: int | None) -> None:
    assert as_windows(torch.empty(2, 12, 3), size, stride, offset) is None


def _chunked(layers: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Longformer's chunks of values that lie with their positions outermost, and its chunks of padded values."""
    first, last = layers
    hidden = first(x).transpose(0, 1).contiguous().transpose(0, 1)
    rows, between, step, _ = hidden.view(x.shape[0], 3, 4, 6).stride()
    chunks = hidden.as_strided((x.shape[0], 5, 4, 6), (rows, between // 2, step, 1))
    padded = F.pad(hidden, (0, 0, 2, 2))
    rows, step, _ = padded.stride()
    wide = torch.as_strided(padded, (x.shape[0], 6, 6, 6), (rows, 2 * step, step, 1))
    return F.mse_loss(last(chunks.tanh().mean((1, 2)) + wide.tanh().mean((1, 2))), y)


def test_ranks_keep_their_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    batches = [(torch.randn(4, 12, 3, generator=generator), torch.randn(4, 2, generator=generator)) for _ in range(2)]
    torch.manual_seed(0)
    ours = Step(nn.Sequential(nn.Linear(3, 6), nn.Linear(6, 2)), _chunked)
    theirs = copy.deepcopy(ours)
    training = SimulatedTraining(ours, torch.optim.SGD(ours.parameters(), lr=0.1), (1, 3))
    losses = [training.train(batch) for batch in batches]
    expected = train_eagerly(theirs, torch.optim.SGD(theirs.parameters(), lr=0.1), batches)
    assert losses == pytest.approx(expected, rel=1e-6)
    (_, _, steps), *_ = training.graphs
    assert [n.name for step in steps for n in activation_collectives(step)] == []
