"""The device mesh: which rank stands where, and the process groups of its axes.

Ranks are laid out as (data, tensor), the tensor axis varying fastest: ranks that share a layer are neighbours, on one
node. Graphs list the axes the other way round, tensor first, because the chunks of sharded state lie inside a tensor
shard. Under hybrid sharding the data axis consists of rows of neighbours: chunks lie within a row, rows are replicas.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_spmd.errors import BatchError, ConfigurationError
from lightning_spmd.ir.placement import ShardAxis

DATA_PARALLEL = "data_parallel"
TENSOR_PARALLEL = "tensor_parallel"
SHARD = "shard"
"""The neighbours on the data axis among which state lies in chunks, under hybrid sharding."""
REPLICA = "replica"
"""The ranks of the data axis that hold the same chunks, under hybrid sharding."""


def mesh_sizes(data: int | Literal["auto"], tensor: int, world_size: int) -> tuple[int, int]:
    """Sizes of the (data, tensor) axes.

    Raises:
        ConfigurationError: if they do not fill ``world_size`` ranks.
    """
    if tensor < 1 or world_size % tensor:
        raise ConfigurationError(
            f"tensor_parallel_size={tensor} does not divide the {world_size} devices of this run: choose a divisor, or "
            "another number of devices or nodes"
        )
    if data != "auto" and data * tensor != world_size:
        raise ConfigurationError(
            f"data_parallel_size={data} times tensor_parallel_size={tensor} is {data * tensor}, but this run has "
            f"{world_size} devices: set data_parallel_size='auto', or {world_size // tensor}"
        )
    return world_size // tensor, tensor


def shard_size(wanted: int | Literal["auto", "node"], data: int, tensor: int, ranks_per_node: int) -> int:
    """Among how many neighbours on the data axis state is split.

    Raises:
        ConfigurationError: if these do not fill the data axis.
    """
    if wanted == "auto":
        return data
    size = max(ranks_per_node // tensor, 1) if wanted == "node" else wanted
    if size < 1 or data % size:
        raise ConfigurationError(
            f"data_parallel_shard_size={wanted!r} is {size} ranks, which do not divide the {data} data-parallel ranks: "
            "choose a divisor, or 'auto' to shard over all of them"
        )
    return size


@dataclass(frozen=True)
class Mesh:
    """The mesh of a run, as one rank sees it.

    Args:
        data: number of data-parallel ranks.
        tensor: number of ranks that share each layer.
        rank: this rank.
        device_mesh: torch's mesh with the same axes; its groups are communicators of their own.
        state_mesh: the same with the axes in the order of graphs, in which DTensor nests placements as they do; under
            hybrid sharding the data axis is two of them, ``replica`` and ``shard``.
        shard: number of data-parallel ranks among which state lies in chunks; ``data`` without hybrid sharding.
    """

    data: int
    tensor: int
    rank: int
    device_mesh: DeviceMesh
    state_mesh: DeviceMesh
    shard: int

    @property
    def data_rank(self) -> int:
        """This rank's position on the data axis."""
        return self.rank // self.tensor

    @property
    def tensor_rank(self) -> int:
        """This rank's position on the tensor axis."""
        return self.rank % self.tensor

    def group(self, name: str) -> Any:
        """The process group of an axis, or of a part of the data axis."""
        mesh = self.state_mesh if name in (SHARD, REPLICA) else self.device_mesh
        return mesh.get_group(name)

    def axes(self, split: Sequence[int] = ()) -> tuple[ShardAxis, ...]:
        """The axes as graphs use them, tensor axis first; one of a single rank is left out beside the other.

        Args:
            split: rows of the global batch on each data-parallel rank; even where there is no batch.
        """
        data = ShardAxis(
            DATA_PARALLEL,
            self.data,
            self.data_rank,
            self.group(DATA_PARALLEL).group_name,
            tuple(split) or (1,) * self.data,
            *self._parts(),
        )
        if self.tensor == 1:
            return (data,)
        group = self.group(TENSOR_PARALLEL).group_name
        tensor = tensor_parallel_axis(self.tensor, self.tensor_rank, group)
        return (tensor,) if self.data == 1 else (tensor, data)

    def _parts(self) -> tuple[ShardAxis | None, ShardAxis | None]:
        """The neighbours among which chunks lie and the ranks that hold the same ones, if that is not all ranks."""
        if self.shard == self.data:
            return None, None
        replica, place = divmod(self.data_rank, self.shard)
        rows = self.data // self.shard
        within = ShardAxis(SHARD, self.shard, place, self.group(SHARD).group_name, (1,) * self.shard)
        return within, ShardAxis(REPLICA, rows, replica, self.group(REPLICA).group_name, (1,) * rows)

    def check_same_batch(self, digests: Sequence[str]) -> None:
        """Compare the batches of ranks that share layers, given as digests by rank.

        Raises:
            BatchError: naming two ranks that differ.
        """
        for first, rank in self._unlike(digests):
            raise BatchError(
                f"ranks {first} and {rank} share layers but hold different batches: give your sampler "
                "**trainer.strategy.distributed_sampler_kwargs, and seed what is random in the data set alike"
            )

    def _unlike(self, values: Sequence[object]) -> Iterator[tuple[int, int]]:
        """Pairs of ranks that share layers and hold different values."""
        for rank, value in enumerate(values):
            first = rank - rank % self.tensor
            if value != values[first]:
                yield first, rank

    def split(self, rows: Sequence[int]) -> tuple[int, ...]:
        """Rows on each data-parallel rank from those on each rank.

        Raises:
            BatchError: if ranks that share layers hold different numbers of rows.
        """
        for first, rank in self._unlike(rows):
            raise BatchError(
                f"rank {rank} has {rows[rank]} rows and rank {first} has {rows[first]}, but both work on the same "
                "layers and need the same batch: give your sampler **trainer.strategy.distributed_sampler_kwargs"
            )
        return tuple(rows[:: self.tensor])


