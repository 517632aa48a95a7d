"""How the state of a module and its optimizers is sharded over the ranks, shown whole, and saved."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.optim import Optimizer

from lightning_spmd import _private_api as private
from lightning_spmd.errors import ConfigurationError
from lightning_spmd.ir.steps import Variant
from lightning_spmd.parallel.parallel_plan import ParallelPlan, options_in_parts
from lightning_spmd.parallel.staged_init import materialize, sharded_as_built
from lightning_spmd.parallel.state import StateMesh, shard_module, sharded_tensors_as
from lightning_spmd.strategy.checkpoints.state_dicts import (
    gathered,
    is_sharded_state,
    local_model_state,
    numbered_names,
    optimizer_state_like,
    shard_optimizer_state,
    tensors_changed,
)
from lightning_spmd.strategy.ranks.ranks import Ranks
from lightning_spmd.strategy.state.memory import check_parameters
from lightning_spmd.strategy.state.replaced_tensors import ReplacedTensors, check_can_be_in_parts, give_successors

if TYPE_CHECKING:
    from lightning_spmd.strategy.checkpoints.distributed import CheckpointLayout


class StateLayout:
    """The placement of parameters and optimizer state.

    Args:
        ranks: the ranks that hold them.
        save_distributed: whether each rank writes its part of a checkpoint, into a folder.

    Attributes:
        state: the mesh for state; None on one device, and before the module is sharded.
    """

    def __init__(self, ranks: Ranks, *, save_distributed: bool) -> None:
        self.save_distributed = save_distributed
        self.state: StateMesh | None = None
        self.ranks = ranks
        self._staging: StateMesh | None = None
        self._replaced = ReplacedTensors()

    @property
    def plan(self) -> ParallelPlan:
        """The plan for state."""
        return self.ranks.plan(Variant())

    # ------------------------------------------------------------------ to parts
    def initialization(self, *, empty: bool) -> contextlib.AbstractContextManager[Any]:
        """Around code that builds a module of which no rank shall hold all.

        Args:
            empty: parameters get no values now, for a checkpoint or :meth:`materialize` brings them.
        """
        shards = self.plan.shards_parameters
        if shards and empty:
            return torch.device("meta")
        if shards and self.ranks.mesh is not None:
            return sharded_as_built(self._staging_mesh())
        return contextlib.nullcontext()

    def _staging_mesh(self) -> StateMesh:
        """All ranks in one row: where parameters lie until their module is complete."""
        if self._staging is None:
            self._staging = StateMesh(self.ranks.flat_mesh())
        return self._staging

    def materialize(self, module: nn.Module, device: torch.device) -> None:
        """Initialise parameters that are still on the meta device."""
        if any(t.is_meta for t in (*module.parameters(), *module.buffers())):
            shards = self.ranks.mesh is not None and self.plan.shards_parameters
            materialize(module, device, self._staging_mesh() if shards else None)

    def shard(self, module: nn.Module) -> None:
        """Shard state by the plan: from now on a rank keeps only its part."""
        if self.ranks.mesh is not None:
            if self.plan.shards_parameters:
                check_can_be_in_parts(module, options_in_parts(self.plan))
            self.state = StateMesh(self.ranks.mesh)
            self._replaced.note(shard_module(module, self.plan, self.state, self._staging))
            self._staging = None

    def shard_again(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Shard the module and its optimizers again by another plan than the one of setup."""
        if self.state is None:
            return
        self._replaced.note(shard_module(module, self.plan, self.state))
        for optimizer in optimizers:
            for parameter, values in optimizer.state.items():
                optimizer.state[parameter] = tensors_changed(values, self.state.whole)
        self.shard_optimizers(module, optimizers)

    def shard_optimizers(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Check the optimizers' parameters, and lay out the state that there is already."""
        self._replaced.check_hooks(options_in_parts(self.plan))
        give_successors(optimizers)
        names = {id(p): name for name, p in module.named_parameters()}
        check_parameters(optimizers, names)
        if self.state is not None and self.plan.needs_graphs:
            for optimizer in optimizers:
                shard_optimizer_state(optimizer, names, self.plan, self.state)

    # ------------------------------------------------------------------ whole
    @contextlib.contextmanager
    def whole(self, module: nn.Module | None) -> Iterator[None]:
        """Inside, sharded parameters of the module are plain whole tensors; all ranks enter together.

        What was written into them is kept: each rank takes its part.
        """
        if self.state is None or module is None:
            yield
            return
        with sharded_tensors_as(module, self.state.whole, self.state.take):
            yield

    def mixed_placements_allowed(self, module: nn.Module) -> contextlib.AbstractContextManager[Any]:
        """Inside, operators take plain tensors and DTensors together, if the module has parameters of both kinds.

        Hooks take gradients in one list, for a norm or for clipping. Under tensor parallelism the bias of a row-wise
        layer is a plain tensor beside its weight in parts; it is equal on all ranks, which torch is told.
        """
        mixed = self.state is not None and len({isinstance(p, DTensor) for p in module.parameters()}) == 2
        return implicit_replication() if mixed else contextlib.nullcontext()

    # ------------------------------------------------------------------ out
    def module_state(self, module: nn.Module) -> dict[str, Any]:
        """A module's ``state_dict`` for a checkpoint."""
        # the very parameters: what DTensor's own operators return need not lie as this package's placements say
        state = module.state_dict(keep_vars=True)
        return self.for_checkpoint(tensors_changed(state, lambda t: t if isinstance(t, DTensor) else t.detach()))

    def for_checkpoint(self, state: dict[str, Any]) -> dict[str, Any]:
        """Sharded state: as it is for a distributed checkpoint, else whole, on rank 0 alone."""
        if self.state is None or self.save_distributed or not is_sharded_state(state):
            return state
        mesh = self.ranks.mesh
        return gathered(state, self.state, keep=mesh is None or mesh.rank == 0)

    def of_others(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """A checkpoint in which what hooks, callbacks and data modules put is whole; parts could not be read."""
        if self.state is None:
            return checkpoint
        mesh = self.ranks.mesh
        keep = mesh is None or mesh.rank == 0
        own = ("state_dict", "optimizer_states") if self.save_distributed else ()  # written in parts
        return {
            key: gathered(value, self.state, keep=keep) if key not in own and is_sharded_state(value) else value
            for key, value in checkpoint.items()
        }

    def save(
        self, checkpoint: dict[str, Any], path: Path, module: nn.Module | None, optimizers: Sequence[Optimizer]
    ) -> None:
        """Write a distributed checkpoint; all ranks together."""
        from lightning_spmd.strategy.checkpoints.distributed import save_distributed  # slow to import

        parameters = _parameter_names(module)
        names = [numbered_names(optimizer, parameters) for optimizer in optimizers]
        save_distributed(checkpoint, path, names, self._checkpoint_layout())

    def _checkpoint_layout(self) -> CheckpointLayout:
        from lightning_spmd.strategy.checkpoints.distributed import CheckpointLayout  # slow to import

        mesh, control = self.ranks.mesh, self.ranks.control
        flat = StateMesh(self.ranks.flat_mesh()) if mesh is not None and mesh.splits_layers else None
        return CheckpointLayout(self.state, flat, None if control is None else control.group)

    # ------------------------------------------------------------------ in
    def load(self, path: Path, module: nn.Module) -> dict[str, Any]:
        """Read a distributed checkpoint into the layout of this run; all ranks together."""
        from lightning_spmd.strategy.checkpoints.distributed import load_distributed  # slow to import

        return load_distributed(path, module, self.plan, self._checkpoint_layout())

    @contextlib.contextmanager
    def loading(self, loaded: Mapping[str, Any], module: nn.Module) -> Iterator[Mapping[str, Any]]:
        """Inside, the module takes a ``state_dict`` of this rank's parts, and here it is."""
        if self.state is None:
            yield loaded
            return
        parts = local_model_state(loaded, module, self.state)
        with sharded_tensors_as(module, lambda tensor: private.local_tensor(tensor).detach()):
            yield parts

    def optimizer_states(
        self, loaded: Sequence[Mapping[str, Any]], module: nn.Module | None, optimizers: Sequence[Optimizer]
    ) -> Sequence[Mapping[str, Any]]:
        """Loaded optimizer states in parts, as the plan has them.

        Raises:
            ConfigurationError: there are not as many as optimizers.
        """
        if self.state is None or not loaded:  # a hook has left them out
            return loaded
        if len(loaded) != len(optimizers):
            raise ConfigurationError(
                f"the checkpoint has the state of {len(loaded)} optimizers, this training has {len(optimizers)}"
            )
        parameters = _parameter_names(module)
        return [
            optimizer_state_like(one, numbered_names(optimizer, parameters), self.plan, self.state)
            for optimizer, one in zip(optimizers, loaded, strict=True)
        ]


def _parameter_names(module: nn.Module | None) -> dict[int, str]:
    return {} if module is None else {id(p): name for name, p in module.named_parameters()}
