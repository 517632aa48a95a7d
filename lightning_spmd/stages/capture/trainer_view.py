"""The Trainer as training_step sees it while it is captured, and the schedulers' learning rates."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from lightning_spmd import _private_api as private
from lightning_spmd.errors import CaptureError
from lightning_spmd.messages import batch_hook, the_step
from lightning_spmd.stages.capture.holders import Entry
from lightning_spmd.stages.capture.host_scalar import Number
from lightning_spmd.stages.capture.user_code import user_location

TOTAL_BATCHES = "trainer.fit_loop.epoch_loop.total_batch_idx"
_RESULTS = frozenset({"callback_metrics", "logged_metrics", "progress_bar_metrics"})


class TrainerView:
    """Counters become graph inputs, everything else is noted as read.

    Args:
        trainer: the real Trainer.
        host_value: makes a number a graph input: ``(name, value) -> SymInt``.
        see: notes an attribute of the Trainer; its value is what is read.
        has_logged: whether the step called ``self.log`` already.
        loggers: gives what the step sees as ``trainer.logger`` or ``trainer.loggers``.
    """

    def __init__(
        self,
        trainer: Any,
        host_value: Callable[[str, Number], Any],
        see: Callable[[str], Entry],
        has_logged: Callable[[], bool],
        loggers: Callable[[str], Any],
    ) -> None:
        own = {"_real": trainer, "_host_value": host_value, "_see": see, "_logged": has_logged, "_loggers": loggers}
        for name, value in own.items():
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        real = object.__getattribute__(self, "_real")
        if name in ("logger", "loggers"):
            return object.__getattribute__(self, "_loggers")(name)
        if name in ("global_step", "current_epoch"):
            return object.__getattribute__(self, "_host_value")(f"trainer.{name}", getattr(real, name))
        if name in _RESULTS and object.__getattribute__(self, "_logged")():
            raise CaptureError(
                f"{the_step()} reads trainer.{name} after self.log: what was logged in this step is there only after "
                "the graph ran; read it first, or keep the value itself",
                user_location(),
            )
        getattr(real, name)  # raises what it raises
        return object.__getattribute__(self, "_see")(name).value

    def __setattr__(self, name: str, value: Any) -> None:
        raise CaptureError(f"{the_step()} assigns trainer.{name}; do it in a hook such as {batch_hook('end')}")

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride] - isinstance(trainer, Trainer)
        return type(object.__getattribute__(self, "_real"))


@contextlib.contextmanager
def trainer_seen_as(module: nn.Module, view: Any) -> Iterator[None]:
    """Let every LightningModule below ``module`` see ``view`` as its Trainer."""
    holders = [m for m in module.modules() if m.__dict__.get("_trainer") is not None]
    saved = [m.__dict__["_trainer"] for m in holders]
    for holder in holders:
        holder.__dict__["_trainer"] = view
    try:
        yield
    finally:
        for holder, trainer in zip(holders, saved, strict=True):
            holder.__dict__["_trainer"] = trainer


def learning_rate_name(scheduler: int, group: int) -> str:
    """Name of the host value behind ``lr_schedulers()[scheduler].get_last_lr()[group]``."""
    return f"lr_schedulers.{scheduler}.last_lr.{group}"


@contextlib.contextmanager
def learning_rates_followed(trainer: Any, host_value: Callable[[str, Number], Any]) -> Iterator[None]:
    """``get_last_lr()`` of the Trainer's schedulers gives graph inputs; training steps like to log it.

    So does the counter of batches over all epochs, which warm-ups and annealing like to read.
    """
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    with contextlib.ExitStack() as stack:
        loop = getattr(getattr(trainer, "fit_loop", None), "epoch_loop", None)
        if loop is not None:
            stack.enter_context(_batches_followed(loop, host_value))
        for index, scheduler in enumerate(schedulers):

            def lift(group: int, value: Any, index: int = index) -> Any:
                return host_value(learning_rate_name(index, group), value) if type(value) is float else value

            stack.enter_context(private.last_learning_rates_replaced(scheduler, lift))
        yield


@contextlib.contextmanager
def _batches_followed(loop: Any, host_value: Callable[[str, Number], Any]) -> Iterator[None]:
    kind = type(loop)
    before: Any = kind.total_batch_idx

    def counted(asked: Any) -> Any:
        number = before.fget(asked)
        return host_value(TOTAL_BATCHES, number) if asked is loop else number

    kind.total_batch_idx = property(counted)
    try:
        yield
    finally:
        kind.total_batch_idx = before