def make_mesh(
    sizes: tuple[int, int],
    rank: int,
    device_type: str,
    backend: str,
    timeout: timedelta | None,
    shard: int | None = None,
) -> Mesh:
    """Make the mesh on all ranks together.

    Its groups are never the default group: that carries Lightning's per-batch broadcast, which would wait behind all
    collectives in flight.

    Args:
        sizes: of the (data, tensor) axes.
        rank: this rank.
        device_type: of the tensors that lie on the mesh.
        backend: of the process groups.
        timeout: of their collectives.
        shard: among how many neighbours on the data axis state is split; None: among all.
    """
    data, tensor = sizes
    shard = data if shard is None else shard
    layout = torch.arange(data * tensor).reshape(-1, shard, tensor)
    dims = {DATA_PARALLEL: (0, 1), TENSOR_PARALLEL: (2,), REPLICA: (0,), SHARD: (1,)}
    layers = [TENSOR_PARALLEL] if tensor > 1 else []
    state_names = [*layers, *([DATA_PARALLEL] if shard == data else [REPLICA, SHARD])]

    def arranged(names: Sequence[str]) -> torch.Tensor:
        """The ranks with these axes, and whatever they leave out behind them."""
        named = [d for name in names for d in dims[name]]
        sizes = [math.prod(layout.shape[d] for d in dims[name]) for name in names]
        return layout.permute(*named, *(d for d in range(3) if d not in named)).reshape(*sizes, -1)

    groups: dict[str, Any] = {}
    for name in dict.fromkeys([DATA_PARALLEL, *state_names]):
        for ranks in arranged([name]).t().tolist():
            made = dist.new_group(ranks, backend=backend, timeout=timeout)
            groups[name] = made if rank in ranks else groups.get(name)

    def device_mesh(names: Sequence[str]) -> DeviceMesh:
        if len(names) == 1:
            return DeviceMesh.from_group(groups[names[0]], device_type, mesh_dim_names=tuple(names))
        ranks = arranged(names).squeeze(-1).contiguous()
        own = [groups[name] for name in names]
        return DeviceMesh.from_group(own, device_type, mesh=ranks, mesh_dim_names=tuple(names))

    names = [DATA_PARALLEL, *layers]
    outside = device_mesh(names)
    return Mesh(data, tensor, rank, outside, outside if names == state_names else device_mesh(state_names), shard)


def tensor_parallel_axis(size: int, rank: int, group: str) -> ShardAxis:
    """The tensor-parallel axis: every rank holds the same share.

    Args:
        size: number of ranks of the axis.
        rank: this rank's coordinate on it.
        group: name of a process group of the axis' own, never the default one.
    """
    return ShardAxis(TENSOR_PARALLEL, size, rank, group, (1,) * size)
