"""Makes the queued ``self.log`` and metric calls, with the values of the run that just ended.

This happens inside ``Strategy.training_step`` (``validation_step``, ...), where Lightning believes the module's to be
running, so epoch resets, forked names (``loss_step``/``loss_epoch``), suffixes of dataloaders, reductions and the
inference of batch sizes are Lightning's own.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torchmetrics import Metric

from lightning_spmd.errors import BatchError
from lightning_spmd.ir.steps import CallRef, LeafRef, OutputRef, RecordedCall
from lightning_spmd.ir.tree import map_leaves
from lightning_spmd.stages.capture.batch.batch import Batch
from lightning_spmd.stages.capture.batch.own_batch import LOG_ARGUMENTS
from lightning_spmd.stages.capture.follow.queue import LoggedAtOnce, named_value


def resolve(tree: Any, outputs: Sequence[Any], leaves: Sequence[Any], results: Sequence[Any] = ()) -> Any:
    """``tree`` with references replaced by graph outputs, leaves of the batch and results of earlier calls."""

    def leaf(_: str, value: Any) -> Any:
        if isinstance(value, LeafRef):
            return leaves[value.position]
        if isinstance(value, CallRef):
            result = results[value.position]
            return result if value.key is None else named_value(result, value.key)
        return outputs[value.position] if isinstance(value, OutputRef) else value

    return map_leaves(leaf, tree)


def replay(
    module: nn.Module,
    calls: Sequence[RecordedCall],
    outputs: Sequence[Any],
    leaves: Sequence[Any],
    rows: int,
    *,
    is_global: bool,
    log: Callable[[Any, tuple[Any, ...], dict[str, Any]], None] | None = None,
) -> list[Any]:
    """Make the calls in their order.

    Args:
        module: the LightningModule.
        calls: what the step method called.
        outputs: the graph's outputs of this run; logged ones are global values, the same on all ranks.
        leaves: of this rank's batch.
        rows: rows of the global batch.
        is_global: there are several ranks: ``log`` takes the values for the global ones that they are, the batch size
            that weighs epoch means is the global one, and a metric's batch value is synced.
        log: makes calls of ``log`` of several ranks in another way.

    Returns:
        what each call returned.
    """
    results: list[Any] = []
    log = log or functools.partial(log_global, rows=rows)
    for call in calls:
        try:
            target: Any = module.get_submodule(call.target) if isinstance(call.target, str) else call.target
            args = resolve(call.args, outputs, leaves, results)
            kwargs = resolve(call.kwargs, outputs, leaves, results)
            if is_global and call.method == "log":
                results.append(log(target, args, kwargs))
            elif is_global and call.method == "log_dict":
                said = {**dict(zip(_LOG_DICT_ARGUMENTS, args, strict=False)), **kwargs}
                for name, value in said.pop("dictionary").items():
                    log(target, (name, value), said)
                results.append(None)
            elif is_global and call.method == "forward":
                results.append(_forward_with_sync(target, args, kwargs))
            else:
                results.append(getattr(target, call.method)(*args, **kwargs))
        except Exception as error:  # the step's own ``try`` is over
            error.add_note(f"raised by {_in_words(call)} in the step, a call that is made when the graph has run")
            raise
    return results


def _in_words(call: RecordedCall) -> str:
    owner = call.target if isinstance(call.target, str) else type(call.target).__name__
    told = repr(call.args[0]) if call.method == "log" and call.args else "..."
    return f"{owner or 'self'}.{call.method}({told})"


_LOG_DICT_ARGUMENTS = tuple(inspect.signature(LightningModule.log_dict).parameters)[1:]


def log_global(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], rows: int | None) -> None:
    """Log values that are the same on all ranks: "synced" as Lightning sees it, by a reduction that does nothing.

    Without ``sync_dist`` Lightning would recommend it, at every epoch's end.
    """
    said = {**dict(zip(LOG_ARGUMENTS, args, strict=False)), **kwargs}
    is_metric = isinstance(said["value"], Metric)
    said["sync_dist"] = not is_metric and isinstance(said.get("reduce_fx", "mean"), str)
    if said.get("batch_size") is None and rows is not None:
        said["batch_size"] = rows
    attributes = vars(module.trainer.strategy)
    attributes["reduce"] = _already_global  # the same function each time: Lightning compares it
    try:
        type(module).log(module, **said)
    finally:
        del attributes["reduce"]


def log_of_rank(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], rows: int | None, batches: int) -> None:
    """Log under a key of graphs in a step that runs eagerly: this rank's own value or, with ``sync_dist``, the ranks'.

    Args:
        module: that logs.
        args: of ``log``.
        kwargs: likewise.
        rows: of this rank's batch, if it has a number of rows.
        batches: number of ranks with batches of their own.
    """
    said = {**dict(zip(LOG_ARGUMENTS, args, strict=False)), **kwargs}
    operation = said.get("reduce_fx", "mean")
    weight: Any = said.get("batch_size") or rows
    total = None if weight is None else weight * batches
    if said.get("sync_dist") and not isinstance(said["value"], Metric) and isinstance(operation, str):
        reduce = module.trainer.strategy.reduce
        value = torch.as_tensor(said["value"], device=module.device).detach().clone()
        if operation == "mean" and weight is not None:  # ranks may have different numbers of rows
            total = int(reduce(torch.tensor(weight, device=module.device), reduce_op="sum"))
            value = value * weight / total
        said["value"] = reduce(value, reduce_op="sum" if operation == "mean" and weight is not None else operation)
    log_global(module, (), {**said, "batch_size": total}, None)


class StepsInGraphs:
    """Which step methods log from graphs, now or later: Lightning keeps a run's keys for good."""

    def __init__(self) -> None:
        self._methods: set[str] = set()

    def add(self, method: str) -> None:
        """Graphs run in place of this method."""
        self._methods.add(method)

    def run_eagerly(
        self,
        module: LightningModule | None,
        method: str,
        step: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        batches: int | None,
        at_once: LoggedAtOnce | None = None,
    ) -> Any:
        """Run a step as Lightning does; under the keys of its graphs if it had some.

        Lightning refuses a key whose reduction changes, so what the step logs goes on under the one that does nothing:
        this rank's own value or, with ``sync_dist``, the ranks' reduction of this step. The values of graphs weigh as
        many rows as the global batch has, so must these.

        Args:
            module: whose step it is.
            method: its name.
            step: what runs it.
            args: its arguments.
            kwargs: likewise.
            batches: number of different batches a step; None on one device, where keys are Lightning's own.
            at_once: what it has logged, if it has run as a graph's before; these keys are graphs', too.
        """
        if at_once is not None:
            at_once.begin_again()
            self._methods |= {method} if at_once else set()
        if module is None or ((batches is None or method not in self._methods) and not at_once):
            return step(*args, **kwargs)
        try:
            rows = Batch(args[0]).rows()
        except BatchError:
            rows = None

        def log(owner: LightningModule, *args: Any, **kwargs: Any) -> None:
            if at_once is not None and at_once.is_repeated(owner, args[0] if args else kwargs["name"]):
                return
            if batches is None:
                type(owner).log(owner, *args, **kwargs)
            else:
                log_of_rank(owner, args, kwargs, rows, batches)

        owners = [m for m in module.modules() if isinstance(m, LightningModule)]
        for owner in owners:
            owner.__dict__["log"] = functools.partial(log, owner)
        try:
            return step(*args, **kwargs)
        finally:
            for owner in owners:
                del owner.__dict__["log"]
            if at_once is not None:
                at_once.end()


def _already_global(value: Any, *_: Any, **__: Any) -> Any:
    return value


def _forward_with_sync(metric: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A metric's value on the global batch: torchmetrics syncs the batch state if told so."""
    parts = list(metric.modules())
    before = [getattr(part, "dist_sync_on_step", None) for part in parts]
    try:
        for part, value in zip(parts, before, strict=True):
            if value is not None:
                part.dist_sync_on_step = True
        return metric(*args, **kwargs)
    finally:
        for part, value in zip(parts, before, strict=True):
            if value is not None:
                part.dist_sync_on_step = value
