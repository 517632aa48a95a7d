"""Underscore names of Lightning."""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import torch

# The launcher that DDP uses: it validates SLURM settings and sets thread counts; there is no public one.
from lightning.fabric.utilities.distributed import (
    _distributed_is_initialized,
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.fabric.utilities.rank_zero import rank_zero_only as _fabric_rank_zero_only
from lightning.pytorch.core.optimizer import _MockOptimizer
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.trainer.connectors import checkpoint_connector
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero as _rank_zero
from torch import Tensor
from typing_extensions import override

SubprocessScriptLauncher = _SubprocessScriptLauncher
# Starting process groups as Lightning's own strategies do (environment variables, device ids, TCP store).
default_backend = _get_default_process_group_backend_for_device
init_process_group = _init_dist_connection
optimizers_to_device = _optimizers_to_device


def detects_anomaly(trainer: Any) -> bool:
    """``Trainer(detect_anomaly=True)``: Lightning keeps the flag under an underscore name."""
    return bool(trainer._detect_anomaly)


def stop_signal_sent_by_lightning(trainer: Any, sent: bool) -> None:
    """Whether Lightning tells the other ranks of SIGTERM: before each batch and in the handler of the signal.

    Before each batch it broadcasts on the default process group whether rank 0 received it, swallows every exception,
    and knows rank 0 alone; a rank whose data ended earlier does not take part, so that the others wait there. In the
    handler it broadcasts from rank 0 again, wherever the signal came: another rank waits there for ever.
    """
    loop, connector = trainer.fit_loop.epoch_loop, trainer._signal_connector
    if sent:
        vars(loop).pop("_broadcast_sigterm_tensor", None)
        vars(connector).pop("_sigterm_notifier_fn", None)
        vars(connector).pop(_TOLD, None)
        return
    if hasattr(loop, "_broadcast_sigterm_tensor"):
        loop._broadcast_sigterm_tensor = lambda: None
    connector._sigterm_notifier_fn = functools.partial(_note_sigterm, trainer)


_TOLD = "_told_to_stop_by_sigterm"


def _note_sigterm(trainer: Any, number: int, _: Any) -> None:
    """As Lightning's handler, without its broadcast: processes that this one started are told too."""
    connector, launcher = trainer._signal_connector, trainer.strategy.launcher
    if launcher is not None and not told_to_stop(trainer):
        launcher.kill(number)
    setattr(connector, _TOLD, True)
    if trainer.state.fn != TrainerFn.FITTING:  # there ranks end one by one; in a fit all do, by their next exchange
        connector.received_sigterm = True


def end_after_this_batch(trainer: Any) -> None:
    """Let Lightning end training with SIGTERMException where it has counted the batch, as on one device."""
    trainer._signal_connector.received_sigterm = True


def told_to_stop(trainer: Any) -> bool:
    """Whether this process received SIGTERM."""
    return bool(trainer.received_sigterm) or hasattr(trainer._signal_connector, _TOLD)


def around_training_loop(trainer: Any, name: str, around: Callable[..., None] | None) -> None:
    """Call something in place of a method of the loop over an epoch's batches, with the method first; None: no more.

    There is no hook behind a batch (callbacks come before counters and loggers know of it, and before validation), and
    none between the making of an iterator and its first batch.
    """
    loop = trainer.fit_loop.epoch_loop
    vars(loop).pop(name, None)
    if around is not None:
        setattr(loop, name, functools.partial(around, getattr(loop, name)))


def goes_on_as_ever(trainer: Any) -> None:
    """A run that was resumed in mid-epoch has got over that: schedulers of its end are asked as in any epoch."""
    trainer.fit_loop._restarting = False


def training_loaders(trainer: Any) -> list[Any]:
    """The loaders of the training data."""
    return list(trainer.fit_loop._combined_loader.flattened)


def accumulates(trainer: Any) -> bool:
    """Whether gradients of the last batch wait for the next one."""
    return bool(trainer.fit_loop._should_accumulate())


def requeue_checkpoint(trainer: Any) -> str:
    """Under which name Lightning looks for the checkpoint of a job that SLURM starts again."""
    folder = str(trainer.default_root_dir)
    if "://" in folder:
        return trainer._checkpoint_connector.hpc_save_path(folder)
    # Lightning's own way ends with an error where there is a file such as ckpt_best.ckpt
    names = os.listdir(folder) if os.path.isdir(folder) else []
    numbers = [int(found[1]) for name in names if (found := re.fullmatch(r"hpc_ckpt_(\d+)\.ckpt", name))]
    return os.path.join(folder, f"hpc_ckpt_{max(numbers, default=0) + 1}.ckpt")


class _NotUnderSLURM:
    @staticmethod
    def detect() -> bool:
        return False


def no_requeued_checkpoint() -> contextlib.AbstractContextManager[Any]:
    """Inside, Lightning does not look for the checkpoint that a requeued job has left."""
    return mock.patch.object(checkpoint_connector, "SLURMEnvironment", _NotUnderSLURM)


def is_attached(module: Any) -> bool:
    """Whether a LightningModule has a Trainer already; one whose launcher fails has none, and says so as an error."""
    return module is not None and module._trainer is not None


def is_fit(function: Callable[..., Any]) -> bool:
    """Whether what a launcher is to start is training."""
    return getattr(function, "__name__", "") == "_fit_impl"


def validate_from_the_start(checkpoint: dict[str, Any]) -> None:
    """Let a checkpoint that was written in a validation be one of its first batch: the whole of it is run again."""
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.val_loop.batch_progress"]
    done = progress["current"]["completed"]
    for counts, base in ((progress["total"], progress["total"]["completed"] - done), (progress["current"], 0)):
        # as Lightning's loop knows a validation that was interrupted: begun, and not yet done
        counts.update({key: base + (key in ("ready", "started")) for key in counts})
    progress["is_last_batch"] = False


def when_signals_are_answered(answer: Callable[[Any], list[int]]) -> None:
    """Ask before a Trainer says how it answers signals; numbers that it gets are sent to this process afterwards."""
    original = _SignalConnector.register_signal_handlers

    def register_signal_handlers(connector: Any) -> None:
        noted = answer(connector.trainer)
        original(connector)
        for number in noted:
            os.kill(os.getpid(), number)

    setattr(_SignalConnector, "register_signal_handlers", register_signal_handlers)  # noqa: B010


def set_rank_zero_only(rank: int) -> None:
    """Lightning's two ``rank_zero_only`` decorators read the rank from an attribute that strategies set."""
    for decorator in (vars(_rank_zero)["rank_zero_only"], _fabric_rank_zero_only):
        vars(decorator)["rank"] = rank


def reduce_over_ranks(tensor: Tensor, group: Any, reduce_op: Any) -> Tensor:
    """Reduce as Lightning's strategies do (``mean``, ``sum``, ``max`` or a ReduceOp).

    Means of whole numbers are divided here: on a default group that somebody made without naming gloo
    (``init_device_mesh("cpu", ...)``) Lightning asks gloo for an average, which it has for floating point alone.
    """
    if not _distributed_is_initialized():
        return tensor
    if reduce_op not in ("mean", "avg") or torch.is_floating_point(tensor):
        return _sync_ddp_if_available(tensor, group, reduce_op=reduce_op)
    total = _sync_ddp_if_available(tensor, group, reduce_op="sum")
    return total.copy_(total / torch.distributed.get_world_size(group))


def is_no_optimizer(optimizer: Any) -> bool:
    """Whether it is what Lightning puts in the place of ``configure_optimizers`` that returns None."""
    return isinstance(optimizer, _MockOptimizer)


def after_closure(plugin: Any, module: Any, optimizer: Any) -> None:
    """What Lightning does between backward and the update: on_before_optimizer_step, then gradient clipping."""
    plugin._after_closure(module, optimizer)


def skips_backward(trainer: Any) -> bool:
    """Whether the loop runs training_step for its side effects alone (StochasticWeightAveraging's batch-norm epoch)."""
    return bool(trainer.fit_loop._skip_backward)


class _WatchedMetrics(_LoggerConnector):
    """Has its attribute ``on_read`` give the Trainer's metrics, from a function that reads them."""

    on_read: Callable[[Callable[[], Mapping[str, Any]]], Mapping[str, Any]] | None = None

    @property
    @override
    def callback_metrics(self) -> Any:
        return self._given(lambda: super(_WatchedMetrics, self).callback_metrics)

    @property
    @override
    def logged_metrics(self) -> Any:
        return self._given(lambda: super(_WatchedMetrics, self).logged_metrics)

    @property
    @override
    def progress_bar_metrics(self) -> Any:
        return self._given(lambda: super(_WatchedMetrics, self).progress_bar_metrics)

    def _given(self, read: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
        return read() if self.on_read is None else self.on_read(read)


def watched_metrics(trainer: Any) -> Any:
    """What has ``trainer.callback_metrics`` and its like, which its attribute ``on_read`` gives if there is one.

    Without it a step that reads what it has logged itself would be given the value of the step before.
    """
    connector = trainer._logger_connector
    if type(connector) is _LoggerConnector:
        connector.__class__ = _WatchedMetrics
    return connector


def is_within_training_epoch(trainer: Any) -> bool:
    """Whether batches of the current epoch are still to come (decides where a resumed run restores random state)."""
    return (
        not trainer.fit_loop.epoch_loop._is_training_done
        and not trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
    )


def logs_this_step(trainer: Any) -> bool:
    """Whether the step that runs gets a row in the log (``log_every_n_steps``); Lightning's own callbacks ask this."""
    return bool(trainer._logger_connector.should_update_logs)


def step_of_log(trainer: Any) -> int:
    """The number of that row, as ``self.log`` has it."""
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def layer_sync(strategy: Any) -> Any:
    """The layer-sync plugin that the Trainer handed to the strategy (``sync_batchnorm=True``), or None."""
    return strategy._layer_sync


def shard_over(strategy: Any, ranks: int) -> None:
    """Make all ranks Lightning's data-parallel axis; its ``"auto"`` is one rank a node; the number is known late."""
    strategy._data_parallel_size = ranks
    strategy._tensor_parallel_size = 1


def keep_states_apart(collection: Any) -> None:
    """Let no metrics of a collection of torchmetrics share a state, unless its user said which, or they do already.

    ``compute_groups`` is an argument of its constructor alone. Without it metrics that are alike on one rank's first
    rows are counted as one.
    """
    if collection._enable_compute_groups is True and not collection._groups_checked:
        collection._groups_checked = True  # each is a group of its own until somebody looks
