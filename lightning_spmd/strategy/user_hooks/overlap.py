"""Decides whether the end of an iteration may run inside the next one: which code could read the weights in between.

Deferred work is completed before its absence can be seen: before validation, checkpoints, the end of an epoch, an
exception's handlers. Hooks that run between any two batches, and are not known to leave weights alone, run behind a
fence (``fence.py``). An overridden ``optimizer_step`` switches overlap off, because it contains the step itself. So
does lowering: all ranks make its first runs together, while a rank behind a fence finishes alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback, WeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_spmd import _private_api as private
from lightning_spmd.ir.first import first
from lightning_spmd.messages import place_of, warn
from lightning_spmd.strategy.ranks.places import Borders
from lightning_spmd.strategy.support.detectors import is_overridden

CONTAINS_THE_STEP = "optimizer_step"
_SCHEDULERS = "lr_scheduler_step"
_MODULE_HOOKS = (
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_batch_transfer",
    "transfer_batch_to_device",
    "on_after_batch_transfer",
    CONTAINS_THE_STEP,
    _SCHEDULERS,
    "on_validation_model_zero_grad",
    "on_validation_model_eval",
)
_CALLBACK_HOOKS = ("on_train_batch_start", "on_train_batch_end")
# Lightning's own callbacks read weights through the strategy (ModelCheckpoint) or not at all; these are the exceptions.
_READING_CALLBACKS = (WeightAveraging, LambdaCallback)
_TRUSTED_PACKAGES = ("lightning.pytorch.callbacks", "lightning.pytorch.tuner", "lightning_spmd")


def finish_in_time(trainer: Any, flush: Callable[[], None]) -> None:
    """Make pending work finish before any callback of an epoch's end."""
    if not any(isinstance(c, FinishPendingWork) for c in trainer.callbacks):
        # the others learn of an exception before this rank waits for them
        place = sum(isinstance(callback, Borders) for callback in trainer.callbacks[:1])
        trainer.callbacks.insert(place, FinishPendingWork(flush))


def hooks_between_batches(module: Any, trainer: Any) -> list[tuple[Any, str]]:
    """The hooks between batches that may read or write weights: their owner and name."""
    found = [(module, hook) for hook in _MODULE_HOOKS if is_overridden(hook, module, LightningModule)]
    if trainer.lr_scheduler_configs and (module, _SCHEDULERS) not in found:
        found.append((module, _SCHEDULERS))  # with functions of the user's in them
    for callback in trainer.callbacks:
        found += [(callback, hook) for hook in _CALLBACK_HOOKS if may_read(callback, hook)]
    foreign = [each for each in trainer.loggers if not type(each).__module__.startswith("lightning.pytorch.loggers")]
    return found + [(logger, "log_metrics") for logger in foreign]


def may_read(callback: Any, hook: str) -> bool:
    """Whether a callback's hook is the user's, or one of Lightning's that looks at weights."""
    if hook in vars(callback):
        return True
    owner = first((kind for kind in type(callback).__mro__ if hook in vars(kind)), f"class with {hook}")
    if owner is Callback:
        return False
    return issubclass(owner, _READING_CALLBACKS) or not owner.__module__.startswith(_TRUSTED_PACKAGES)


def data_that_knows(module: nn.Module, loaders: Any) -> str | None:
    """The name of training data in this process that refers to the module or to a weight.

    There is no fence around loading: it would cost some microseconds per operation.

    Args:
        module: the LightningModule.
        loaders: the training DataLoaders, nested as the user gave them.
    """
    storages = {private.storage_of(private.local_tensor(p.detach())) for p in module.parameters()}
    for loader in private.pytree.tree_leaves(loaders):
        parts: list[Any] = [loader]
        if isinstance(loader, DataLoader):
            if loader.num_workers > 0:  # its processes have copies
                continue
            parts = [loader.dataset, loader.sampler, loader.batch_sampler, loader.collate_fn]
        for part in parts:
            if _knows(part, module, storages, 4):
                return _name_of(part)
    return None


def _name_of(part: Any) -> str:
    """A function and where it is; of other objects their class."""
    code = part.func if isinstance(part, functools.partial) else part
    is_function = isinstance(code, (FunctionType, MethodType))
    return f"{code.__qualname__}{place_of(code)}" if is_function else type(code).__name__


def _knows(value: Any, module: nn.Module, storages: set[int], depth: int) -> bool:
    if value is module:
        return True
    if isinstance(value, Tensor):
        local = private.local_tensor(value.detach())
        return local.layout is torch.strided and private.storage_of(local) in storages
    if depth == 0 or isinstance(value, (str, bytes, int, float, Trainer)) or value is None:
        return False
    if isinstance(value, nn.Module):
        return any(_knows(p, module, storages, 1) for p in value.parameters())
    inside: list[Any] = []
    if isinstance(value, (list, tuple, set, frozenset)):
        inside = list(value)[:_MANY]
    elif isinstance(value, dict):
        inside = list(value.values())[:_MANY]
    elif isinstance(value, functools.partial):
        inside = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, MethodType):
        inside = [value.__self__, value.__func__]
    elif isinstance(value, FunctionType):
        inside = [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
    elif hasattr(value, "__dict__"):
        inside = list(vars(value).values())
    return any(_knows(each, module, storages, depth - 1) for each in inside)


_MANY = 64
"""Items of a container that are looked at; a dataset may hold millions."""


def explain(hooks: list[str], why: str, *, insisted: bool) -> str:
    """The message for a user whose hooks prevent overlap.

    Args:
        hooks: as ``Class.hook``.
        why: why they cannot run behind a fence.
        insisted: whether the user asked for overlap explicitly.
    """
    names = ", ".join(hooks[:3]) + (" and others" if len(hooks) > 3 else "")
    if insisted:
        return (
            f"overlap_iterations=True: {names} may see weights without the updates that are still pending, for {why}; "
            "use 'auto' or False if they look at weights"
        )
    return (
        f"overlap_iterations='auto' is off: {names} may look at weights, and {why}. If they do not, "
        "SPMDStrategy(overlap_iterations=True) makes training faster where the network is slow"
    )


class FinishPendingWork(Callback):
    """The first callback of a run. It brings the weights up to date before the hooks of others read them.

    Args:
        flush: completes the pending work.
    """

    def __init__(self, flush: Callable[[], None]) -> None:
        self._flush = flush

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Before validation, also in mid-epoch."""
        self._flush()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Before every other hook of the epoch's end."""
        self._flush()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Before the last hooks."""
        self._flush()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Complete pending work before callbacks save. A lost rank cannot take part, which must not hide the cause."""
        try:
            self._flush()
        except RuntimeError as error:
            warn(f"the last weight updates could not be finished ({str(error).splitlines()[0]})")
