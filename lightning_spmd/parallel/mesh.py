"""The device mesh: the coordinates of each rank, and the process groups of its axes.

A mesh is an ordered tuple of named axes. :mod:`lightning_spmd.parallel.axes` lists their kinds, in the order of ranks
and in the order of graphs. Under hybrid sharding the data axis consists of neighbourhoods: each holds all chunks, and
they are replicas of each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_spmd import _private_api as private
from lightning_spmd.errors import BatchError, ConfigurationError
from lightning_spmd.ir.placement import ShardAxis
from lightning_spmd.parallel.axes import AXIS_KINDS, DATA, GRAPH_ORDER, TENSOR, ParallelOptions

SHARD = "shard"
"""The neighbours on the data axis among which state lies in chunks, under hybrid sharding."""
REPLICA = "replica"
"""The ranks of the data axis that hold the same chunks, under hybrid sharding."""


def mesh_sizes(options: ParallelOptions, world_size: int) -> dict[str, int]:
    """Sizes of all axes by name, in the order of ranks.

    Raises:
        ConfigurationError: if they do not fill ``world_size`` ranks.
    """
    wanted = {kind.name: kind.size(options) for kind in AXIS_KINDS}
    fixed = {name: size for name, size in wanted.items() if size != "auto" and name != DATA.name}
    for name, size in fixed.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1 or world_size % size:
            raise ConfigurationError(
                f"{name}_size={size!r} does not divide the {world_size} devices of this run: choose a divisor, or "
                "another number of devices or nodes"
            )
    others = math.prod(size for size in fixed.values() if isinstance(size, int))
    product = " times ".join(f"{name}_size={size}" for name, size in fixed.items() if size != 1)
    if world_size % others:
        raise ConfigurationError(
            f"{product} is {others}, which does not divide the {world_size} devices of this run: choose divisors, or "
            "another number of devices or nodes"
        )
    data = wanted[DATA.name]
    if data != "auto" and data * others != world_size:
        left = f"{DATA.name}_size={data}" + (f" times {product}" if product else "")
        raise ConfigurationError(
            f"{left} is {data * others}, but this run has {world_size} devices: set {DATA.name}_size='auto', or "
            f"{world_size // others}"
        )
    return {name: world_size // others if name == DATA.name else int(size) for name, size in wanted.items()}


def shard_size(
    wanted: int | Literal["auto", "node"], sizes: Mapping[str, int], ranks_per_node: int, experts: int = 1
) -> int:
    """Among how many neighbours on the data axis state is split.

    Args:
        wanted: as the user says.
        sizes: of the axes by name.
        ranks_per_node: number of them.
        experts: among how many neighbours experts are split; if they are, all state is.

    Raises:
        ConfigurationError: if these do not fill the data axis.
    """
    data = sizes[DATA.name]
    if data % experts:
        raise ConfigurationError(
            f"expert_parallel_size={experts} does not divide the {data} data-parallel ranks of this run: choose a "
            "divisor, or another number of devices or nodes"
        )
    if wanted == "auto":
        return experts if experts > 1 else data
    others = math.prod(sizes.values()) // data
    size = max(ranks_per_node // others, 1) if wanted == "node" else wanted
    if size < 1 or data % size:
        raise ConfigurationError(
            f"data_parallel_shard_size={wanted!r} is {size} ranks, which do not divide the {data} data-parallel ranks: "
            "choose a divisor, or 'auto' to shard over all of them"
        )
    if experts not in (1, size):
        raise ConfigurationError(
            f"data_parallel_shard_size={wanted!r} is {size} ranks and expert_parallel_size={experts}: state is split "
            "among the same ranks as experts; leave data_parallel_shard_size out"
        )
    return size


@dataclass(frozen=True)
class Mesh:
    """The mesh of a run, as one rank sees it.

    Args:
        sizes: of the axes by name, in the order of ranks. Axes of one rank are left out, but for the data axis.
        rank: this rank.
        device_mesh: torch's mesh with the same axes; its groups are communicators of their own.
        state_mesh: the same with the axes in the order of graphs, in which DTensor nests placements as they do; under
            hybrid sharding the data axis is two of them, ``replica`` and ``shard``.
        shard: number of data-parallel ranks that share state; all of them without hybrid sharding and experts.
    """

    sizes: Mapping[str, int]
    rank: int
    device_mesh: DeviceMesh
    state_mesh: DeviceMesh
    shard: int

    def size(self, name: str) -> int:
        """Number of ranks of an axis; 1 where the mesh has no such axis."""
        return self.sizes.get(name, 1)

    @property
    def coordinates(self) -> dict[str, int]:
        """This rank's coordinate on every axis, by name."""
        return coordinates(self.sizes, self.rank)

    @property
    def coordinates_of_parts(self) -> dict[str, int]:
        """As :attr:`coordinates`, and the place among the neighbours that hold chunks, if these are not all ranks."""
        within, _ = self._parts()
        return self.coordinates if within is None else {**self.coordinates, within.name: within.rank}

    @property
    def batch_size(self) -> int:
        """Number of different batches a step."""
        return batch_coordinates(self.sizes, self.rank)[0]

    @property
    def batch_rank(self) -> int:
        """Which of these batches this rank has."""
        return self._batch_of(self.rank)

    @property
    def shares_batches(self) -> bool:
        """Whether several ranks have the same batch."""
        return self.batch_size < math.prod(self.sizes.values())

    @property
    def splits_layers(self) -> bool:
        """Whether a rank's part of a parameter may be several pieces of it."""
        return any(kind.splits_layers for kind in AXIS_KINDS if kind.name in self.sizes)

    @property
    def splits_sequences(self) -> bool:
        """Whether a rank works on a part of each sequence."""
        return any(kind.batch_dim == 1 for kind in AXIS_KINDS if self.size(kind.name) > 1)

    def batches_of_ranks(self) -> list[int]:
        """Which batch each rank has, by rank."""
        return [self._batch_of(rank) for rank in range(math.prod(self.sizes.values()))]

    def _batch_of(self, rank: int) -> int:
        return batch_coordinates(self.sizes, rank)[1]

    def batch_group(self) -> Any:
        """The process group of this rank and ranks with the other batches of a step."""
        (axis,) = batch_axes(self.sizes)
        return self.group(axis)

    def group(self, name: str) -> Any:
        """The process group of an axis, or of a part of the data axis."""
        mesh = self.state_mesh if name in (SHARD, REPLICA) else self.device_mesh
        return mesh.get_group(name)

    def groups(self) -> dict[str, Any]:
        """This rank's process groups, by the name of their axis."""
        meshes = (self.device_mesh, self.state_mesh)
        return {name: mesh.get_group(name) for mesh in meshes for name in mesh.mesh_dim_names or ()}

    def axes(self, split: Sequence[int] = ()) -> tuple[ShardAxis, ...]:
        """The axes as graphs use them; an axis of one rank is left out if there are others.

        Args:
            split: rows of the global batch by data rank; even if there is no batch.
        """
        own = self.coordinates
        found: list[ShardAxis] = []
        for kind in GRAPH_ORDER:
            size = self.size(kind.name)
            if kind.name not in self.sizes or (size == 1 and len(self.sizes) > 1):
                continue
            rows = tuple(split) if kind.batch_dim == 0 and split else (1,) * size
            parts = self._parts() if kind.holds_chunks else (None, None)
            found.append(ShardAxis(kind.name, size, own[kind.name], self.group(kind.name).group_name, rows, *parts))
        return tuple(found)

    def _parts(self) -> tuple[ShardAxis | None, ShardAxis | None]:
        """The neighbours among which chunks lie and the ranks that hold the same ones, if that is not all ranks."""
        data = self.sizes[DATA.name]
        if self.shard == data:
            return None, None
        replica, place = divmod(self.coordinates[DATA.name], self.shard)
        replicas = data // self.shard
        within = ShardAxis(SHARD, self.shard, place, self.group(SHARD).group_name, (1,) * self.shard)
        return within, ShardAxis(REPLICA, replicas, replica, self.group(REPLICA).group_name, (1,) * replicas)

    def check_same_batch(self, digests: Sequence[str]) -> None:
        """Compare the batches of ranks that must have the same one, given as digests by rank.

        Raises:
            BatchError: naming two ranks that differ.
        """
        for first, rank in self._unlike(digests):
            raise BatchError(
                f"ranks {first} and {rank} {self._why_alike()} but hold different batches: give your sampler "
                "**trainer.strategy.distributed_sampler_kwargs, and seed what is random in the data set alike"
            )

    def _why_alike(self) -> str:
        return "share layers" if self.size(TENSOR.name) > 1 else "work on parts of the same sequences"

    def _first_of_batches(self) -> list[int]:
        """The first rank of each batch."""
        firsts: dict[int, int] = {}
        for rank in range(math.prod(self.sizes.values())):
            firsts.setdefault(self._batch_of(rank), rank)
        return [firsts[batch] for batch in range(self.batch_size)]

    def _unlike(self, values: Sequence[object]) -> Iterator[tuple[int, int]]:
        """Pairs of ranks that should have the same batch and hold different values."""
        firsts = self._first_of_batches()
        for rank, value in enumerate(values):
            first = firsts[self._batch_of(rank)]
            if value != values[first]:
                yield first, rank

    def split(self, rows: Sequence[int]) -> tuple[int, ...]:
        """Rows of each batch of a step from those on each rank.

        Raises:
            BatchError: if ranks that should have the same batch hold different numbers of rows.
        """
        for first, rank in self._unlike(rows):
            raise BatchError(
                f"rank {rank} has {rows[rank]} rows and rank {first} has {rows[first]}, but both {self._why_alike()} "
                "and need the same batch: give your sampler **trainer.strategy.distributed_sampler_kwargs"
            )
        return tuple(rows[first] for first in self._first_of_batches())


