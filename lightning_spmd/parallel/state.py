"""Tensors that live between iterations and are sharded over the mesh: parameters, optimizer state, exposed gradients.

Each is a ``DTensor``, so ``state_dict``, distributed checkpoints and a user's ``full_tensor()`` work on it; graphs take
its local part. Graphs speak of placements in this package's algebra, DTensor in its own; :class:`StateMesh` translates:

=======================  ==========================================================
graph                    DTensor
=======================  ==========================================================
``R``                    ``Replicate()``
``C(d)``, ``S(d)``       ``Shard(d)``
``S(d, outer=...)``      :class:`BlockShard`
=======================  ==========================================================
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard

from lightning_spmd import _private_api as private
from lightning_spmd.ir.first import first
from lightning_spmd.ir.layout import densely, in_layout
from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.ir.placement import REPLICATE, Blocks, Chunk, Placement, Replicate, Shard, ShardAxis
from lightning_spmd.ir.signature import GraphInput, InputRole
from lightning_spmd.parallel.axes import AXIS_KINDS
from lightning_spmd.parallel.mesh import REPLICA, SHARD, Mesh
from lightning_spmd.parallel.parallel_plan import ParallelPlan
from lightning_spmd.parallel.pieces import joined, local_piece, local_spec

Placements = tuple[Placement, ...]
_CHUNKED = {kind.name for kind in AXIS_KINDS if kind.holds_chunks}


def is_sharded(placements: Placements) -> bool:
    """Whether a rank holds less than the whole."""
    return any(not isinstance(p, Replicate) for p in placements)


class BlockShard(TorchShard):
    """The DTensor placement of ``S(d, outer=...)``: consecutive blocks of a dimension, each split over the ranks.

    torch's own strided shard speaks of equal blocks alone, and puts them together in one piece only on some meshes.

    Args:
        dim: the split dimension.
        blocks: number of equal blocks, or proportions of different ones.
        axis: the mesh axis.
    """

    def __init__(self, dim: int, blocks: Blocks, axis: ShardAxis) -> None:
        super().__init__(dim)
        self.blocks = blocks
        self.axis = axis

    def __eq__(self, other: object) -> bool:
        # torch caches what its operators return by placements, and a hit compares with this alone: two tensors of one
        # shape, one of them in plain shards, would otherwise pass on each other's placements
        if isinstance(other, BlockShard):
            return (self.dim, self.blocks) == (other.dim, other.blocks)
        return False

    def __hash__(self) -> int:
        return hash((self.dim, self.blocks))

    def __repr__(self) -> str:
        return f"BlockShard(dim={self.dim}, blocks={self.blocks})"

    def _to_replicate_tensor(self, local_tensor: Tensor, mesh: Any, mesh_dim: int, *_: Any, **__: Any) -> Tensor:
        """What torch asks of a placement for ``full_tensor()``."""
        return _joined(local_tensor, Shard(self.dim, self.blocks), self.axis, 0, mesh.get_group(mesh_dim))


private.leave_order_of_shards_alone(BlockShard)


class StateMesh:
    """The mesh in the form that state needs.

    Args:
        mesh: the mesh of the run.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.axes = mesh.axes()
        private.take_mixed_tensors()

    # ------------------------------------------------------------------ to parts
    def part(self, tensor: Tensor, placements: Placements) -> Tensor:
        """This rank's part of a whole tensor, in storage of its own, in the memory order of graphs."""
        spec = local_spec(densely(TensorSpec.of(tensor)), placements, self.axes)
        new = torch.empty_strided(spec.shape, spec.stride, dtype=tensor.dtype, device=tensor.device)
        return new.copy_(local_piece(tensor, placements, self.axes))

    def wrap(self, local: Tensor, whole: TensorSpec, placements: Placements) -> Tensor:
        """The DTensor of which ``local`` is this rank's part. Its strides are those of the whole."""
        # torch takes the offset of a view into a bucket for the address of the whole, and cannot copy or save that
        at_offset = local.storage_offset() != 0
        wrapped = DTensor.from_local(
            local.as_strided(local.shape, local.stride(), 0) if at_offset else local,
            self.mesh.state_mesh,
            self._torch_placements(placements),
            run_check=False,
            shape=torch.Size(whole.shape),
            stride=densely(whole).stride,
        )
        if at_offset:
            private.set_local_tensor(wrapped, local)
        return wrapped

    def shard(self, tensor: Tensor, placements: Placements) -> Tensor:
        """The DTensor of a whole tensor; the tensor itself if every rank keeps all of it."""
        if not is_sharded(placements):
            return tensor
        return self.wrap(self.part(tensor, placements), TensorSpec.of(tensor), placements)

    def part_like(self, other: Tensor, tensor: Tensor) -> Tensor:
        """The DTensor of a whole tensor with the placements of another DTensor."""
        return self.shard(tensor, self.placements_of(other)) if isinstance(other, DTensor) else tensor

    def _torch_placements(self, placements: Placements) -> list[Any]:
        by_name = dict(zip([axis.name for axis in self.axes], zip(placements, self.axes, strict=True), strict=True))
        found: list[Any] = []
        for name in self.mesh.state_mesh.mesh_dim_names or ():
            placement, axis = by_name.get(_axis_of(name) or "", (REPLICATE, self.axes[0]))
            if isinstance(placement, Shard) and placement.outer != 1:
                found.append(BlockShard(placement.dim, placement.outer, axis))
            elif isinstance(placement, (Chunk, Shard)):
                found.append(TorchShard(placement.dim))
            else:
                found.append(TorchReplicate())
        return found

    def placements_of(self, tensor: DTensor) -> Placements:
        """The placements of a DTensor that :meth:`wrap` made."""
        names = self.mesh.state_mesh.mesh_dim_names or ()
        by_name: dict[str, Placement] = {}
        for name, placement in zip(names, cast(tuple[Any, ...], tensor.placements), strict=True):
            axis = _axis_of(name)
            if axis is None or not isinstance(placement, TorchShard):
                continue
            if axis in _CHUNKED:
                by_name[axis] = Chunk(placement.dim)
            else:
                by_name[axis] = Shard(placement.dim, getattr(placement, "blocks", 1))
        return tuple(by_name.get(axis.name, REPLICATE) for axis in self.axes)

    @torch.no_grad()
    def take(self, live: Tensor, whole: Tensor) -> None:
        """Write this rank's part of a whole tensor into a live one, unless it has these values."""
        own, piece = private.local_tensor(live).detach(), whole.detach()
        if isinstance(live, DTensor):
            piece = local_piece(piece, self.placements_of(live), self.axes)
        if not torch.equal(own, piece):
            own.copy_(piece)

    # ------------------------------------------------------------------ back to wholes
    def whole(self, tensor: Tensor) -> Tensor:
        """The whole of a sharded tensor on every rank, laid out as it was, a collective; other tensors as they are."""
        if not isinstance(tensor, DTensor):
            return tensor
        value = private.local_tensor(tensor).detach()
        placements = self.placements_of(tensor)
        for i in reversed(range(len(self.axes))):
            placement, axis = placements[i], self.axes[i]
            if isinstance(placement, (Chunk, Shard)):
                size = tensor.shape[placement.dim]
                for p, a in zip(placements[:i], self.axes[:i], strict=True):
                    if isinstance(p, Shard) and p.dim == placement.dim:
                        size = a.shard_size(size, p.outer)
                holders = _holders(axis, placement)
                value = _joined(value, placement, holders, size, self.mesh.group(holders.name))
        return in_layout(value, TensorSpec.of(tensor))

    def gathered(self, part: DTensor) -> Tensor:
        """The same of any DTensor, which may be a result of torch's, added up if it is a sum."""
        return self.whole(part) if self.is_state(part) else part.full_tensor()

    @torch.no_grad()
    def gathered_together(self, parts: Sequence[DTensor]) -> list[Tensor]:
        """The same of several, with one collective for all of a dtype that one axis splits."""
        groups: dict[Any, list[_Split]] = {}
        found: dict[int, Tensor] = {}
        for part in parts:
            placements = self.placements_of(part) if self.is_state(part) else ()
            pairs = zip(placements, self.axes, strict=False)
            split = [_Split(part, p, _holders(axis, p)) for p, axis in pairs if isinstance(p, Chunk | Shard)]
            if len(split) == 1:
                groups.setdefault((split[0].holders.name, part.dtype, part.device), []).append(split[0])
            else:
                found[id(part)] = self.gathered(part)
        for group in groups.values():
            sent = [_sent(private.local_tensor(each.part).detach(), *each.where) for each in group]
            flat = torch.cat([each.reshape(-1) for each in sent])
            rows = [torch.empty_like(flat) for _ in range(group[0].holders.size)]
            dist.all_gather(rows, flat, group=self.mesh.group(group[0].holders.name))
            by_part = zip(*(row.split([each.numel() for each in sent]) for row in rows), strict=True)
            for each, one, pieces in zip(group, sent, by_part, strict=True):
                value = _put_together([piece.view(one.shape) for piece in pieces], *each.where)
                found[id(each.part)] = in_layout(value, TensorSpec.of(each.part))
        return [found[id(part)] for part in parts]

    def is_state(self, part: DTensor) -> bool:
        """Whether a DTensor is as this package makes them; others are results of torch's."""
        is_ours = all(type(p) in OF_STATE for p in part.placements)
        return is_ours and part.device_mesh is self.mesh.state_mesh


