"""Distributed checkpoints: folders into which every rank writes its part.

This module is imported on first use, because ``torch.distributed.checkpoint`` would take a quarter of the package's
import time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from lightning_spmd.errors import ConfigurationError
from lightning_spmd.ir.placement import CHUNK, REPLICATE
from lightning_spmd.parallel.parallel_plan import ParallelPlan
from lightning_spmd.parallel.state import Placements, StateMesh, is_sharded
from lightning_spmd.stages.runtime.agreement.lost_ranks import is_communication_failure
from lightning_spmd.strategy.checkpoints.intact import seals_of, write_seals
from lightning_spmd.strategy.checkpoints.state_dicts import METADATA_FILE, placements_of_state, tensors_changed
from lightning_spmd.strategy.checkpoints.whole_files import (
    name_beside,
    not_written,
    put,
    reason,
    remove,
    remove_unfinished,
)

T = TypeVar("T")
_MODEL, _OPTIMIZER = "model", "optimizer_"
_MODEL_OF_MODEL_PARALLEL = "state_dict"
"""Where Lightning's ModelParallelStrategy puts what its FSDPStrategy and this package call the model."""


@dataclass(frozen=True)
class CheckpointLayout:
    """How tensors are laid out in a distributed checkpoint.

    The format stores one contiguous range of a tensor for each rank. A rank holds several ranges of a fused layer, and
    of a layer that two axes split. Such tensors are sharded anew, one after the other, with one range for each rank.

    Args:
        state: the mesh of the run; None on one device.
        flat: all ranks on one axis, where the run's mesh is another; None where state is chunks already.
        group: a process group for messages among hosts; None on one device.
    """

    state: StateMesh | None
    flat: StateMesh | None
    group: Any

    def put(self, tensor: Tensor) -> Tensor:
        """A tensor of the run in the layout of the file."""
        if self.state is None or self.flat is None or not isinstance(tensor, DTensor):
            return tensor
        return self.flat.shard(self.state.whole(tensor), (CHUNK,) if tensor.ndim else (REPLICATE,))

    def empty(self, tensor: Tensor) -> Tensor:
        """An empty tensor in the layout of the file, to read a tensor of the run into."""
        if self.flat is None or not isinstance(tensor, DTensor):
            return torch.empty_like(tensor)
        return self.flat.shard(torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device), (CHUNK,))

    def take(self, tensor: Tensor, placements: Placements | None) -> Tensor:
        """A tensor that was read, in the layout of the run."""
        if self.state is None or self.flat is None or placements is None or not isinstance(tensor, DTensor):
            return tensor
        return self.state.shard(self.flat.whole(tensor), placements)


def save_distributed(checkpoint: dict[str, Any], path: Path, names: list[list[str]], layout: CheckpointLayout) -> None:
    """Write a checkpoint of which every rank holds a part; all ranks call it.

    Args:
        checkpoint: Lightning's, with sharded tensors.
        path: the folder, the same on all ranks.
        names: for each optimizer its parameters' names by number.
        layout: how tensors are laid out in the file.
    """
    group = layout.group
    first = dist.get_rank() == 0
    rest = dict(checkpoint)
    tensors: dict[str, Any] = {_MODEL: rest.pop("state_dict")}
    for index, optimizer in enumerate(rest.pop("optimizer_states", [])):
        tensors[f"{_OPTIMIZER}{index}"] = _by_name(optimizer, names[index])
    tensors = tensors_changed(tensors, layout.put)
    folder = _on_the_first(path, group, lambda: _fresh(name_beside(path)))
    try:
        writer = _Writer(folder, single_file_per_rank=True)
        state_dict_saver.save(tensors, storage_writer=writer, process_group=group)
        _on_the_first(path, group, lambda: torch.save(rest, folder / METADATA_FILE))
        seals: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(seals, seals_of(folder, dist.get_rank()), group=group)
        _on_the_first(path, group, lambda: (write_seals(folder, seals), put(folder, path)))
    except CheckpointException as error:  # on all ranks; it is no Exception, and a page of tracebacks
        raise _not_saved(path, error) from None
    finally:
        if first:
            remove(folder)


