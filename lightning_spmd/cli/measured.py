"""Predicted and measured numbers side by side, on this machine: ``lightning-spmd plan --measure``.

The recipe trains for some steps on as many processes as the plan has ranks, as in ``compare``. Between rounds and at
the end the same processes measure, all at the same time, what their CPU and the link between them reach; the plan uses
that.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Mapping
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from lightning_spmd.cost.hardware import Machines
from lightning_spmd.errors import ConfigurationError
from lightning_spmd.planning.calibration import Calibration, calibrate, mean_of
from lightning_spmd.planning.layout import Layout
from lightning_spmd.planning.outlook import Outlook
from lightning_spmd.planning.units import bytes_text, seconds_text
from lightning_spmd.report.measure import Amount, SideResult, measure
from lightning_spmd.report.peak_memory import PeakMemory
from lightning_spmd.report.sides import spmd_side

LOOKS = 4
"""Steps at which memory is measured, before those that are timed."""
AMOUNT = Amount(steps=20, warmup=10, rounds=2)
_OF_LAUNCHER = ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclasses.dataclass(frozen=True)
class Measured:
    """The measurements of a training that ran here.

    Args:
        side: steps and memory of the process, as ``compare`` measures them.
        memory: bytes that a step needs above those between steps; None if the system does not tell.
        processor: seconds of a core that a batch takes; None if a process has several cores.
        on_cpu: the share of its time in which the process had a core while it was calibrated.
    """

    side: SideResult
    memory: int | None
    processor: float | None
    on_cpu: float


class StepMemory(L.Callback):
    """Measures the memory that early steps need above that between steps, and the core time of later ones.

    On a shared machine the wall-clock time of a step depends on other processes; its core time does not.
    """

    def __init__(self) -> None:
        self.bytes: list[int] = []
        self.processor: list[float] = []
        self._memory: PeakMemory | None = None
        self._batches = 0
        self._begun: float | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin a round."""
        self._batches, self._begun = 0, None

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Count nothing between epochs."""
        self._begun = None

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Read the memory in use and the core's clock."""
        now, self._batches = time.process_time(), self._batches + 1
        if self._begun is not None and self._batches > AMOUNT.warmup + 1:
            self.processor.append(now - self._begun)
        self._begun = now
        self._memory = PeakMemory() if AMOUNT.warmup - LOOKS <= batch_idx + 1 < AMOUNT.warmup else None
        if self._memory is not None:
            self._memory.begin(torch.device("cpu"))

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Read the peak."""
        found = None if self._memory is None else self._memory.peak()
        if found is not None:
            self.bytes.append(found)


def check_here(machines: Machines) -> None:
    """Check that the plan is for this machine.

    Raises:
        ConfigurationError: it is not.
    """
    if machines.device.kind != "cpu":
        raise ConfigurationError(
            f"--device_type {machines.device.name}: --calibrate and --measure look at this CPU: --device_type cpu"
        )
    if machines.nodes != 1:
        raise ConfigurationError(
            f"--num_nodes {machines.nodes}: --calibrate and --measure are of one machine: leave it out"
        )


def calibrated(machines: Machines, found: Calibration | None = None) -> Machines:
    """The machines with the measured speed of this one's CPU."""
    found = calibrate() if found is None else found
    return dataclasses.replace(machines, device=found.device(machines.device), within=found.link(machines.within))


def measured(recipe: Any, layout: Layout, machines: Machines) -> tuple[Machines, Measured]:
    """Train here; all ranks but the first end in here.

    Returns:
        the calibrated machines, and the measurements.

    Raises:
        ConfigurationError: it cannot be trained here.
    """
    flags = {"accelerator": "cpu", "devices": layout.devices, "num_nodes": 1}

    def build(
        strategy: Any, given: dict[str, Any], callbacks: list[L.Callback]
    ) -> tuple[L.Trainer, L.LightningModule, Any]:
        return recipe.build(strategy, {**given, **flags}, [*callbacks, memory])

    recipe.in_memory = True
    before = {name: os.environ.get(name) for name in _OF_LAUNCHER}
    memory = StepMemory()
    between: list[Calibration] = []

    def on_turn(_name: str, number: int) -> None:
        if number:  # by then all ranks are there
            between.append(calibrate())

    (result,) = measure([spmd_side("spmd", layout.options)], build, AMOUNT, on_turn)
    calibration = mean_of([*between, calibrate()])
    found = calibrated(machines, calibration)
    if dist.is_available() and dist.is_initialized():
        rank = dist.get_rank()
        dist.destroy_process_group()
        if rank != 0:
            raise SystemExit(0)
    for name, value in before.items():  # what the launcher left would tell the capture that it is one rank of several
        if value is None:
            os.environ.pop(name, None)
    recipe.in_memory = False
    if result.reason is not None:
        raise ConfigurationError(f"--measure: it cannot be trained here: {result.reason}")
    alone = torch.get_num_threads() == 1 and memory.processor
    processor = statistics.median(memory.processor) if alone else None
    looked = int(statistics.median(memory.bytes)) if memory.bytes else None
    return found, Measured(result, looked, processor, calibration.on_cpu)


def measured_facts(outlook: Outlook, found: Measured) -> dict[str, Any]:
    """Predicted and measured numbers."""
    side, always = found.side, sum(outlook.highest.contents.always.values())
    low, high = side.spread
    batch = outlook.step_seconds / outlook.micro_batches
    computing = (outlook.step_seconds - outlook.exposed) / outlook.micro_batches
    return {
        "steps": len(side.seconds),
        "step": {"predicted": batch, "measured": side.median, "tenth": low, "ninetieth": high},
        "processor": {"predicted": computing * found.on_cpu, "measured": found.processor},
        "memory": {"predicted": outlook.peak_bytes - always, "measured": found.memory},
        "process": {"predicted": outlook.peak_bytes, "measured": side.peak_memory},
    }


def print_measured(facts: Mapping[str, Any], console: Console) -> None:
    """Print the plan beside the measurements."""
    table = Table(
        title=f"Predicted and measured here, {facts['steps']} steps", title_justify="left", title_style="bold"
    )
    for i, column in enumerate(("what", "predicted", "measured", "10% to 90%", "predicted / measured")):
        table.add_column(column, justify="left" if i == 0 else "right")
    step = facts["step"]
    spread = f"{seconds_text(step['tenth'])} to {seconds_text(step['ninetieth'])}"
    ratio = f"{step['predicted'] / step['measured']:.2f}"
    table.add_row("batch", seconds_text(step["predicted"]), seconds_text(step["measured"]), spread, ratio)
    core = facts["processor"]
    if core["measured"]:
        ratio = f"{core['predicted'] / core['measured']:.2f}"
        row = seconds_text(core["predicted"]), seconds_text(core["measured"])
        table.add_row("time of a core, a batch", *row, "", ratio)
    for name, memory in (("memory of a step", facts["memory"]), ("all memory", facts["process"])):
        if memory["measured"]:
            ratio = f"{memory['predicted'] / memory['measured']:.2f}"
            table.add_row(name, bytes_text(memory["predicted"]), bytes_text(memory["measured"]), "", ratio)
    console.print(table)
