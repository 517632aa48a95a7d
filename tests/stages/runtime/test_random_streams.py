"""Streams of random numbers: a value's own over the axes that split it, everybody's over the others."""

from __future__ import annotations

import itertools

import pytest
import torch

from lightning_spmd.stages.runtime.random_streams import RandomStreams

TENSOR, DATA = "tensor_parallel", "data_parallel"
MESH = [{TENSOR: t, DATA: d} for t, d in itertools.product(range(2), range(2))]


def drawn(coordinates: dict[str, int] | int, axes: tuple[str, ...] | None, *, ticks: int = 1, draw: int = 0) -> float:
    streams = RandomStreams(7, coordinates)
    for _ in range(ticks - 1):
        with streams.active(draws=False):
            pass
    with streams.active():
        streams.select(axes, draw)
        return torch.rand(()).item()


@pytest.mark.parametrize(
    ("axes", "different"), [((), 1), ((DATA,), 2), ((TENSOR,), 2), ((TENSOR, DATA), 4), ((DATA, TENSOR), 4), (None, 4)]
)
def test_ranks_differ_along_the_axes_that_split_the_value(axes: tuple[str, ...] | None, different: int) -> None:
    numbers = [drawn(coordinates, axes) for coordinates in MESH]
    assert len(set(numbers)) == different
    if axes is not None and len(axes) == 1:
        groups = {c[axes[0]]: n for c, n in zip(MESH, numbers, strict=True)}
        assert all(groups[c[axes[0]]] == n for c, n in zip(MESH, numbers, strict=True))


def test_on_one_axis_a_number_is_enough() -> None:
    assert len({drawn(rank, (DATA,)) for rank in range(3)}) == 3
    assert len({drawn(rank, ()) for rank in range(3)}) == 1
    assert drawn(1, None) == drawn(1, (DATA,))


def test_runs_and_draws_of_a_run_differ() -> None:
    numbers = [drawn(0, (DATA,), ticks=t, draw=d) for t, d in itertools.product((1, 2), (0, 1))]
    assert len(set(numbers)) == 4


def test_a_run_leaves_the_users_generator_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(())
    torch.manual_seed(0)
    drawn(1, (DATA,))
    assert torch.equal(torch.rand(()), expected)