def coordinates(sizes: Mapping[str, int], rank: int) -> dict[str, int]:
    """Coordinates of a rank on axes of these sizes, of which the last varies fastest."""
    found: dict[str, int] = {}
    for name in reversed(list(sizes)):
        rank, found[name] = divmod(rank, sizes[name])
    return {name: found[name] for name in sizes}


def batch_axes(sizes: Mapping[str, int]) -> list[str]:
    """Those over which batches differ."""
    return [kind.name for kind in AXIS_KINDS if kind.name in sizes and kind.batch_dim == 0]


def batch_coordinates(sizes: Mapping[str, int], rank: int) -> tuple[int, int]:
    """Number of different batches a step on axes of these sizes, and which of them a rank has."""
    own, count, index = coordinates(sizes, rank), 1, 0
    for name in batch_axes(sizes):
        count, index = count * sizes[name], index * sizes[name] + own[name]
    return count, index


def make_mesh(
    sizes: Mapping[str, int],
    rank: int,
    device_type: str,
    backend: str,
    shard: int | None = None,
) -> Mesh:
    """Create the mesh; all ranks together.

    Its groups are never the default group, which carries Lightning's per-batch broadcast: that would wait behind all
    collectives in flight.

    Args:
        sizes: of the axes by name, in the order of ranks.
        rank: this rank.
        device_type: of the tensors on the mesh.
        backend: of the process groups.
        shard: number of neighbours on the data axis that share state; None: all.
    """
    sizes = {name: size for name, size in sizes.items() if size > 1 or name == DATA.name}
    shard = sizes[DATA.name] if shard is None else shard
    hybrid = shard != sizes[DATA.name]
    grid = _Grid(sizes, shard)
    names = list(sizes)
    in_graphs = [kind.name for kind in GRAPH_ORDER if kind.name in sizes]
    split_data = {DATA.name: [REPLICA, SHARD]} if hybrid else {}
    state_names = [part for name in in_graphs for part in split_data.get(name, [name])]

    groups: dict[str, Any] = {}
    for name in dict.fromkeys([*names, *state_names]):
        for ranks in grid.arranged([name]).t().tolist():
            made = dist.new_group(ranks, backend=backend)
            groups[name] = made if rank in ranks else groups.get(name)

    def device_mesh(names: Sequence[str]) -> DeviceMesh:
        if len(names) == 1:
            return known_mesh(DeviceMesh.from_group(groups[names[0]], device_type, mesh_dim_names=tuple(names)))
        ranks = grid.arranged(names).squeeze(-1).contiguous()
        own = [groups[name] for name in names]
        return known_mesh(DeviceMesh.from_group(own, device_type, mesh=ranks, mesh_dim_names=tuple(names)))

    outside = device_mesh(names)
    return Mesh(sizes, rank, outside, outside if names == state_names else device_mesh(state_names), shard)


