"""What a rank holds of a tensor, and the tensor again."""

from __future__ import annotations

import pytest
import torch

from lightning_spmd.ir.placement import CHUNK, PARTIAL, REPLICATE, Placement, Shard
from lightning_spmd.parallel.pieces import joined, local_piece
from tests.helpers.simulate import meshes_for

MESH = {"tensor_parallel": (1, 1), "data_parallel": (1, 1, 1)}
TENSOR = torch.arange(24 * 4).view(24, 4)


@pytest.mark.parametrize("data", [REPLICATE, CHUNK])
@pytest.mark.parametrize(
    "tensor", [REPLICATE, Shard(0), Shard(1), Shard(0, 3), Shard(0, (4, 1, 1)), Shard(1, 2)], ids=str
)
def test_the_pieces_of_all_ranks_make_the_tensor(tensor: Placement, data: Placement) -> None:
    pieces = [local_piece(TENSOR, (tensor, data), axes) for axes in meshes_for(MESH)]
    rows = [joined(pieces[i : i + 3], data) for i in (0, 3)]
    assert torch.equal(joined(rows, tensor), TENSOR)


def test_a_fused_projection_keeps_its_parts_in_order() -> None:
    first, second = (local_piece(TENSOR, (Shard(0, (4, 1, 1)),), axes[:1])[:, 0] // 4 for axes in meshes_for(MESH)[::3])
    assert first.tolist() == [*range(8), 16, 17, 20, 21]
    assert second.tolist() == [*range(8, 16), 18, 19, 22, 23]


def test_a_partial_sum_has_no_pieces() -> None:
    with pytest.raises(ValueError, match="partial sum"):
        local_piece(TENSOR, (PARTIAL,), meshes_for({"tensor_parallel": (1, 1)})[0])
    with pytest.raises(ValueError, match="partial sum"):
        joined([TENSOR, TENSOR], PARTIAL)
