"""A callback that logs step time, exposed communication, MFU and the number of graphs."""

from __future__ import annotations

import math
import resource
import statistics
import sys
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_spmd import _private_api as private
from lightning_spmd.cost.peaks import known_peak, products_of
from lightning_spmd.errors import ConfigurationError
from lightning_spmd.messages import tell
from lightning_spmd.stages.runtime.trial_runs.profile import DeviceClock, HostClock
from lightning_spmd.stages.runtime.waiting import Waits
from lightning_spmd.strategy.graphs.run_context import Ran
from lightning_spmd.strategy.spmd_strategy import SPMDStrategy

_MOST = 1000
"""Steps that are kept for one row of the log."""


class StepStatistics(Callback):
    """Logs how fast training is, every ``log_every_n_steps`` steps, with the Trainer's loggers.

    Each value is the median of the steps since the last row. A step lasts from the end of one update to the end of the
    next: loading data, ``accumulate_grad_batches`` batches, hooks. Steps in which a graph was built, the first step of
    an epoch and validation do not count::

        spmd/step_time_ms                 on rank 0
        spmd/samples_per_second           on all ranks together
        spmd/exposed_communication_ms     how long rank 0 waited for collectives in a step; several ranks only
        spmd/mfu                          matrix products of the model (without recomputation) / peak of all devices
        spmd/captures                     graphs built since fit began
        spmd/graphs                       graphs that are kept
        spmd/peak_memory_mib              allocated on the GPU, or the process's resident set on a CPU

    In eager training, and with another strategy, only step time and memory are logged. With CUDA graphs the wait for
    communication is unknown. Measuring changes neither numbers nor the order of work and never synchronizes with a GPU.

    Args:
        peak_flops: peak floating-point operations a second of one device, for MFU. None: the maker's number for GPUs in
            ``lightning_spmd/cost/hardware.py``; for a CPU what a large product reaches, measured once on all ranks at
            the same time. For other devices MFU is not logged.

    Raises:
        ConfigurationError: there is no logger, or ``peak_flops`` is not a positive number.

    Example::

        trainer = Trainer(strategy="spmd", devices=2, callbacks=[lightning_spmd.StepStatistics()])
    """

    def __init__(self, peak_flops: float | None = None) -> None:
        given = peak_flops is None or (
            isinstance(peak_flops, (int, float)) and not isinstance(peak_flops, bool) and 0 < peak_flops < math.inf
        )
        if not given:
            raise ConfigurationError(
                f"StepStatistics(peak_flops={peak_flops!r}): give operations a second of one device, such as 989e12, "
                "or None"
            )
        self.peak_flops = peak_flops
        self._run: _Run | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        if not trainer.loggers:
            raise ConfigurationError(
                "StepStatistics has no logger with Trainer(logger=False): give the Trainer a logger, such as "
                "lightning.pytorch.loggers.CSVLogger, or leave the callback out"
            )
        if isinstance(trainer.strategy, SPMDStrategy):
            trainer.strategy.accounts.waits.wanted = True  # before any graph is built

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._run = _Run(trainer, self.peak_flops)

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._run is not None:
            self._run.interrupt()

    on_validation_start = on_train_epoch_start

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._run is not None:
            self._run.batch_begins()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._run is not None:
            self._run.batch_ended()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._run = None
        if isinstance(trainer.strategy, SPMDStrategy):
            trainer.strategy.accounts.waits.wanted = False


@dataclass
class _Step:
    """One step, or the part of it that has been.

    Args:
        begin: mark of its begin.
        end: mark of its end.
        parts: how its micro-batches ran: how, and with which open sizes.
        waits: of each.
        is_whole: nothing came in between.
    """

    begin: Any
    end: Any = None
    parts: list[tuple[Ran, tuple[int, ...]]] = field(default_factory=list[tuple[Ran, tuple[int, ...]]])
    waits: list[Waits | None] = field(default_factory=list["Waits | None"])
    is_whole: bool = True

    @property
    def rows(self) -> int | None:
        """Rows of the global batches, if they are known."""
        rows = [ran.rows for ran, _ in self.parts]
        return None if None in rows else sum(count for count in rows if count is not None)


