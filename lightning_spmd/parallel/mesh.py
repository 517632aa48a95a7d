"""The device mesh: which rank stands where, and the process groups of its axes.

Ranks are laid out as (data, tensor), the tensor axis varying fastest: ranks that share a layer are neighbours, on one
node. Graphs list the axes the other way round, tensor first, because the chunks of sharded state lie inside a tensor
shard.
"""

from __future__ import annotations

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


@dataclass(frozen=True)
class Mesh:
    """The mesh of a run, as one rank sees it.

    Args:
        data: number of data-parallel ranks.
        tensor: number of ranks that share each layer.
        rank: this rank.
        device_mesh: torch's mesh with the same axes; its groups are communicators of their own.
        state_mesh: the same with the axes in the order of graphs, in which DTensor nests placements as they do.
    """

    data: int
    tensor: int
    rank: int
    device_mesh: DeviceMesh
    state_mesh: DeviceMesh

    @property
    def data_rank(self) -> int:
        """This rank's position on the data axis."""
        return self.rank // self.tensor

    @property
    def tensor_rank(self) -> int:
        """This rank's position on the tensor axis."""
        return self.rank % self.tensor

    def group(self, name: str) -> Any:
        """The process group of an axis."""
        return self.device_mesh.get_group(name)

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
        )
        if self.tensor == 1:
            return (data,)
        group = self.group(TENSOR_PARALLEL).group_name
        tensor = tensor_parallel_axis(self.tensor, self.tensor_rank, group)
        return (tensor,) if self.data == 1 else (tensor, data)

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


def make_mesh(sizes: tuple[int, int], rank: int, device_type: str, backend: str, timeout: timedelta | None) -> Mesh:
    """Make the mesh on all ranks together; ``sizes`` of the (data, tensor) axes.

    Its groups are never the default group: that carries Lightning's per-batch broadcast, which would wait behind all
    collectives in flight.
    """
    data, tensor = sizes
    if tensor == 1:
        group: Any = dist.new_group(backend=backend, timeout=timeout)
        mesh = DeviceMesh.from_group(group, device_type, mesh_dim_names=(DATA_PARALLEL,))
        return Mesh(data, 1, rank, mesh, mesh)
    groups: list[Any] = []
    layout = [[d * tensor + t for t in range(tensor)] for d in range(data)]
    for members in ([list(column) for column in zip(*layout, strict=True)], layout):
        own = None
        for ranks in members:
            made = dist.new_group(ranks, backend=backend, timeout=timeout)
            own = made if rank in ranks else own
        groups.append(own)

    names = (DATA_PARALLEL, TENSOR_PARALLEL)
    ranks = torch.tensor(layout)
    mesh = DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=names)
    turned = DeviceMesh.from_group(groups[::-1], device_type, mesh=ranks.t().contiguous(), mesh_dim_names=names[::-1])
    return Mesh(data, tensor, rank, mesh, turned)


def tensor_parallel_axis(size: int, rank: int, group: str) -> ShardAxis:
    """The tensor-parallel axis: every rank holds the same share.

    Args:
        size: number of ranks of the axis.
        rank: this rank's coordinate on it.
        group: name of a process group of the axis' own, never the default one.
    """
    return ShardAxis(TENSOR_PARALLEL, size, rank, group, (1,) * size)
