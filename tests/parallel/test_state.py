"""How sharded state presents itself to torch."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor import Shard as TorchShard

from lightning_spmd.ir.placement import ShardAxis
from lightning_spmd.parallel.state import BlockShard
from tests.helpers.ranks import RankPool

AXIS = ShardAxis("tensor_parallel", 2, 0, "", ())


def test_blocks_equal_the_same_blocks_alone() -> None:
    thirds = BlockShard(0, 3, AXIS)
    assert thirds == BlockShard(0, 3, AXIS)
    for other in (TorchShard(0), BlockShard(0, 2, AXIS), BlockShard(1, 3, AXIS), BlockShard(0, (2, 1), AXIS)):
        assert (thirds == other, other == thirds) == (False, False)


def _kinds_of_one_shape(shapes: int) -> list[tuple[int, ...]]:
    """Shapes whose second parameter, in blocks, came out as the first one's plain shards."""
    mesh = init_device_mesh("cpu", (2,))

    def parameter(placement: Placement, shape: tuple[int, int]) -> nn.Parameter:
        local = torch.empty(shape[0] // 2, shape[1])
        return nn.Parameter(DTensor.from_local(local, mesh, [placement], run_check=False))

    found = []
    for rows in range(6, 6 * (shapes + 1), 6):
        parameter(TorchShard(0), (rows, 4))
        for again in (parameter(BlockShard(0, 3, AXIS), (rows, 4)), parameter(BlockShard(0, 3, AXIS), (rows, 4))):
            if not isinstance(again.detach().placements[0], BlockShard):
                found.append((rows, 4))
    return found


def test_tensors_of_one_shape_keep_their_own_placements(two_ranks: RankPool) -> None:
    """The operator cache of torch finds entries by hash but compares everything on the way with ``==``."""
    assert two_ranks.run(_kinds_of_one_shape, 400) == [[], []]
