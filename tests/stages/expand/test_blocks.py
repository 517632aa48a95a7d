"""Rows of a dimension that lies in blocks, folded, or in unequal pieces: every operator finds the right ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.ir.placement import PARTIAL, REPLICATE, Placement, Shard, ShardAxis
from lightning_spmd.ir.signature import Signature
from lightning_spmd.ir.steps import ShardedStep
from lightning_spmd.stages.expand.collectives.exchange import own_index, positions
from lightning_spmd.stages.expand.collectives.redistribute import redistribute
from lightning_spmd.stages.expand.program.local_program import LocalProgram
from tests.helpers.long_sequences import context_plan
from tests.helpers.simulate import assembled, assert_equals_one_device, meshes_for, pieces, run_locally
from tests.helpers.tiny_capture import capture_module


class Rows(nn.Module):
    """Position by position, then something with rows of what is (positions * batch, features)."""

    def __init__(self, last: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(3, 3), last

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(x).tanh().transpose(0, 1).flatten(0, 1))


ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "one row": lambda rows: rows[13] * 2,
    "the last row": lambda rows: rows[-1].exp(),
    "each row's own": lambda rows: rows[torch.arange(len(rows)), torch.arange(len(rows)) % 3],
    "each row's own, as a column": lambda rows: rows[torch.arange(len(rows))[:, None], torch.tensor([[0, 2]])],
}


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("mesh", [{"data_parallel": (1, 3)}, {"data_parallel": (2, 2)}, {"context_parallel": (1, 1)}])
def test_rows_of_blocks_equal_one_device(rows: str, mesh: Any) -> None:
    """Where the batch is not the outermost part of a row: one row was another one, an own row an index out of range."""
    torch.manual_seed(0)
    captured, live = capture_module(Rows(ROWS[rows]), lambda m, x: m(x).square().sum(), [torch.randn(4, 6, 3)])
    assert_equals_one_device(captured, live, mesh, plan=context_plan())


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
def test_pieces_cover_every_index_once(ranks: int, folded: bool) -> None:
    size = 12 * ranks
    axes = [ShardAxis("a", ranks, r, "", (1,) * ranks, folded=folded) for r in range(ranks)]
    for outer in (1, 3):
        places = [{i: axis.find(size, i, outer) for i in range(size)} for axis in axes]
        owned = [{i: at for i, at in place.items() if at is not None} for place in places]
        assert sorted(i for own in owned for i in own) == list(range(size))
        assert all(sorted(own.values()) == list(range(size // ranks)) for own in owned)
        assert [axis.shard_size(size, outer) for axis in axes] == [size // ranks] * ranks


def test_a_dimension_that_is_not_divided_is_refused() -> None:
    axis = ShardAxis("context_parallel", 2, 0, "", (1, 1))
    with pytest.raises(ValueError, match="dimension of 5 cannot be split over context_parallel"):
        axis.local_size(5)
    with pytest.raises(ValueError, match="dimension of 6"):
        dataclasses.replace(axis, folded=True).shard_size(6, 1)


def test_two_axes_split_one_dimension() -> None:
    (first, second) = (
        ShardAxis("context_parallel", 2, 1, "", (1, 1), folded=True),
        ShardAxis("tensor_parallel", 2, 0, "", (1, 1)),
    )
    # of 16 positions rank 1 of the first axis has 4-7 and 8-11, in this order, and the first half of them on the second
    assert positions(16, 0, (Shard(0), Shard(0)), (first, second)) == [(4, 4)]
    assert positions(16, 0, (Shard(0), REPLICATE), (first, second)) == [(4, 4), (8, 4)]
    found = {i: own_index(16, i, 0, (Shard(0), Shard(0)), (first, second)) for i in range(16)}
    assert {i: at for i, at in found.items() if at is not None} == {4: 0, 5: 1, 6: 2, 7: 3}


CHANGES: list[tuple[Placement, Placement]] = [
    (Shard(1), Shard(0)), (Shard(0), Shard(1, 2)), (Shard(1, 2), Shard(2)), (Shard(1), REPLICATE),
    (REPLICATE, Shard(1)), (PARTIAL, Shard(1)),
    (PARTIAL, Shard(1, 2)), (PARTIAL, REPLICATE), (Shard(1), PARTIAL), (Shard(1, 2), PARTIAL),
]  # fmt: skip


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize(("have", "want"), CHANGES, ids=str)
def test_changes_keep_the_tensor(have: Placement, want: Placement, folded: bool) -> None:
    """On the outer of two axes, beside an inner one that splits another dimension or the same one."""
    whole = torch.randn(8, 24, 8)
    for inner in (REPLICATE, Shard(0), Shard(2)):
        placements, wanted = (have, inner), (want, inner)
        steps: list[ShardedStep] = []
        for outer, data in meshes_for({"context_parallel": (1, 1), "data_parallel": (1, 1)}):
            axes = (dataclasses.replace(outer, folded=folded), data)
            program = LocalProgram(axes)
            value = program.add_input(
                fx.Graph().placeholder("x"), TensorSpec.of(pieces(whole, placements, axes)), placements
            )
            made = redistribute(program, value, TensorSpec.of(whole), placements, wanted)[wanted]
            steps.append(ShardedStep(program.finish([made]), Signature((), ()), axes))
        results = run_locally(steps, [[pieces(whole, placements, step.axes)] for step in steps])
        torch.testing.assert_close(assembled([r[0] for r in results], wanted, steps[0].axes), whole)
