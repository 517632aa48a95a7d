"""The strategy's hooks about state: what Lightning builds, saves and restores."""

from __future__ import annotations

import contextlib
import os
import pickle
import zipfile
from abc import abstractmethod
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_spmd import _private_api as private
from lightning_spmd.errors import ConfigurationError
from lightning_spmd.parallel.state import is_in_parts
from lightning_spmd.stages.runtime.agreement.control import Place
from lightning_spmd.strategy.checkpoints.folder_locks import FolderLocks
from lightning_spmd.strategy.checkpoints.intact import (
    check_is_training,
    damage_of_file,
    damage_of_folder,
    damaged,
    why_unreadable,
)
from lightning_spmd.strategy.checkpoints.state_dicts import is_distributed_checkpoint
from lightning_spmd.strategy.checkpoints.whole_files import WholeFiles
from lightning_spmd.strategy.ranks.boundary import names_lost_ranks
from lightning_spmd.strategy.ranks.processes import ProcessStrategy
from lightning_spmd.strategy.ranks.ranks import Ranks
from lightning_spmd.strategy.ranks.requeue import Requests, Requeue
from lightning_spmd.strategy.ranks.slurm import SlurmLauncher, check_own_checkpoint
from lightning_spmd.strategy.state.random_state import RandomState
from lightning_spmd.strategy.state.state_layout import StateLayout
from lightning_spmd.strategy.state.wide_state import keep_precision

_CHECKPOINT_KEY = "lightning_spmd"


