"""Underscore names of torch's ``GradScaler``: its two tensors, and what it found in an optimizer's gradients.

Without them the scale could not be an input of a graph, and every step would read on the host whether it is skipped.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState, _refresh_per_optimizer_state
from torch.cpu.amp.grad_scaler import GradScaler as _OnCpu
from torch.cuda.amp.grad_scaler import GradScaler as _OnCuda
from torch.distributed.tensor import DTensor

from lightning_spmd._private_api.torch_names import local_tensor

SCALERS: tuple[type, ...] = (GradScaler, _OnCuda, _OnCpu)


def scaler_tensors(scaler: Any, device: torch.device) -> dict[str, Tensor]:
    """The scale and the number of steps since it changed; made as the first call of ``scale`` does."""
    own: dict[str, Any] = vars(scaler)
    if own["_scale"] is None:
        scaler._lazy_init_scale_growth_tracker(device)
    return {"scale": own["_scale"], "growth_tracker": own["_growth_tracker"]}


def scaler_factors(scaler: Any) -> tuple[Any, ...]:
    """What of a scaler is a plain number in the graph."""
    return scaler._enabled, scaler._growth_factor, scaler._backoff_factor, scaler._growth_interval


@contextlib.contextmanager
def scaler_works_on(scaler: Any, tensors: dict[str, Tensor]) -> Iterator[None]:
    """Inside, the scaler has these tensors and knows of no optimizer; afterwards it is as it was."""
    kept = scaler._scale, scaler._growth_tracker, scaler._per_optimizer_states
    scaler._scale, scaler._growth_tracker = tensors["scale"], tensors["growth_tracker"]
    scaler._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
    try:
        yield
    finally:
        scaler._scale, scaler._growth_tracker, scaler._per_optimizer_states = kept


def takes_found_inf(optimizer: Any) -> bool:
    """Whether the optimizer's own kernels unscale gradients and skip a step: torch's ``fused=True``."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def check_gradients(scaler: Any, optimizer: Any) -> Tensor:
    """Look for infinities and NaN in gradients that an optimizer unscales itself; gives 1 where there are any."""
    (found,) = scaler._check_inf_per_device(optimizer).values()
    return found


def found_inf(scaler: Any, optimizer: Any) -> Tensor:
    """What the last look at an optimizer's gradients found: 1 for infinities or NaN, else 0.

    Raises:
        KeyError: there was no look.
    """
    (found,) = scaler._found_inf_per_device(optimizer).values()
    return found


def is_unscaled(scaler: Any, optimizer: Any) -> bool:
    """Whether ``unscale_`` was called since the last update."""
    return scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.UNSCALED


def unscale_parts(scaler: Any, optimizer: Any) -> None:
    """``scaler.unscale_(optimizer)``, or the look alone where the optimizer unscales; of what this rank holds.

    torch's own handling of DTensors looks at the first gradient's placements alone, and refuses plain tensors beside.
    """
    stand_in = SimpleNamespace(
        param_groups=[{"params": [_part(p) for p in g["params"]]} for g in optimizer.param_groups]
    )
    states = scaler._per_optimizer_states
    states[id(stand_in)] = states[id(optimizer)]  # one object: a second call raises as on one device
    try:
        if takes_found_inf(optimizer):
            scaler._check_inf_per_device(stand_in)
        else:
            scaler.unscale_(stand_in)
    finally:
        del states[id(stand_in)]


def _part(parameter: Tensor) -> Tensor:
    """This rank's part of a parameter, with its part of the gradient."""
    if not isinstance(parameter, DTensor):
        return parameter
    part = parameter._local_tensor.detach()
    part.grad = None if parameter.grad is None else local_tensor(parameter.grad)
    return part


@contextlib.contextmanager
def steps_with(optimizer: Any, scale: Tensor | None, found: Tensor) -> Iterator[None]:
    """Inside, the optimizer's kernels unscale by ``scale`` (None: nothing) and skip the step where ``found`` is 1."""
    optimizer.grad_scale, optimizer.found_inf = scale, found
    try:
        yield
    finally:
        del optimizer.grad_scale, optimizer.found_inf
