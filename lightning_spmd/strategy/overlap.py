"""Whether the end of an iteration may run inside the next one: who could look at the weights in between.

Deferred work is done before anybody can see that it is missing: before validation, checkpoints, the end of an epoch, an
exception's handlers. Hooks that run between any two batches, and are not known to leave weights alone, run behind a
fence (``fence.py``). ``optimizer_step`` contains the step itself, which cannot run there: who overrides it switches
overlap off. So does lowering, whose first runs all ranks make together, while behind a fence a rank finishes alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LambdaCallback, WeightAveraging
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_spmd.ir.first import first
from lightning_spmd.messages import warn

CONTAINS_THE_STEP = "optimizer_step"
_MODULE_HOOKS = (
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_zero_grad",
    "on_before_backward",
    "on_before_batch_transfer",
    "transfer_batch_to_device",
    "on_after_batch_transfer",
    CONTAINS_THE_STEP,
    "lr_scheduler_step",
    "on_validation_model_zero_grad",
    "on_validation_model_eval",
)
_CALLBACK_HOOKS = ("on_train_batch_start", "on_train_batch_end", "on_before_zero_grad", "on_before_backward")
# Lightning's own callbacks read weights through the strategy (ModelCheckpoint) or not at all; these are the exceptions.
_READING_CALLBACKS = (WeightAveraging, LambdaCallback)
_TRUSTED_PACKAGES = ("lightning.pytorch.callbacks", "lightning.pytorch.tuner", "lightning_spmd")


def finish_in_time(trainer: Any, flush: Callable[[], None]) -> None:
    """Make pending work finish before any callback of an epoch's end."""
    if not any(isinstance(c, FinishPendingWork) for c in trainer.callbacks):
        trainer.callbacks.insert(0, FinishPendingWork(flush))


def hooks_between_batches(module: Any, callbacks: list[Any]) -> list[tuple[Any, str]]:
    """Hooks that run between batches and may read or write weights: whose, and which."""
    found = [(module, hook) for hook in _MODULE_HOOKS if is_overridden(hook, module)]
    for callback in callbacks:
        found += [(callback, hook) for hook in _CALLBACK_HOOKS if _may_read(callback, hook)]
    return found


def _may_read(callback: Any, hook: str) -> bool:
    if hook in vars(callback):
        return True
    owner = first((kind for kind in type(callback).__mro__ if hook in vars(kind)), f"class with {hook}")
    if owner is Callback:
        return False
    return issubclass(owner, _READING_CALLBACKS) or not owner.__module__.startswith(_TRUSTED_PACKAGES)


def explain(hooks: list[str], why: str, *, insisted: bool) -> str:
    """What to tell a user whose hooks keep iterations apart.

    Args:
        hooks: as ``Class.hook``.
        why: these cannot run behind a fence.
        insisted: the user wants overlap all the same.
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
    """The first callback of a run: brings the weights up to date before anybody's hook can look at them.

    Args:
        flush: does what is pending.
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
        """Before callbacks that save what is there. A rank that is gone cannot take part, which must not hide why."""
        try:
            self._flush()
        except RuntimeError as error:
            warn(f"the last weight updates could not be finished ({str(error).splitlines()[0]})")