class _Grid:
    """All ranks of a mesh as an array; the data axis is two of its dimensions, replicas and neighbours in one."""

    def __init__(self, sizes: Mapping[str, int], shard: int) -> None:
        shape: list[int] = []
        self._dims: dict[str, tuple[int, ...]] = {}
        for name, size in sizes.items():
            at = len(shape)
            if name == DATA.name:
                shape += [size // shard, shard]
                self._dims.update({name: (at, at + 1), REPLICA: (at,), SHARD: (at + 1,)})
            else:
                shape.append(size)
                self._dims[name] = (at,)
        self._ranks = torch.arange(math.prod(shape)).reshape(shape)

    def arranged(self, names: Sequence[str]) -> torch.Tensor:
        """The ranks with these axes, and whatever they leave out behind them."""
        named = [d for name in names for d in self._dims[name]]
        sizes = [math.prod(self._ranks.shape[d] for d in self._dims[name]) for name in names]
        rest = [d for d in range(self._ranks.ndim) if d not in named]
        return self._ranks.permute(*named, *rest).reshape(*sizes, -1)


_KNOWN: dict[DeviceMesh, DeviceMesh] = {}


def known_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The one object for all meshes equal to this one, with its process groups.

    torch's cache of DTensor operators gives a result any equal mesh that it ever saw. With two meshes a tensor could be
    on groups that have ended, or on other groups than on the next rank. With one, tensors left by a Trainer whose
    groups broke can still be gathered and trained.
    """
    known = _KNOWN.setdefault(mesh, mesh)
    private.give_groups(known, mesh)
    return known


def tensor_parallel_axis(size: int, rank: int, group: str) -> ShardAxis:
    """The tensor-parallel axis: every rank holds the same share.

    Args:
        size: number of ranks of the axis.
        rank: this rank's coordinate on it.
        group: name of a process group of the axis' own, never the default one.
    """
    return ShardAxis(TENSOR.name, size, rank, group, (1,) * size)