class SavingStrategy(ProcessStrategy):
    """A strategy whose state may be sharded over the ranks.

    Args:
        ranks: the ranks that hold the state.
        save_distributed_checkpoint: whether each rank writes its part, into a folder.
        wide_state: whether optimizer state has a higher precision than its parameters.
        args, kwargs: those of :class:`ProcessStrategy`.
    """

    def __init__(
        self, ranks: Ranks, *args: Any, save_distributed_checkpoint: bool, wide_state: bool, **kwargs: Any
    ) -> None:
        super().__init__(ranks, *args, **kwargs)
        self._wide_state = wide_state
        self._layout = StateLayout(ranks, save_distributed=save_distributed_checkpoint)
        self._random = RandomState()
        self._folder_locks = FolderLocks()
        self.requests: Requests | None = None  # of the current run
        self._requeue: Requeue | None = None
        self._resumed: dict[str, Any] | None = None  # this package's part of the checkpoint that was read
        self._loaded: Path | None = None
        self._laid_out = False

    @abstractmethod
    def flush(self) -> None:
        """Complete the work that the last iteration deferred."""

    @abstractmethod
    def lay_out_module(self) -> None:
        """Bring the module to its device and shard it, as the first part of setup."""

    def lay_out_once(self) -> None:
        """:meth:`lay_out_module`, unless this run has done it.

        A checkpoint is loaded before setup, as on one device, where hooks of the module and callbacks (``setup``,
        ``on_fit_start``) come in this order around it. The module's layout has to be known then.
        """
        if not self._laid_out:
            self.lay_out_module()
            self._laid_out = True

    @override
    def connect(self, model: LightningModule) -> None:
        self._laid_out = False  # another run begins
        super().connect(model)

    def _lay_out_before_loading(self) -> None:
        if self._layout.plan.needs_graphs and private.is_attached(self.lightning_module):
            self.lay_out_once()

    # ------------------------------------------------------------------ in parts and whole
    @override
    @contextlib.contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        around = self._layout.initialization(empty=bool(empty_init))
        if empty_init and self._layout.plan.shards_parameters:
            with around, self.precision_plugin.tensor_init_context():
                yield
            return
        with super().tensor_init_context(empty_init), around:
            yield

    @contextlib.contextmanager
    def full_parameters(self) -> Iterator[None]:
        """A context in which the module's sharded parameters are plain whole tensors, for code that calls the module.

        All ranks enter together. Meanwhile each rank holds all parameters. At the end each takes its part of what was
        written into them, so all ranks write the same. Without sharded parameters the context does nothing.

        Example::

            with trainer.strategy.full_parameters():
                text = model.generate(prompt)
        """
        self.flush()
        with self._layout.whole(self.lightning_module):
            yield

    # ------------------------------------------------------------------ out
    @override
    @names_lost_ranks
    def lightning_module_state_dict(self) -> dict[str, Any]:
        self.flush()
        module = self.lightning_module
        if self._layout.state is None or module is None:
            return super().lightning_module_state_dict()
        if is_in_parts(module):  # else a rank that fails alone saves alone
            self._ranks.meet(
                "the state of the module, which all ranks gather for a checkpoint (trainer.save_checkpoint)", None
            )
        return self._layout.module_state(module)

    @override
    @names_lost_ranks
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        self.flush()
        return self._layout.for_checkpoint(super().optimizer_state(optimizer))

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        if self._checkpoint_io is None:
            self._checkpoint_io = WholeFiles()
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    @override
    @names_lost_ranks
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        module = self.lightning_module
        if module is not None and module.trainer.state.fn == TrainerFn.FITTING:
            entry = checkpoint[_CHECKPOINT_KEY] = self._random.entry(module.trainer)
            if self._requeue is not None:
                self._requeue.complete(module.trainer, checkpoint, entry)
        checkpoint = self._layout.of_others(checkpoint)
        if not self._layout.save_distributed or not self.is_distributed:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        if storage_options is not None:
            raise ConfigurationError(
                "save_distributed_checkpoint=True writes no file for which storage_options would be"
            )
        path = Path(self.broadcast(filepath))
        if self._ranks.control is not None:
            self._ranks.control.place = Place(f"the checkpoint {path}")
        self._layout.save(checkpoint, path, module, self.optimizers)

    # ------------------------------------------------------------------ in
    @override
    @names_lost_ranks
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self.flush()  # a deferred update is one of the weights that were before
        module = self.lightning_module
        if module is None:
            super().load_model_state_dict(checkpoint, strict)
            return
        self._lay_out_before_loading()
        try:
            with self._layout.loading(checkpoint["state_dict"], module) as parts:
                super().load_model_state_dict({**checkpoint, "state_dict": parts}, strict)
        except ConfigurationError as error:
            raise ConfigurationError(f"{self._loaded}: {error}") from None
        except RuntimeError as error:
            error.add_note(f"the checkpoint {self._loaded} may be one of another model: build the module it is of")
            raise

    @override
    @names_lost_ranks
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        self.flush()
        states = self._layout.optimizer_states(checkpoint["optimizer_states"], self.lightning_module, self.optimizers)
        super().load_optimizer_state_dict({**checkpoint, "optimizer_states": states})
        if self._wide_state:
            keep_precision(self.optimizers, states)

    @override
    @names_lost_ranks
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        path = Path(self.broadcast(checkpoint_path))
        self._check_intact(path)
        if is_distributed_checkpoint(path) and self.lightning_module is not None:
            self._lay_out_before_loading()
            checkpoint = self._layout.load(path, self.lightning_module)
        else:
            checkpoint = self._load_file(checkpoint_path, weights_only)
        self._loaded = path
        self._resumed = checkpoint.get(_CHECKPOINT_KEY)
        if isinstance(self.launcher, SlurmLauncher) and self.launcher.chooses_checkpoint:
            check_own_checkpoint(checkpoint_path, self._resumed, os.environ)
        if self.broadcast(self._random.is_of_this_run(self._resumed)):
            self._resumed = None
        self._random.resume(self._resumed)
        return checkpoint

    def _check_intact(self, path: Path) -> None:
        """Share one rank's findings with all ranks before a checkpoint is read.

        Raises:
            ConfigurationError: on every rank.
        """
        control, found = self._ranks.control, None
        if is_distributed_checkpoint(path):
            found = damage_of_folder(path, self.global_rank, self.world_size)
        elif self.global_rank == 0 and path.exists():
            found = damage_of_file(path)
        sides = [found] if control is None else control.gather(found, Place(f"the checkpoint {path}"))
        for rank, what in enumerate(sides):
            if what is not None:
                raise damaged(path, what if control is None else f"{what} (seen by rank {rank})")

    def _load_file(self, given: Any, weights_only: bool | None) -> dict[str, Any]:
        try:
            checkpoint = super().load_checkpoint(given, weights_only=weights_only)
        except (pickle.UnpicklingError, EOFError, LookupError, RuntimeError, ValueError, OSError) as error:
            path = Path(given)
            if not path.is_file() or zipfile.is_zipfile(path) and "PytorchStreamReader" not in str(error):
                raise
            raise damaged(path, why_unreadable(path)) from error
        check_is_training(Path(given), checkpoint)
        return checkpoint

    @override
    def process_dataloader(self, dataloader: object) -> object:
        # The last hook before Lightning makes the training iterator, which draws a shuffle seed as the next epoch of an
        # uninterrupted run would. In mid-epoch that run draws none, so there the state is restored after it.
        self._random.restore(self.lightning_module, within_epoch=False)
        module = self.lightning_module
        if self._requeue is not None and module is not None and module.trainer.training:
            self._requeue.data.resume(self._resumed)
            self._resumed = None
            self._requeue.data.before_iterator(module.trainer, dataloader)
        return super().process_dataloader(dataloader)

    @override
    def on_train_start(self) -> None:
        self._random.restore(self.lightning_module, within_epoch=True)
        super().on_train_start()
