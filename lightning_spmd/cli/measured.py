"""Predicted and measured numbers side by side, on this machine: ``lightning-spmd plan --measured``.

The recipe trains for some steps on as many processes as the plan has ranks, as in ``compare``. Between rounds and at
the end the same processes measure, all at the same time, what their CPU and the link between them reach; the plan uses
that. Then the recipe trains once more, with a clock between the lines of its graphs (``runtime/stopwatch.py``), and
the ranks measure the convolutions of these, each by itself.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import fx

from lightning_spmd.cost.hardware import Machines
from lightning_spmd.errors import ConfigurationError
from lightning_spmd.planning.calibration import Calibration, calibrate, mean_of
from lightning_spmd.planning.kernels import Kernels, measure_kernels
from lightning_spmd.planning.layout import Layout
from lightning_spmd.planning.outlook import Outlook
from lightning_spmd.planning.tables import measured_rows, wait_rows
from lightning_spmd.planning.timed import predicted_waits, timed_facts
from lightning_spmd.report.measure import Amount, Build, SideResult, measure
from lightning_spmd.report.peak_memory import AllocatedMemory
from lightning_spmd.report.sides import spmd_side
from lightning_spmd.stages.runtime.stopwatch import Stopwatch

LOOKS = 4
"""Steps at which memory is measured, before those that are timed."""
AMOUNT = Amount(steps=20, warmup=10, rounds=2)
LINES = Amount(steps=10, warmup=12, rounds=1)
"""In which every line of the graphs is timed."""
WAITS = 5
"""Of the largest ones, how many are told."""
_OF_LAUNCHER = ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclasses.dataclass(frozen=True)
class Measured:
    """The measurements of a training that ran here.

    Args:
        side: steps and memory of the process, as ``compare`` measures them.
        memory: bytes that a step needs above those between steps; None if the system does not tell.
        processor: seconds of a core that a batch takes; None if a process has several cores.
        on_cpu: the share of its time in which the process had a core while it was calibrated.
        ranks: by rank, what each line of the graphs took (``timed_facts``).
        kernels: operators of the graphs, each by itself.
    """

    side: SideResult
    memory: int | None
    processor: float | None
    on_cpu: float
    ranks: Sequence[Mapping[str, Any]] = ()
    kernels: Kernels = dataclasses.field(default_factory=dict[str, float])


class StepMemory(L.Callback):
    """Measures the memory that early steps need above that between steps, and the core time of later ones.

    On a shared machine the wall-clock time of a step depends on other processes; its core time does not.
    """

    def __init__(self) -> None:
        self.bytes: list[int] = []
        self.processor: list[float] = []
        self._memory: AllocatedMemory | None = None
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
        looks = AMOUNT.warmup - LOOKS <= batch_idx + 1 < AMOUNT.warmup
        self._memory = AllocatedMemory(trainer.strategy.root_device) if looks else None

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Read the peak."""
        found = None if self._memory is None else self._memory.peak()
        if found is not None:
            self.bytes.append(found)


class Lines(L.Callback):
    """Times every line of the graphs in the steps after warm-up.

    Attributes:
        facts: what this rank did; None before the end.
        graphs: that it ran.
    """

    def __init__(self) -> None:
        self.facts: dict[str, Any] | None = None
        self.graphs: list[fx.Graph] = []
        self._watch = Stopwatch()
        self._batches = self._updates = 0

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Put the clock into the graphs that are to be built."""
        strategy: Any = trainer.strategy
        strategy.accounts.waits.stopwatch = self._watch

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin after warm-up."""
        self._batches += 1
        if self._batches == LINES.warmup + 1:
            self._watch.begin()
            self._updates = trainer.global_step

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Sum up after the last step."""
        if self._batches == LINES.warmup + LINES.steps:
            updates = trainer.global_step - self._updates
            results = self._watch.results()
            self.facts = timed_facts(results, LINES.steps, updates)
            self.graphs = [timed.step.graph_module.graph for timed in results]


def check_here(machines: Machines, *, trains: bool) -> None:
    """Check that the plan is for this machine.

    Args:
        machines: what is planned for.
        trains: whether the recipe is to train on it.

    Raises:
        ConfigurationError: it is not.
    """
    option, device = "--measured" if trains else "--calibrate", machines.device
    if machines.nodes != 1:
        raise ConfigurationError(f"--num_nodes {machines.nodes}: {option} is of one machine: leave it out")
    if device.kind == "cpu":
        return
    if not trains:
        raise ConfigurationError(f"--device-type {device.name}: {option} looks at this CPU: --device-type cpu")
    if (there := torch.cuda.device_count()) < machines.devices:
        raise ConfigurationError(
            f"--device-type {device.name}: {option} trains on {machines.devices} of them, and this machine has {there} "
            "GPUs: give fewer --devices, or --device-type cpu for processes on its CPU"
        )


def calibrated(machines: Machines, found: Calibration | None = None) -> Machines:
    """The machines with the measured speed of this one's CPU."""
    found = calibrate() if found is None else found
    return dataclasses.replace(machines, device=found.device(machines.device), within=found.link(machines.within))


