"""What Lightning saves and restores through a strategy: weights, optimizer state, random state."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.trainer.states import TrainerFn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_spmd import _private_api as private
from lightning_spmd.errors import ConfigurationError
from lightning_spmd.ir.steps import Variant
from lightning_spmd.parallel.parallel_plan import ParallelPlan
from lightning_spmd.parallel.state import StateMesh, sharded_tensors_as
from lightning_spmd.stages.runtime.random_streams import RandomStreams
from lightning_spmd.strategy.checkpoints import (
    gathered,
    is_distributed_checkpoint,
    is_sharded_state,
    local_model_state,
    numbered_names,
    optimizer_state_like,
    tensors_changed,
)
from lightning_spmd.strategy.random_state import pack_random_state, restore_random_state
from lightning_spmd.strategy.ranks import RankedStrategy

if TYPE_CHECKING:
    from lightning_spmd.strategy.distributed_checkpoints import Shelf

_CHECKPOINT_KEY = "lightning_spmd"


class SavingStrategy(RankedStrategy):
    """A strategy whose state may lie in parts on the ranks; ``checkpoints`` says how it is written.

    Args:
        save_distributed_checkpoint: whether every rank writes its part, into a folder.
        args, kwargs: those of :class:`RankedStrategy`.
    """

    def __init__(self, *args: Any, save_distributed_checkpoint: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.save_distributed_checkpoint = save_distributed_checkpoint
        self._state: StateMesh | None = None
        self._flat: StateMesh | None = None
        self._streams: RandomStreams | None = None
        self._resumed: dict[str, Any] | None = None

    @abstractmethod
    def flush(self) -> None:
        """Finish what the last iteration left for the next one."""

    @abstractmethod
    def _plan(self, variant: Variant) -> ParallelPlan:
        """The parallel plan of a variant's graph."""

    # ------------------------------------------------------------------ out
    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        self.flush()
        module = self.lightning_module
        if self._state is None or module is None:
            return super().lightning_module_state_dict()
        # the very parameters: what DTensor's own operators return need not lie as this package's placements say
        state = module.state_dict(keep_vars=True)
        return self._for_checkpoint(tensors_changed(state, lambda t: t if isinstance(t, DTensor) else t.detach()))

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        self.flush()
        return self._for_checkpoint(super().optimizer_state(optimizer))

    def _for_checkpoint(self, state: dict[str, Any]) -> dict[str, Any]:
        """Sharded state: as it is for a distributed checkpoint, else whole, on rank 0 alone."""
        if self._state is None or self.save_distributed_checkpoint or not is_sharded_state(state):
            return state
        return gathered(state, self._state, keep=self.is_global_zero)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        module = self.lightning_module
        if module is not None and module.trainer.state.fn == TrainerFn.FITTING:
            within = private.is_within_training_epoch(module.trainer)
            checkpoint[_CHECKPOINT_KEY] = {"random_state": pack_random_state(self._streams), "within_epoch": within}
        if not self.save_distributed_checkpoint or self._control is None:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        if storage_options is not None:
            raise ConfigurationError(
                "save_distributed_checkpoint=True writes no file for which storage_options would be"
            )
        from lightning_spmd.strategy.distributed_checkpoints import save_distributed  # slow to import

        parameters = {id(p): name for name, p in self._named_parameters()}
        names = [numbered_names(optimizer, parameters) for optimizer in self.optimizers]
        save_distributed(checkpoint, Path(self.broadcast(filepath)), names, self._shelf())

    def _shelf(self) -> Shelf:
        from lightning_spmd.strategy.distributed_checkpoints import Shelf  # slow to import

        mesh = self._mesh
        if self._flat is None and mesh is not None and mesh.splits_layers:
            self._flat = StateMesh(self._flat_mesh())
        return Shelf(self._state, self._flat, None if self._control is None else self._control.group)

    @override
    def _end_leases(self) -> None:
        super()._end_leases()
        self._flat = None

    def _named_parameters(self) -> Iterator[tuple[str, Any]]:
        return iter(()) if self.lightning_module is None else self.lightning_module.named_parameters()

    # ------------------------------------------------------------------ in
    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return self._plan(Variant()).needs_graphs  # then no rank needs to hold the whole module

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        module = self.lightning_module
        if self._state is None or module is None:
            super().load_model_state_dict(checkpoint, strict)
            return
        parts = local_model_state(checkpoint["state_dict"], module, self._state)
        with sharded_tensors_as(module, lambda tensor: private.local_tensor(tensor).detach()):
            super().load_model_state_dict({**checkpoint, "state_dict": parts}, strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self._state is not None:
            parameters = {id(p): name for name, p in self._named_parameters()}
            plan, mesh = self._plan(Variant()), self._state
            states = [
                optimizer_state_like(loaded, numbered_names(optimizer, parameters), plan, mesh)
                for optimizer, loaded in zip(self.optimizers, checkpoint["optimizer_states"], strict=True)
            ]
            checkpoint = {**checkpoint, "optimizer_states": states}
        super().load_optimizer_state_dict(checkpoint)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        path = Path(self.broadcast(checkpoint_path))
        if is_distributed_checkpoint(path) and self.lightning_module is not None:
            from lightning_spmd.strategy.distributed_checkpoints import load_distributed  # slow to import

            checkpoint = load_distributed(path, self.lightning_module, self._plan(Variant()), self._shelf())
        else:
            checkpoint = super().load_checkpoint(checkpoint_path, weights_only=weights_only)
        self._resumed = checkpoint.get(_CHECKPOINT_KEY)
        return checkpoint

    @override
    def process_dataloader(self, dataloader: object) -> object:
        # The last hook before Lightning makes the training iterator, which draws a shuffle seed as the next epoch of an
        # uninterrupted run would. In mid-epoch that run draws none, so there the state is restored after it.
        self._restore_random_state(within_epoch=False)
        return super().process_dataloader(dataloader)

    @override
    def on_train_start(self) -> None:
        self._restore_random_state(within_epoch=True)

    def _restore_random_state(self, *, within_epoch: bool) -> None:
        module = self.lightning_module
        if self._resumed is None or module is None or not module.trainer.training:
            return
        if self._resumed["within_epoch"] == within_epoch:
            restore_random_state(self._resumed["random_state"], self._streams)
            self._resumed = None
