"""The strategies that a comparison sets side by side, by name."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from lightning_spmd import _private_api as private
from lightning_spmd.errors import ConfigurationError
from lightning_spmd.strategy.spmd_strategy import SPMDStrategy

NAMES = {
    "auto": "what the Trainer takes by itself",
    "ddp": "DistributedDataParallel with its defaults; ddp:MB sets bucket_cap_mb and gradient_as_bucket_view",
    "ddp_compile": "torch.compile on the module, under DDP",
    "fsdp2": "fully_shard on every element of a ModuleList and on the module, under ModelParallelStrategy",
    "spmd": "this package's strategy",
}
"""What ``side_of`` knows."""


@dataclass(frozen=True)
class Side:
    """One of the strategies to compare.

    Args:
        name: as it appears in the table.
        strategy: makes the Trainer's ``strategy`` argument, anew for each training.
        prepare: what happens to the module before ``fit``.
        finish: what happens after it.
    """

    name: str
    strategy: Callable[[], Any]
    prepare: Callable[[LightningModule], Any] = lambda module: module
    finish: Callable[[], None] = lambda: None


def side_of(name: str, spmd_options: Mapping[str, Any] | None = None) -> Side:
    """The side of that name.

    Args:
        name: one of NAMES, or ``ddp:MB``.
        spmd_options: arguments of ``SPMDStrategy`` for the name ``spmd``.

    Raises:
        ConfigurationError: the name is unknown.
    """
    if name.startswith("ddp:"):
        cap = _bucket_cap(name)
        return Side(name, lambda: DDPStrategy(bucket_cap_mb=cap, gradient_as_bucket_view=True))
    if name == "auto":
        return Side(name, lambda: "auto")
    if name == "ddp":
        return Side(name, DDPStrategy)
    if name == "ddp_compile":
        # Each round compiles a new module, and past a number of recompilations torch silently runs eagerly.
        return Side(name, DDPStrategy, compiled, torch.compiler.reset)
    if name == "fsdp2":
        return Side(name, _FullyShardedStrategy, fully_sharded)
    if name == "spmd":
        return spmd_side(name, spmd_options or {})
    raise ConfigurationError(f"--against {name!r}: {_known(name, [*NAMES, 'ddp:MB'])}")


def spmd_side(name: str, options: Mapping[str, Any]) -> Side:
    """A side of this package's strategy.

    Args:
        name: any.
        options: arguments of ``SPMDStrategy``.

    Raises:
        ConfigurationError: an option is unknown or has a wrong value.
    """
    known = list(inspect.signature(SPMDStrategy).parameters)
    for key in options:
        if key not in known:
            raise ConfigurationError(f"--variants {name!r}: SPMDStrategy has no option {key!r}; {_known(key, known)}")
    SPMDStrategy(**options)  # a wrong value is told here, not after the first sides were measured
    return Side(name, lambda: SPMDStrategy(**options))


def _known(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, 1) or [option for option in known if name and name in option]
    listed = f"known are {', '.join(known)}"
    return f"Did you mean {near[0]!r}? ({listed})" if near else listed  # a long list is cut off at its end


def _bucket_cap(name: str) -> float:
    try:
        cap = float(name.removeprefix("ddp:"))
    except ValueError:
        cap = 0.0
    if not cap > 0:
        raise ConfigurationError(f"--against {name!r}: a size of buckets is given as ddp:MB, a number above 0")
    return cap


class _FullyShardedStrategy(ModelParallelStrategy):
    """All ranks share one data-parallel axis; Lightning's default would be one rank a node."""

    def setup_environment(self) -> None:
        private.shard_over(self, self.num_nodes * self.num_processes)
        super().setup_environment()


def _containers(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost lists of modules: a transformer's blocks, not the layers within each."""
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        yield module
    else:
        for child in module.children():
            yield from _containers(child)


def compiled(module: LightningModule) -> Any:
    """``torch.compile`` with logging left out: ``self.log`` inspects signatures, which torch cannot trace."""
    for name in ("log", "log_dict"):
        setattr(module, name, torch.compiler.disable(getattr(module, name)))
    return torch.compile(module)


def fully_sharded(module: LightningModule) -> LightningModule:
    """Give ``module`` the ``configure_model`` with which a user would apply FSDP2 to it.

    Every element of its outermost ``ModuleList`` or ``Sequential`` is sharded by itself, the rest with the module,
    whose ``training_step`` gathers it.

    Raises:
        ConfigurationError: the module has a ``configure_model`` of its own, so what it shards is its own business.
    """
    if is_overridden("configure_model", module):
        raise ConfigurationError("fsdp2: the module has a configure_model of its own")

    def configure_model(self: LightningModule) -> None:
        from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

        mesh = self.device_mesh
        if mesh is None:
            raise ConfigurationError("fsdp2: there is no device mesh")
        for element in (element for container in _containers(self) for element in container.children()):
            if any(True for _ in element.parameters()):
                fully_shard(element, mesh=mesh["data_parallel"])
        fully_shard(self, mesh=mesh["data_parallel"])
        register_fsdp_forward_method(self, "training_step")

    kind = type(module)
    module.__class__ = type(kind.__name__, (kind,), {"configure_model": configure_model, "__module__": kind.__module__})
    return module
