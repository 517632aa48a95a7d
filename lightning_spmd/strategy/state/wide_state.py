"""Float32 optimizer state beside bfloat16 weights: converted between checkpoints and graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch.plugins import HalfPrecision
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_spmd import _private_api as private
from lightning_spmd.errors import ConfigurationError
from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.parallel.state import StateMesh
from lightning_spmd.stages.capture.optimizer.bf16_updates import MASTER


def check_precision(kind: str, plugin: Any) -> None:
    """Check that there are bfloat16 weights to update.

    Raises:
        ConfigurationError: another precision.
    """
    if kind != "plain" and not (isinstance(plugin, HalfPrecision) and plugin.precision == "bf16-true"):
        raise ConfigurationError(
            f"bf16_updates={kind!r} is about weights in bfloat16, Trainer(precision='bf16-true'); this Trainer has "
            f"precision={plugin.precision!r}, so leave it out"
        )


def keep_precision(optimizers: Sequence[Optimizer], states: Sequence[Mapping[str, Any]]) -> None:
    """Restore the saved precision of state, which ``load_state_dict`` casts to its parameter's.

    Args:
        optimizers: optimizers that have loaded a state.
        states: the loaded states.
    """
    for optimizer, loaded in zip(optimizers, states, strict=True):
        numbers = [n for group in loaded["param_groups"] for n in group["params"]]
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            for key, value in loaded["state"].get(number, {}).items():
                if isinstance(value, Tensor) and value.is_floating_point() and value.shape == parameter.shape:
                    optimizer.state[parameter][key] = value.detach().to(parameter.device)


def widen_state(optimizer: Optimizer, kind: str, mesh: StateMesh | None) -> bool:
    """Convert state to what float32 updates expect, whichever run it comes from.

    Args:
        optimizer: the live optimizer.
        kind: how weights are updated.
        mesh: of the run; None on one device.

    Returns:
        whether there is state without the masters that belong to it.
    """
    missing = False
    for group in optimizer.param_groups if kind != "plain" else ():
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if parameter.dtype is not torch.bfloat16 or not state:
                continue
            missing |= kind == "master" and MASTER not in state
            if kind == "stochastic":
                state.pop(MASTER, None)
            for key, value in state.items():
                if isinstance(value, Tensor) and value.dtype is torch.bfloat16 and value.shape == parameter.shape:
                    state[key] = _widened(value, mesh)
    return missing


def _widened(value: Tensor, mesh: StateMesh | None) -> Tensor:
    if mesh is None or not isinstance(value, DTensor):
        return value.float()
    return mesh.wrap(private.local_tensor(value).float(), TensorSpec.of(value), mesh.placements_of(value))