OF_STATE = (TorchReplicate, TorchShard, BlockShard)
"""The placements that this package makes."""


def _axis_of(dimension: str) -> str | None:
    """The axis whose placement a dimension of the state mesh carries: under hybrid sharding replicas carry none."""
    if dimension == REPLICA:
        return None
    return first(_CHUNKED, "chunked dimension") if dimension == SHARD else dimension


class _Split(NamedTuple):
    """A tensor that one axis splits.

    Args:
        part: this rank's.
        placement: on that axis.
        holders: the ranks with parts.
    """

    part: DTensor
    placement: Chunk | Shard
    holders: ShardAxis

    @property
    def where(self) -> tuple[Chunk | Shard, ShardAxis, int]:
        """How it is put together."""
        return self.placement, self.holders, self.part.shape[self.placement.dim]


def _holders(axis: ShardAxis, placement: Chunk | Shard) -> ShardAxis:
    """The ranks that hold parts, which with hybrid sharding are not all of an axis."""
    return axis.chunks if isinstance(placement, Chunk) else axis


def _joined(value: Tensor, placement: Chunk | Shard, axis: ShardAxis, size: int, group: Any) -> Tensor:
    """What the ranks of one axis hold, put together along a dimension of ``size``."""
    sent = _sent(value, placement, axis, size)
    parts = [torch.empty_like(sent) for _ in range(axis.size)]
    dist.all_gather(parts, sent, group=group)
    return _put_together(parts, placement, axis, size)