class _Run:
    """The statistics of one fit.

    Args:
        trainer: whose fit it is.
        peak_flops: as the user gave it.
    """

    def __init__(self, trainer: Any, peak_flops: float | None) -> None:
        self._trainer = trainer
        self._peak_flops = peak_flops
        self._strategy: SPMDStrategy | None = trainer.strategy if isinstance(trainer.strategy, SPMDStrategy) else None
        self._device: torch.device = trainer.strategy.root_device
        self._clock: Any = DeviceClock() if self._device.type == "cuda" else HostClock()
        self._steps: deque[_Step] = deque(maxlen=_MOST)
        self._current: _Step | None = None
        self._updates = trainer.global_step
        self._built = self._count_of_builds()
        self._flops: dict[tuple[int, tuple[int, ...]], tuple[Any, float | None]] = {}
        self._told = False

    def interrupt(self) -> None:
        """Something else comes between two batches."""
        if self._current is not None and self._current.parts:
            self._current.is_whole = False
        else:
            self._current = None

    def batch_begins(self) -> None:
        """A micro-batch begins."""
        if self._current is None:
            self._current = _Step(self._clock.mark())
        if self._strategy is not None and self._device.type == "cuda":  # two events a wait: only where they are read
            self._strategy.accounts.waits.is_on = private.logs_this_step(self._trainer)

    def batch_ended(self) -> None:
        """It has ended, and perhaps a step with it."""
        step, strategy = self._current, self._strategy
        if step is None:
            return
        if strategy is not None:
            step.parts.append((strategy.accounts.ran, strategy.accounts.ran.sizes))
            step.waits.append(strategy.accounts.waits.take())
        if self._trainer.global_step == self._updates:
            return
        self._updates, step.end = self._trainer.global_step, self._clock.mark()
        if (built := self._count_of_builds()) != self._built:
            self._built, step.is_whole = built, False
        if step.is_whole:
            self._steps.append(step)
        self._current = _Step(step.end)
        if private.logs_this_step(self._trainer):
            self._log()
            self._current = _Step(self._clock.mark())

    # ------------------------------------------------------------------ pieces
    def _count_of_builds(self) -> int:
        """What makes a step no usual one: a graph that was built."""
        return 0 if self._strategy is None else self._strategy.captures

    def _log(self) -> None:
        values = self._values()
        step = private.step_of_log(self._trainer)
        for logger in self._trainer.loggers:
            logger.log_metrics({f"spmd{logger.group_separator}{key}": v for key, v in values.items()}, step=step)

    def _values(self) -> dict[str, float]:
        done: list[_Step] = []
        while self._steps and self._clock.has_passed(self._steps[0].end):
            done.append(self._steps.popleft())
        values: dict[str, float] = {"peak_memory_mib": _peak_memory(self._device) / 2**20}
        if self._strategy is not None:
            values |= {"captures": self._strategy.captures, "graphs": self._strategy.accounts.ran.graphs}
        timed = [(s, seconds) for s in done if (seconds := self._clock.seconds(s.begin, s.end)) > 0]
        if not timed:
            return values
        values["step_time_ms"] = 1e3 * statistics.median_low(seconds for _, seconds in timed)
        in_graphs = [(s, t) for s, t in timed if s.parts and all(ran.executable is not None for ran, _ in s.parts)]
        if not in_graphs:
            self._tell_eager()
            return values
        rates = {
            "samples_per_second": [s.rows / t for s, t in in_graphs if s.rows is not None],
            "exposed_communication_ms": [1e3 * e for s, _ in in_graphs if (e := self._exposed(s)) is not None],
            "mfu": [ideal / t for s, t in in_graphs if (ideal := self._ideal(s)) is not None],
        }
        # of an even number of steps the high rate belongs to the low time
        return values | {key: statistics.median_high(found) for key, found in rates.items() if found}

    def _exposed(self, step: _Step) -> float | None:
        """Seconds that a step waited; None where that is not known of all of it."""
        pairs = [pair for waits in step.waits if waits is not None for pair in waits]
        if None in step.waits or not all(self._clock.has_passed(end) for _, end in pairs):
            return None
        return sum(self._clock.seconds(begin, end) for begin, end in pairs)

    def _ideal(self, step: _Step) -> float | None:
        """Seconds of a step's products at the peak of all devices; None where that is not known."""
        found = [self._ideal_of(ran, sizes) for ran, sizes in step.parts]
        return None if None in found or not sum(f or 0.0 for f in found) else sum(f or 0.0 for f in found)

    def _ideal_of(self, ran: Ran, sizes: tuple[int, ...]) -> float | None:
        """The same of a micro-batch."""
        executable = ran.executable
        if executable is None:
            return None
        key = id(executable), sizes
        if key not in self._flops:
            if executable.sizes is None:
                products = products_of(executable.captured)
            elif executable.products is not None:
                products = executable.products(sizes)
            else:
                return None
            # a graph of this rank's own batch is computed by this rank alone
            ranks = 1 if executable.captured.own_batch is not None else self._trainer.world_size
            seconds: float | None = 0.0
            for dtype, flops in products.items():
                peak = known_peak(self._device, dtype) if self._peak_flops is None else self._peak_flops
                seconds = None if peak is None or seconds is None else seconds + flops / (peak * ranks)
            self._flops[key] = executable, seconds  # which keeps it alive, and so its id its own
        return self._flops[key][1]

    def _tell_eager(self) -> None:
        if not self._told:
            self._told = True
            why = "training runs eagerly" if self._strategy is not None else "it knows graphs of strategy='spmd' alone"
            tell(f"StepStatistics logs the time of a step and memory, and nothing else: {why}")


def _peak_memory(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
