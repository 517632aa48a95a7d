"""Builds a model that no rank could hold whole: every layer is sharded as soon as it is built.

While a model is built, the parameters of each module are cut into chunks when the module is registered in its parent. A
rank never holds more than its part and the layer under construction. Layers draw their initial values as on one device,
in the same order, so the values are the same for the same seed.

Later changes of a parameter (a second initialisation by ``self.apply``) work on the whole parameter, one at a time. A
write through a view of it (``weight[0].zero_()``) could not reach the chunks and is refused.

This is deferred initialisation without a second program to replay: PyTorch FSDP (arXiv:2304.11277, section 4.1) and
torchdistX record operators on fake tensors instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_module_registration_hook

from lightning_spmd import _private_api as private
from lightning_spmd.errors import ConfigurationError
from lightning_spmd.ir.placement import CHUNK
from lightning_spmd.parallel.state import StateMesh, broadcast_from_first, in_place_of

_TRANSPARENT = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


class _WholeParameters(private.TorchDispatchMode):
    """Operators on staged parameters work on whole parameters; their writes go back into the chunks."""

    def __init__(self, state: StateMesh) -> None:
        super().__init__()
        self.state = state

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves, structure = private.pytree.tree_flatten((args, kwargs))
        staged = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, DTensor)}
        if not staged or func in _TRANSPARENT:
            return func(*args, **kwargs)
        if not private.is_mutating(func) and private.returns_alias(func):
            raise ConfigurationError(
                f"{func} takes a view of a parameter that is already sharded over the devices; while a model is built "
                "under a sharding strategy, initialise parts of a parameter in the module that owns it"
            )
        whole = {i: self.state.whole(leaf) for i, leaf in staged.items()}
        values = [whole.get(i, leaf) for i, leaf in enumerate(leaves)]
        new_args, new_kwargs = private.pytree.tree_unflatten(values, structure)
        result = func(*new_args, **new_kwargs)
        if private.is_mutating(func):
            for i, leaf in staged.items():
                private.local_tensor(leaf).copy_(self.state.part(whole[i], self.state.placements_of(leaf)))
                result = leaf if result is whole[i] else result
        return result


def stage(module: nn.Module, state: StateMesh) -> None:
    """Cut the module's own parameters into chunks; rank 0's values count."""
    for key, parameter in list(module.named_parameters(recurse=False)):
        if isinstance(parameter, DTensor) or parameter.ndim == 0 or parameter.is_meta:
            continue
        value = parameter.detach()
        broadcast_from_first(value)
        placements = (CHUNK,) * len(state.axes)
        setattr(module, key, in_place_of(parameter, state.shard(value, placements)))


@contextlib.contextmanager
def sharded_as_built(state: StateMesh) -> Iterator[None]:
    """Modules that are built inside keep chunks of their parameters only.

    Args:
        state: a mesh with one axis.

    Raises:
        ConfigurationError: when a parameter that is in chunks already is written through a view.
    """
    busy = False

    def registered(parent: nn.Module, name: str, child: nn.Module | None) -> None:
        nonlocal busy
        if child is None or busy:
            return
        busy = True  # replacing a parameter registers it, and a parametrised module registers modules
        try:
            with private.disable_dispatch_modes(), torch.no_grad():
                for part in child.modules():
                    stage(part, state)
        finally:
            busy = False

    handle = register_module_module_registration_hook(registered)
    try:
        with _WholeParameters(state):
            yield
    finally:
        handle.remove()


def materialize(module: nn.Module, device: torch.device, state: StateMesh | None) -> None:
    """Initialise parameters on the meta device, layer by layer.

    Args:
        module: the whole model.
        device: the device for its tensors.
        state: a mesh with one axis on which every layer is cut into chunks at once; None: layers stay whole.

    Raises:
        ConfigurationError: naming a module that cannot initialise itself.
    """
    for path, part in module.named_modules():
        tensors = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
        if not any(t.is_meta for t in tensors):
            continue
        reset = getattr(part, "reset_parameters", None)
        if not callable(reset):
            raise ConfigurationError(
                f"module {path!r} ({type(part).__name__}) has tensors on the meta device and no reset_parameters() to "
                "initialise them: give it one, or build the model in configure_model without the meta device"
            )
        part.to_empty(device=device, recurse=False)
        reset()
        if state is not None:
            with torch.no_grad():
                stage(part, state)
