"""Makes the recorded ``self.log`` and metric calls again, with the values of the run that just ended.

This happens inside ``Strategy.training_step``, where Lightning believes training_step to be running, so epoch resets,
forked names (``loss_step``/``loss_epoch``), reductions and batch-size inference are Lightning's own.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from lightning.pytorch import LightningModule
from torch import nn
from torchmetrics import Metric

from lightning_spmd.ir.steps import CallRef, OutputRef, RecordedCall
from lightning_spmd.ir.tree import map_leaves


def resolve(tree: Any, outputs: Sequence[Any], results: Sequence[Any] = ()) -> Any:
    """``tree`` with references replaced by graph outputs and by results of earlier calls."""

    def leaf(_: str, value: Any) -> Any:
        if isinstance(value, CallRef):
            return results[value.position]
        return outputs[value.position] if isinstance(value, OutputRef) else value

    return map_leaves(leaf, tree)


def replay(
    module: nn.Module, calls: Sequence[RecordedCall], outputs: Sequence[Any], world_size: int, rows: int
) -> list[Any]:
    """Make the calls in their order.

    Args:
        module: the LightningModule.
        calls: what training_step called at capture.
        outputs: the graph's outputs of this run; logged ones are global values, the same on all ranks.
        world_size: number of ranks. With more than one, ``log`` takes the values for the global ones that they are, the
            batch size that weighs epoch means is the global one, and a metric's batch value is synced.
        rows: rows of the global batch.

    Returns:
        what each call returned.
    """
    results: list[Any] = []
    for call in calls:
        target = module.get_submodule(call.target) if call.target else module
        args = resolve(call.args, outputs, results)
        kwargs = resolve(call.kwargs, outputs, results)
        if world_size > 1 and call.method == "log":
            results.append(_log_global(target, args, kwargs, rows))
        elif world_size > 1 and call.method == "forward":
            results.append(_forward_with_sync(target, args, kwargs))
        else:
            results.append(getattr(target, call.method)(*args, **kwargs))
    return results


_LOG_ARGUMENTS = tuple(inspect.signature(LightningModule.log).parameters)[1:]


def _log_global(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], rows: int) -> None:
    """Log values that are the same on all ranks: "synced" as Lightning sees it, by a reduction that does nothing.

    Without ``sync_dist`` Lightning would recommend it, at every epoch's end.
    """
    said = {**dict(zip(_LOG_ARGUMENTS, args, strict=False)), **kwargs}
    is_metric = isinstance(said["value"], Metric)
    said["sync_dist"] = not is_metric and isinstance(said.get("reduce_fx", "mean"), str)
    if said.get("batch_size") is None:
        said["batch_size"] = rows
    attributes = vars(module.trainer.strategy)
    attributes["reduce"] = _already_global
    try:
        module.log(**said)
    finally:
        del attributes["reduce"]


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