class _Writer(FileSystemWriter):
    """Says what the system said. torch's stream wraps it, and what wraps it is all that the other ranks get."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            inner: BaseException | None = error
            while inner is not None and not isinstance(inner, OSError):
                inner = inner.__cause__ or inner.__context__
            if inner is None:
                raise
            raise OSError(inner.errno, inner.strerror or str(inner)) from error


def _on_the_first(path: Path, group: Any, action: Callable[[], T]) -> T:
    """What rank 0 does for all; all ranks get the result, or raise if it failed."""
    result: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            result[0] = action()
        except (OSError, RuntimeError) as error:
            result[1] = f"rank 0: {reason(error)}"
    dist.broadcast_object_list(result, 0, group=group)
    if result[1] is not None:
        raise not_written(path, result[1])
    return result[0]


def _fresh(folder: Path) -> Path:
    """An empty folder."""
    remove_unfinished(folder.parent)
    remove(folder)
    folder.mkdir(parents=True)
    return folder


def _not_saved(path: Path, error: CheckpointException) -> BaseException:
    failures = {rank: failure for rank, (failure, _) in sorted(error.failures.items())}
    for failure in failures.values():
        if not isinstance(failure, Exception) or is_communication_failure(failure):
            return failure  # an interrupt, or another rank's end
    return not_written(path, "; ".join(f"rank {rank}: {reason(failure)}" for rank, failure in failures.items()))


def _by_name(optimizer: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    groups = [{**g, "params": [names[n] for n in g["params"]]} for g in optimizer["param_groups"]]
    return {"state": {names[n]: values for n, values in optimizer["state"].items()}, "param_groups": groups}


def load_distributed(path: Path, module: nn.Module, plan: ParallelPlan, layout: CheckpointLayout) -> Any:
    """Read a distributed checkpoint into the layout of this run; all ranks call it.

    Args:
        path: the folder.
        module: the module whose ``state_dict`` gives the wanted names and placements.
        plan: the placement of optimizer state.
        layout: how tensors are laid out in the file.

    Returns:
        The checkpoint as Lightning knows it; optimizer states with numbers for parameters.

    Raises:
        ConfigurationError: naming entries that are missing or have another shape.
    """
    reader = FileSystemReader(path)
    metadata = reader.read_metadata()
    roots = {where[0] for where in metadata.planner_data.values()}
    model = _MODEL_OF_MODEL_PARALLEL if _MODEL_OF_MODEL_PARALLEL in roots and _MODEL not in roots else _MODEL
    wanted: dict[str, Any] = {}
    for flat, where in metadata.planner_data.items():
        entry = metadata.state_dict_metadata[flat]
        if where[0] != model:
            _put(wanted, where, _target(entry, where, plan, layout))
    current = module.state_dict(keep_vars=True)
    _check(path, current, metadata, model)
    wanted[model] = {k: layout.empty(v) if isinstance(v, Tensor) else v for k, v in current.items()}
    state_dict_loader.load(wanted, storage_reader=reader, process_group=layout.group, no_dist=layout.group is None)
    wanted[_MODEL] = wanted.pop(model)
    _take(wanted, current, plan, layout)
    checkpoint = torch.load(path / METADATA_FILE, map_location="cpu", weights_only=False)
    checkpoint["state_dict"] = wanted.pop(_MODEL)
    optimizers = [wanted[key] for key in sorted(wanted, key=lambda k: int(k.removeprefix(_OPTIMIZER)))]
    if optimizers:
        checkpoint["optimizer_states"] = [_by_number(o) for o in optimizers]
    return checkpoint


def _target(entry: Any, where: tuple[Any, ...], plan: ParallelPlan, layout: CheckpointLayout) -> Any:
    """What an entry of an optimizer's state is read into."""
    if not isinstance(entry, TensorStorageMetadata):
        return None
    value = torch.empty(entry.size, dtype=entry.properties.dtype)
    if layout.state is None or where[1] != "state":
        return value
    placements = placements_of_state(plan, layout.state, where[2], where[3], value)
    if layout.flat is not None and is_sharded(placements):
        return layout.flat.shard(value, (CHUNK,))
    return layout.state.shard(value, placements)


def _take(loaded: dict[str, Any], current: Mapping[str, Any], plan: ParallelPlan, layout: CheckpointLayout) -> None:
    """Lay out what was read as the run has it."""
    if layout.flat is None or layout.state is None:
        return
    for name, live in current.items():
        placements = layout.state.placements_of(live) if isinstance(live, DTensor) else None
        loaded[_MODEL][name] = layout.take(loaded[_MODEL][name], placements)
    for optimizer in (value for key, value in loaded.items() if key != _MODEL):
        for owner, values in optimizer.get("state", {}).items():
            for key, value in values.items():
                if isinstance(value, Tensor):
                    values[key] = layout.take(value, placements_of_state(plan, layout.state, owner, key, value))


def _put(tree: dict[str, Any], where: tuple[Any, ...], value: Any) -> None:
    """Set an entry of a nested structure of dictionaries and lists."""
    node: Any = tree
    for key, following in zip(where, (*where[1:], None), strict=True):
        empty: Any = value if following is None else [] if isinstance(following, int) else {}
        if isinstance(node, list):
            items: list[Any] = node  # pyright: ignore[reportUnknownVariableType]
            items.extend([None] * (key + 1 - len(items)))
            if items[key] is None:
                items[key] = empty
        else:
            node.setdefault(key, empty)
        node = node[key]


def _by_number(optimizer: dict[str, Any]) -> dict[str, Any]:
    numbers: dict[str, int] = {}
    groups = []
    for group in optimizer["param_groups"]:
        for name in group["params"]:
            numbers[name] = len(numbers)
        groups.append({**group, "params": [numbers[name] for name in group["params"]]})
    states = {numbers[name]: values for name, values in optimizer.get("state", {}).items()}
    return {"state": states, "param_groups": groups}


def _check(path: Path, current: Mapping[str, Any], metadata: Metadata, model: str) -> None:
    known = {
        where[1]: metadata.state_dict_metadata[flat]
        for flat, where in metadata.planner_data.items()
        if where[0] == model
    }
    missing = [name for name in current if name not in known]
    unexpected = [name for name in known if name not in current]
    if missing or unexpected:
        raise ConfigurationError(
            f"the checkpoint {path} is one of another model: missing in it are {missing[:5]}, unexpected in it are "
            f"{unexpected[:5]}"
        )
    for name, value in current.items():
        entry = known[name]
        if isinstance(value, Tensor) and isinstance(entry, TensorStorageMetadata) and entry.size != value.shape:
            raise ConfigurationError(
                f"{name} has shape {list(entry.size)} in the checkpoint {path} and {list(value.shape)} in the module"
            )