def measured(recipe: Any, layout: Layout, machines: Machines) -> tuple[Machines, Measured]:
    """Train here; all ranks but the first end in here.

    Returns:
        the machines, calibrated if they are this CPU, and the measurements.

    Raises:
        ConfigurationError: it cannot be trained here.
    """
    on_cpu = machines.device.kind == "cpu"
    flags = {"accelerator": "cpu" if on_cpu else "gpu", "devices": layout.devices, "num_nodes": 1}

    def building(watcher: L.Callback) -> Build:
        def build(
            strategy: Any, given: dict[str, Any], callbacks: list[L.Callback]
        ) -> tuple[L.Trainer, L.LightningModule, Any]:
            return recipe.build(strategy, {**given, **flags}, [*callbacks, watcher])

        return build

    recipe.in_memory = True
    before = {name: os.environ.get(name) for name in _OF_LAUNCHER}
    memory, lines = StepMemory(), Lines()
    between: list[Calibration] = []

    def on_turn(_name: str, number: int) -> None:
        if number and on_cpu:  # by then all ranks are there
            between.append(calibrate())

    side = spmd_side("spmd", layout.options)
    (result,) = measure([side], building(memory), AMOUNT, on_turn)
    calibration = mean_of([*between, calibrate()]) if on_cpu else None
    found = machines if calibration is None else calibrated(machines, calibration)
    reason = result.reason
    if reason is None:
        reason = measure([side], building(lines), LINES, lambda _name, _number: None)[0].reason
    kernels = measure_kernels(lines.graphs) if on_cpu and reason is None else {}
    ranks = _end_other_ranks(lines.facts)
    for name, value in before.items():  # what the launcher left would tell the capture that it is one rank of several
        if value is None:
            os.environ.pop(name, None)
    recipe.in_memory = False
    if reason is not None:
        raise ConfigurationError(f"--measured: it cannot be trained here: {reason}")
    alone = torch.get_num_threads() == 1 and memory.processor
    processor = statistics.median(memory.processor) if alone else None
    looked = int(statistics.median(memory.bytes)) if memory.bytes else None
    return found, Measured(result, looked, processor, calibration.on_cpu if calibration else 1.0, ranks, kernels)


def _end_other_ranks(facts: Any) -> list[Any]:
    """What all ranks measured, on the first one; the others end here."""
    if not (dist.is_available() and dist.is_initialized()):
        return [facts]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, facts)
    rank = dist.get_rank()
    dist.destroy_process_group()
    if rank != 0:
        raise SystemExit(0)
    return everyone


def measured_facts(outlook: Outlook, found: Measured) -> dict[str, Any]:
    """Predicted and measured numbers, of a batch."""
    side, always = found.side, sum(outlook.highest.contents.always.values())
    low, high = side.spread
    batches = outlook.micro_batches
    computing = (outlook.step_seconds - outlook.exposed) / batches
    facts: dict[str, Any] = {
        "steps": len(side.seconds),
        "step": {"predicted": outlook.step_seconds / batches, "measured": side.median, "tenth": low, "ninetieth": high},
        "processor": {"predicted": computing * found.on_cpu, "measured": found.processor},
        "memory": {"predicted": outlook.peak_bytes - always, "measured": found.memory},
        "process": {"predicted": outlook.peak_bytes, "measured": side.peak_memory},
    }
    ranks = [rank for rank in found.ranks if rank is not None and rank["phases"]]
    if not ranks:
        return {**facts, "ranks": [], "waits": []}
    seconds = {name: [rank["seconds"][name] for rank in ranks] for name in ranks[0]["seconds"]}
    predicted = {
        "computing": outlook.step_seconds - outlook.exposed,  # from one line to the next, as clocks see it
        "communicating": outlook.communicating,
        "exposed": outlook.exposed,
        "between": 0.0,
    }
    for name, whole in predicted.items():
        times = seconds[name]
        # of a collective, the last rank to arrive has the time that it takes: the others wait for that rank as well
        of_all = min(times) if name == "communicating" else statistics.mean(times)
        facts[name] = {"predicted": whole / batches, "measured": of_all, "by_rank": times}
    return {**facts, "ranks": [_named(rank, i) for i, rank in enumerate(ranks)], "waits": _waits(outlook, ranks)}


def _named(rank: Mapping[str, Any], number: int) -> dict[str, Any]:
    """A rank's facts, with its number in the names of graphs."""
    several = len(rank["phases"]) > 1
    phases = [{**p, "name": f"rank {number}: {p['name']}" if several else f"rank {number}"} for p in rank["phases"]]
    return {**rank, "phases": phases}


def _waits(outlook: Outlook, ranks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The largest waits, first the predicted ones and then those of the rank that waited longest."""
    by_name: dict[str, list[dict[str, Any]]] = {}
    for number, rank in enumerate(ranks):
        for wait in rank["waits"]:
            by_name.setdefault(wait["name"], []).append({**wait, "rank": number})
    longest: list[dict[str, Any]] = []
    for same in by_name.values():
        least = min(map(_seconds, same)) if len(same) == len(ranks) else 0.0
        longest.append({**max(same, key=_seconds), "side": "measured", "least": least})
    expected = [{**wait, "side": "predicted", "rank": 0} for wait in predicted_waits(outlook)]
    return [w for side in (expected, longest) for w in sorted(side, key=_seconds, reverse=True)[:WAITS]]


def _seconds(wait: Mapping[str, Any]) -> float:
    return wait["seconds"]


def print_measured(facts: Mapping[str, Any], console: Console) -> None:
    """Print the plan beside the measurements."""
    head, rows = measured_rows(facts)
    title = f"Predicted and measured here, a batch, {facts['steps']} steps"
    _print(title, head, rows, console)
    if not facts["ranks"]:
        console.print(
            "- operators were not timed: no graph ran as Python in the steps that were measured. CUDA graphs, steps "
            "that read values and eager training have no clock between lines",
            soft_wrap=True,
        )
    head, rows = wait_rows(facts)
    if rows:
        _print(f"The {WAITS} largest waits of an iteration, predicted and measured", head, rows, console)


def _print(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], console: Console) -> None:
    table = Table(title=title, title_justify="left", title_style="bold")
    for i, column in enumerate(head):
        words = i == 0 or column == "of"
        table.add_column(column, justify="left" if words else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)