def _sent(value: Tensor, placement: Chunk | Shard, axis: ShardAxis, size: int) -> Tensor:
    """A rank's part as the others get it: all of one size."""
    if not isinstance(placement, Chunk):
        return value.contiguous()
    dim = placement.dim
    padded = value.new_zeros((*value.shape[:dim], axis.chunk_size(size), *value.shape[dim + 1 :]))
    padded.narrow(dim, 0, value.shape[dim]).copy_(value)
    return padded


def _put_together(parts: Sequence[Tensor], placement: Chunk | Shard, axis: ShardAxis, size: int) -> Tensor:
    """The value of which the ranks have sent these parts."""
    if isinstance(placement, Chunk):
        parts = [p.narrow(placement.dim, 0, axis.chunk(size, rank)[1]) for rank, p in enumerate(parts)]
    return joined(parts, placement)


# ---------------------------------------------------------------------- modules
def broadcast_from_first(tensor: Tensor) -> None:
    """Give all ranks rank 0's values. Backends send raw memory, so tensors with gaps are sent as plain copies."""
    value = tensor.detach()
    for dim, stride in enumerate(value.stride()):
        value = value.narrow(dim, 0, min(1, value.shape[dim])) if stride == 0 else value  # an expanded dimension
    plain = value.contiguous()
    dist.broadcast(plain, 0)
    if plain is not value:
        value.copy_(plain)


def in_place_of(old: nn.Parameter, value: Tensor) -> nn.Parameter:
    """A parameter that replaces ``old``, with the attributes that users set on that (``p.no_decay = True``)."""
    new = nn.Parameter(value, requires_grad=old.requires_grad)
    vars(new).update({key: tag for key, tag in vars(old).items() if key not in vars(new)})
    return new


