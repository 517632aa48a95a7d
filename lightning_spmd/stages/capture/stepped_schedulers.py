"""``scheduler.step()`` in ``training_step``: a recorded call, made again after each run of the graph.

Learning rates are inputs of the graph, so a scheduler that moves after the last step of a batch needs nothing else.
What it would change is not there before: the rate may be logged, printed and kept, with the value that it has then. A
step of its optimizer, or any other look at the rate, is an error that names the line.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_spmd import _private_api as private
from lightning_spmd.errors import CaptureError
from lightning_spmd.ir.signature import OutputRole
from lightning_spmd.ir.steps import CallRef
from lightning_spmd.messages import the_step
from lightning_spmd.stages.capture.later_value import LaterValue
from lightning_spmd.stages.capture.log_recorder import LogRecorder
from lightning_spmd.stages.capture.user_code import user_location

SCHEDULER_STEP = "lr_scheduler_step"
"""The recorded call of a scheduler's step: its number among the Trainer's, then the arguments."""


_GROUP, _LAST = "lr of group ", "last lr "


def rates_of(scheduler: Any) -> dict[str, Any]:
    """The learning rates of a scheduler's optimizer and those that it tells, by name."""
    groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", ())
    told = getattr(scheduler, "_last_lr", ())
    return {f"{_GROUP}{i}": group["lr"] for i, group in enumerate(groups)} | {
        f"{_LAST}{i}": rate for i, rate in enumerate(told if isinstance(told, list) else ())
    }


class SteppedSchedulers:
    """The schedulers of a Trainer during one capture.

    Args:
        trainer: the Trainer.
        logs: keeps recorded calls.
    """

    def __init__(self, trainer: Any, logs: LogRecorder) -> None:
        self._schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        self._logs = logs
        self._stepped: dict[int, str] = {}
        """by ``id`` of the optimizer, where its scheduler stepped"""
        self._groups: list[tuple[dict[str, Any], Any]] = []

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Inside, steps of schedulers are recorded and not made."""
        with contextlib.ExitStack() as stack:
            for index, scheduler in enumerate(self._schedulers):
                stack.enter_context(private.attributes_kept(scheduler))
                scheduler.__dict__["step"] = _Step(self, index, scheduler)
            yield

    def step(self, index: int, scheduler: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record one step; what it will change may not be read any more."""
        call = self._logs.record("", SCHEDULER_STEP, OutputRole.STEP_OUTPUT, (index, *args), kwargs)
        optimizer: Any = getattr(scheduler, "optimizer", None)
        self._stepped[id(optimizer)] = user_location() or ""
        later = _LaterRate(None, "")
        for name, value in list(vars(scheduler).items()):
            if type(value) in (int, float):
                vars(scheduler)[name] = later
        rates = {name: self._later(call, name, rate) for name, rate in rates_of(scheduler).items()}
        if hasattr(scheduler, "_last_lr"):
            vars(scheduler)["_last_lr"] = [rate for name, rate in rates.items() if name.startswith(_LAST)]
        for number, group in enumerate(getattr(optimizer, "param_groups", ())):
            self._groups.append((group, group["lr"]))
            group["lr"] = rates[f"{_GROUP}{number}"]

    def _later(self, call: int, name: str, rate: Any) -> _LaterRate:
        """A rate after the step; a tensor is written into, and may not be looked at."""
        if isinstance(rate, Tensor):
            return _LaterRate(None, "")
        return _LaterRate(CallRef(call, name), "", self._logs.made_of, self._logs.texts.mark)

    def put_back(self) -> None:
        """The groups have the rates of this batch again."""
        while self._groups:
            group, rate = self._groups.pop()
            group["lr"] = rate

    def check(self, optimizer: Optimizer) -> None:
        """Raise if the optimizer steps after its scheduler did.

        Raises:
            CaptureError: naming the line.
        """
        if id(optimizer) in self._stepped:
            raise CaptureError(
                f"{type(optimizer).__name__} steps after its scheduler in the same batch, with a learning rate that is "
                "known only then; call scheduler.step() after the last optimizer.step()",
                self._stepped[id(optimizer)],
            )


class _Step:
    """``step`` of one scheduler."""

    def __init__(self, schedulers: SteppedSchedulers, index: int, scheduler: Any) -> None:
        self._schedulers, self._index, self._scheduler = schedulers, index, scheduler

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._schedulers.step(self._index, self._scheduler, args, kwargs)


class _LaterRate(LaterValue):
    """What a scheduler changes: it is there after the run."""

    def misuse(self) -> CaptureError:
        """The error for any use."""
        return CaptureError(
            f"{the_step()} reads what scheduler.step() changes (the learning rate, a counter) after that call, and the "
            "scheduler moves when the graph has run; log it, or read it before",
            user_location(),
        )
