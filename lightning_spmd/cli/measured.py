"""A plan beside the training itself, on this machine: ``lightning-spmd plan --measure``.

The recipe trains for some steps on as many processes as the plan has ranks, as ``compare`` lets it; the same processes
then measure what their CPU and the link between them reach, all at the same time, and the plan is made with that.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
from collections.abc import Mapping
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from lightning_spmd.cost.hardware import Machines
from lightning_spmd.errors import ConfigurationError
from lightning_spmd.planning.calibration import calibrated_device, calibrated_link
from lightning_spmd.planning.layout import Layout
from lightning_spmd.planning.outlook import Outlook
from lightning_spmd.planning.units import bytes_text, seconds_text
from lightning_spmd.report.measure import Amount, SideResult, measure
from lightning_spmd.report.peak_memory import PeakMemory
from lightning_spmd.report.sides import spmd_side

LOOKS = 4
"""Steps at which memory is looked at, before those that are timed."""
AMOUNT = Amount(steps=20, warmup=10, rounds=2)
_OF_LAUNCHER = ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclasses.dataclass(frozen=True)
class Measured:
    """A training that ran here.

    Args:
        side: steps and memory of the process, as ``compare`` measures them.
        memory: bytes that a step needs above what is there between steps; None where the system does not tell.
    """

    side: SideResult
    memory: int | None


class StepMemory(L.Callback):
    """How much some early steps need above what the process holds between steps: what comes and goes."""

    def __init__(self) -> None:
        self.bytes: list[int] = []
        self._memory: PeakMemory | None = None

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Look at what is there."""
        self._memory = PeakMemory() if AMOUNT.warmup - LOOKS <= batch_idx + 1 < AMOUNT.warmup else None
        if self._memory is not None:
            self._memory.begin(torch.device("cpu"))

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Look at what was the most."""
        found = None if self._memory is None else self._memory.peak()
        if found is not None:
            self.bytes.append(found)


def check_here(machines: Machines) -> None:
    """Check that this machine is what is planned for.

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


def calibrated(machines: Machines) -> Machines:
    """The machines with what this one's CPU reaches."""
    device, link = calibrated_device(machines.device), calibrated_link(machines.within)
    return dataclasses.replace(machines, device=device, within=link)


def measured(recipe: Any, layout: Layout, machines: Machines) -> tuple[Machines, Measured]:
    """Train here; all ranks but the first end in here.

    Returns:
        the machines as they were found to be, and how it trained.

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
    (result,) = measure([spmd_side("spmd", layout.options)], build, AMOUNT, lambda _name, _round: None)
    found = calibrated(machines)
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
    return found, Measured(result, int(statistics.median(memory.bytes)) if memory.bytes else None)


def measured_facts(outlook: Outlook, found: Measured) -> dict[str, Any]:
    """Predicted and measured numbers."""
    side, always = found.side, sum(outlook.highest.contents.always.values())
    low, high = side.spread
    return {
        "steps": len(side.seconds),
        "step": {"predicted": outlook.step_seconds, "measured": side.median, "tenth": low, "ninetieth": high},
        "memory": {"predicted": outlook.peak_bytes - always, "measured": found.memory},
        "process": {"predicted": outlook.peak_bytes, "measured": side.peak_memory},
    }


def print_measured(facts: Mapping[str, Any], console: Console) -> None:
    """Print how far the plan is from what happened here."""
    table = Table(
        title=f"Predicted and measured here, {facts['steps']} steps", title_justify="left", title_style="bold"
    )
    for i, column in enumerate(("what", "predicted", "measured", "10% to 90%", "predicted / measured")):
        table.add_column(column, justify="left" if i == 0 else "right")
    step = facts["step"]
    spread = f"{seconds_text(step['tenth'])} to {seconds_text(step['ninetieth'])}"
    ratio = f"{step['predicted'] / step['measured']:.2f}"
    table.add_row("step", seconds_text(step["predicted"]), seconds_text(step["measured"]), spread, ratio)
    for name, memory in (("memory of a step", facts["memory"]), ("all memory", facts["process"])):
        if memory["measured"]:
            ratio = f"{memory['predicted'] / memory['measured']:.2f}"
            table.add_row(name, bytes_text(memory["predicted"]), bytes_text(memory["measured"]), "", ratio)
    console.print(table)
