"""How sharded state presents itself to torch."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor import Shard as TorchShard

from lightning_spmd.ir.placement import CHUNK, REPLICATE, Shard, ShardAxis
from lightning_spmd.parallel.mesh import make_mesh
from lightning_spmd.parallel.state import BlockShard, StateMesh
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


def _differences(sizes: dict[str, int], shard: int | None) -> list[int]:
    """Which of many parts come out otherwise when they are gathered together than one by one."""
    state = StateMesh(make_mesh(sizes, dist.get_rank(), "cpu", "gloo", shard))
    names = [axis.name for axis in state.axes]
    generator = torch.Generator().manual_seed(0)
    wholes, parts = [], []
    for shape, dtype in [
        ((7, 4), torch.float32),
        ((4,), torch.float32),
        ((1, 6), torch.float32),
        ((8, 6), torch.bfloat16),
    ]:
        for kind in (CHUNK, Shard(len(shape) - 1), REPLICATE):
            placements = tuple(kind if (name == "data_parallel") is (kind == CHUNK) else REPLICATE for name in names)
            wholes.append(torch.randn(shape, generator=generator).to(dtype))
            parts.append(state.shard(wholes[-1], placements))
    in_parts = [(whole, part) for whole, part in zip(wholes, parts, strict=True) if isinstance(part, DTensor)]
    found = state.gathered_together([part for _, part in in_parts])
    assert len(in_parts) > 3
    return [i for i, ((whole, _), one) in enumerate(zip(in_parts, found, strict=True)) if not torch.equal(whole, one)]


def _differences_of_meshes() -> list[list[int]]:
    init_device_mesh("cpu", (4,))
    data = {"data_parallel": 4}
    return [
        _differences(data, None),
        _differences(data, 2),
        _differences({"data_parallel": 2, "tensor_parallel": 2}, None),
    ]


def test_parts_that_are_gathered_together(four_ranks: RankPool) -> None:
    assert four_ranks.run(_differences_of_meshes) == [[[], [], []]] * 4