def shard_module(
    module: nn.Module, plan: ParallelPlan, state: StateMesh, staging: StateMesh | None = None
) -> list[tuple[str, Tensor, Tensor]]:
    """Replace the parameters and buffers that the plan shards by DTensors; tied ones stay tied.

    Args:
        module: the whole model.
        plan: the placement of parameters.
        state: the mesh.
        staging: the mesh on which parameters in chunks are already; each is gathered for a moment.

    Returns:
        (name, what was there, what is there now) of each.
    """
    replaced: dict[int, Tensor] = {}
    exchanged: list[tuple[str, Tensor, Tensor]] = []
    # alive, so that no new tensor gets the id of one that was replaced
    kept = [*module.parameters(), *module.buffers()]
    for path, part in module.named_modules():
        own = (part.named_parameters, part.named_buffers)
        for key, parameter in [item for of in own for item in of(recurse=False, remove_duplicate=False)]:
            if id(parameter) not in replaced:
                name = f"{path}.{key}" if path else key
                placements = _placements_of(plan, state.axes, name, parameter)
                if not isinstance(parameter, DTensor) and not is_sharded(placements):
                    continue
                if _lies_as(parameter, placements, state):
                    continue
                new = _laid_out(parameter, placements, state, staging)
                if isinstance(parameter, nn.Parameter):
                    new = in_place_of(parameter, new)
                replaced[id(parameter)] = replaced[id(new)] = new
                exchanged.append((name, parameter, new))
            # through the module's own __setattr__: a recurrent layer keeps a list of its weights
            setattr(part, key, replaced[id(parameter)])
    del kept
    return exchanged


def _lies_as(parameter: Tensor, placements: Placements, state: StateMesh) -> bool:
    if not isinstance(parameter, DTensor) or parameter.device_mesh is not state.mesh.state_mesh:
        return False
    return state.placements_of(parameter) == placements


def _laid_out(parameter: Tensor, placements: Placements, state: StateMesh, staging: StateMesh | None) -> Tensor:
    """The values of a parameter as the plan wants them.

    It is plain, in chunks from when it was built, or on the mesh of an earlier Trainer. An equal mesh counts as ours
    whatever its process groups are: they may have ended, or broken in an exception.
    """
    if not isinstance(parameter, DTensor):
        return state.shard(parameter.detach(), placements)
    if parameter.device_mesh == state.mesh.state_mesh:
        if state.placements_of(parameter) == placements:
            return state.wrap(private.local_tensor(parameter).detach(), TensorSpec.of(parameter), placements)
        return state.shard(state.whole(parameter), placements)
    if staging is not None and parameter.device_mesh == staging.mesh.state_mesh:
        return state.shard(staging.whole(parameter), placements)
    return state.shard(parameter.full_tensor().detach(), placements)


def _placements_of(plan: ParallelPlan, axes: tuple[ShardAxis, ...], name: str, tensor: Tensor) -> Placements:
    """How a plan stores the parameter or buffer of that name."""
    role = InputRole.PARAMETER if isinstance(tensor, nn.Parameter) else InputRole.BUFFER
    spec = TensorSpec(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device)
    return tuple(plan.input_placement(axis, GraphInput(role, (name,), name, spec)) for axis in axes)


def sharded_slots(module: nn.Module) -> Iterator[tuple[dict[str, Any], str]]:
    """(dictionary, key) of every sharded parameter and buffer."""
    for tensors, key in private.tensor_slots(module).values():
        if isinstance(tensors[key], DTensor):
            yield tensors, key


def is_in_parts(module: nn.Module) -> bool:
    """Whether ranks hold parts of some parameter or buffer of a module."""
    return next(sharded_slots(module), None) is not None


@contextlib.contextmanager
def sharded_tensors_as(
    module: nn.Module, change: Callable[[Tensor], Tensor], back: Callable[[Tensor, Tensor], None] | None = None
) -> Iterator[None]:
    """Inside, ``change(tensor)`` stands for every sharded parameter and buffer of a module; tied ones stay tied.

    Args:
        module: the module.
        change: of a live tensor.
        back: called at the end with each live tensor and what stood for it then.
    """
    before: list[tuple[dict[str, Any], str, Tensor]] = []
    changed: dict[int, Tensor] = {}
    try:
        for tensors, key in sharded_slots(module):
            live = tensors[key]
            if id(live) not in changed:
                value = change(live)
                parameter = isinstance(live, nn.Parameter)
                changed[id(live)] = nn.Parameter(value, requires_grad=False) if parameter else value
            before.append((tensors, key, live))
            tensors[key] = changed[id(live)]
        yield
    finally:
        for tensors, key, live in before:
            now, tensors[key] = tensors.get(key), live
            if back is not None and isinstance(now, Tensor):
                back(live, now)
