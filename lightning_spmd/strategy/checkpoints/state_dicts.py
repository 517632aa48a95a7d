"""Converts state to checkpoints and back, whichever part of it a rank holds.

A *single file* holds whole tensors under plain names and integer parameter ids, as any Trainer writes it. Every plan on
any number of devices reads it, and so do processes without this package. A *distributed* checkpoint is a folder in
which each rank writes its part (``torch.distributed.checkpoint``; ``meta.pt`` holds everything that is not a tensor).
Its layout is that of ``FSDPStrategy``, with optimizer state by parameter name. Both are read into the layout of the run
that reads them.

Both get their name when they are complete. If a process dies while writing, the previous checkpoint stays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_spmd import _private_api as private
from lightning_spmd.errors import ConfigurationError
from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.ir.signature import GraphInput, InputRole
from lightning_spmd.ir.tree import leaves, map_leaves
from lightning_spmd.parallel.parallel_plan import ParallelPlan
from lightning_spmd.parallel.state import Placements, StateMesh

METADATA_FILE = "meta.pt"
"""What makes a folder a distributed checkpoint for Lightning."""


def is_distributed_checkpoint(path: Path) -> bool:
    """Whether ``path`` is a folder of shards."""
    return path.is_dir() and (path / METADATA_FILE).is_file()


def is_sharded_state(value: Any) -> bool:
    """Whether a nested state contains a DTensor."""
    return any(isinstance(leaf, DTensor) for _, leaf in leaves(value))


def tensors_changed(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """A nested state with ``change`` applied to its tensors, in the order of its keys."""
    return map_leaves(lambda _, leaf: change(leaf) if isinstance(leaf, Tensor) else leaf, value)


# ---------------------------------------------------------------------- whole
def gathered(value: Any, state: StateMesh, *, keep: bool) -> Any:
    """A nested state with whole tensors in host memory, gathered one after the other by a collective.

    Args:
        value: the same structure on all ranks.
        state: the mesh.
        keep: whether this rank wants it; the others hold one tensor at a time, and get them without values
            (``device="meta"``): hooks that leave out entries of a checkpoint do so on all ranks.
    """

    def whole(tensor: Tensor) -> Tensor:
        if isinstance(tensor, DTensor) and any(p.is_partial() for p in tensor.placements):  # the norm of another
            found = tensor.full_tensor()
        else:
            found = state.whole(tensor)
        return found.detach().cpu() if keep else torch.empty_like(found, device="meta")

    return tensors_changed(value, whole)


def local_model_state(loaded: Mapping[str, Any], module: nn.Module, state: StateMesh) -> dict[str, Any]:
    """This rank's parts of a loaded ``state_dict``, whole or in parts itself, as the module's own lie.

    Raises:
        ConfigurationError: naming the entries of another shape.
    """
    current = module.state_dict(keep_vars=True)
    found: dict[str, Any] = {k: private.local_tensor(v) if isinstance(v, Tensor) else v for k, v in loaded.items()}
    for name, tensor in current.items():
        value = loaded.get(name)
        if isinstance(tensor, DTensor) and isinstance(value, Tensor) and not isinstance(value, DTensor):
            if value.shape != tensor.shape:
                raise ConfigurationError(
                    f"the checkpoint's {name} has shape {list(value.shape)}, the module's {list(tensor.shape)}: the "
                    "checkpoint is one of another model"
                )
            found[name] = state.part(value, state.placements_of(tensor))
    return found


def optimizer_state_like(loaded: Mapping[str, Any], names: list[str], plan: ParallelPlan, state: StateMesh) -> Any:
    """A loaded optimizer ``state_dict`` in parts, as the plan has it.

    Args:
        loaded: as ``Optimizer.state_dict`` gives it; parameters by number.
        names: of the parameters, by number.
        plan: the plan.
        state: the mesh.
    """
    parts: dict[Any, Any] = {}
    for number, values in loaded["state"].items():
        parts[number] = {
            key: state.shard(value, placements_of_state(plan, state, names[number], key, value))
            if isinstance(value, Tensor) and not isinstance(value, DTensor)
            else value
            for key, value in values.items()
        }
    return {**loaded, "state": parts}


def shard_optimizer_state(optimizer: Optimizer, names: Mapping[int, str], plan: ParallelPlan, state: StateMesh) -> None:
    """Lay out what an optimizer created before the first step (Adagrad does) as the plan has it."""
    for parameter, values in optimizer.state.items():
        for key, value in values.items():
            if isinstance(value, Tensor) and not isinstance(value, DTensor):
                placements = placements_of_state(plan, state, names[id(parameter)], key, value)
                values[key] = state.shard(value, placements)


def placements_of_state(plan: ParallelPlan, state: StateMesh, owner: str, key: str, value: Tensor) -> Placements:
    """How a plan stores an entry of a parameter's optimizer state."""
    spec = TensorSpec(tuple(value.shape), tuple(value.stride()), value.dtype, value.device)
    entry = GraphInput(InputRole.OPTIMIZER_STATE, (owner, key), f"{owner}/{key}", spec)
    return tuple(plan.input_placement(axis, entry) for axis in state.axes)


def numbered_names(optimizer: Optimizer, names: Mapping[int, str]) -> list[str]:
    """Names of an optimizer's parameters in the order of the numbers in its ``state_dict``."""
    return [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
