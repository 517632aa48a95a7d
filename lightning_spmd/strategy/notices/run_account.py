"""The account of a fit: how it runs and why, where the first step's time went, how many steps it took."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lightning_spmd import messages
from lightning_spmd.ir.steps import ShardedStep
from lightning_spmd.ir.verify import collective_name, starts_collective
from lightning_spmd.messages import tell
from lightning_spmd.stages import BuildOptions
from lightning_spmd.stages.runtime.executor import Executable
from lightning_spmd.strategy.graphs.run_context import BuildEvent, GraphSettings, Ran
from lightning_spmd.strategy.notices.build_progress import BuildProgress, printer_above
from lightning_spmd.strategy.notices.start_table import show
from lightning_spmd.strategy.support.feature import Mode

_KEPT = 10_000
"""Times of the last steps that are kept."""
_PREFIX = "strategy='spmd' "
_IN_WORDS = {Mode.COMPILED: "one graph", Mode.SPLIT: "a graph up to the gradients and one of the update"}


@dataclass
class RunAccount:
    """The account of one fit.

    Args:
        trainer: whose fit it is.
        options: with which graphs are built.
        layout: mesh and plan, by name, for the table.
    """

    trainer: Any
    options: BuildOptions
    layout: dict[str, str]
    notes: list[str] = field(default_factory=list[str])
    steps: int = 0
    eager: int = 0
    built: int = 0
    _stages: list[tuple[str, float]] = field(default_factory=list[tuple[str, float]])
    _times: deque[float] = field(default_factory=lambda: deque[float](maxlen=_KEPT))
    _begun: float = 0.0
    _first: float | None = None

    def __post_init__(self) -> None:
        self.progress = BuildProgress(self.trainer)
        self._printing = contextlib.ExitStack()

    def begin(self) -> None:
        """Begin a fit: messages from now on belong to it."""
        messages.hear(self.notes)
        self._printing.enter_context(messages.printing_with(printer_above(self.trainer)))

    def end(self) -> None:
        """Nothing more belongs to it."""
        self.progress.end()
        self._printing.close()
        messages.hear_no_more(self.notes)

    def on_build(self, event: BuildEvent) -> None:
        """A stage of building a graph begins."""
        if not event.variant.endswith("_step"):  # those are evaluation's
            self.built += event.stage == "ready"
            if self._first is None:
                self._stages.append((event.stage, event.seconds))

    def step_begins(self) -> None:
        """A micro-batch is about to run."""
        now = time.perf_counter()
        if self.steps > 1:  # the one before was no first one
            self._times.append(now - self._begun)
        self._begun = now
        self.steps += 1

    def step_ran(self, mode: Mode, executable: Executable | None) -> None:
        """Count a step. After the first one, users are told how training runs.

        Args:
            mode: how the fit runs.
            executable: the graph that ran; None if it ran eagerly.
        """
        self.eager += executable is None
        if self._first is None:
            self._first = time.perf_counter() - self._begun
            show(self.trainer, self.rows(mode, executable))

    def rows(self, mode: Mode, executable: Executable | None) -> dict[str, str]:
        """The rows of the start table, by subject."""
        rows = {"training_step": "runs eagerly, without a graph"}
        if executable is not None:
            count = len(executable.graphs.main.graph_module.graph.nodes)
            rows["training_step"] = f"{_IN_WORDS.get(mode, str(mode))}, {count} operators"
            rows["batch"] = _batch(executable)
            rows["communication"] = _communication(executable.graphs.main)
        rows |= self.layout
        if executable is not None:
            rows["passes"] = ", ".join(p.name for p in self.options.passes) or "none"
            rows["lowering"] = self.options.lowering + (", CUDA graphs" if self.options.cuda_graphs else "")
        rows["first step"] = self._where_time_went()
        told = [note.removeprefix(_PREFIX) for note in self.notes if _PREFIX.strip() in note]
        for number, note in enumerate(dict.fromkeys(told), 1):
            rows[f"note {number}"] = note
        return rows

    def tell(self) -> None:
        """At the end: one line."""
        if not self.steps:
            return
        text = f"{self.steps} step" + ("" if self.steps == 1 else "s")
        if self._times:
            text += f" of {milliseconds_or_seconds(statistics.median(self._times))} (median)"
        text += f", {self.built} graph" + ("" if self.built == 1 else "s") + " built"
        if self.eager:
            text += f", {self.eager} steps eager"
        tell(f"{_PREFIX}ends: {text}")

    def _where_time_went(self) -> str:
        total: dict[str, float] = {}
        for (stage, begun), (_, ended) in itertools.pairwise(self._stages):
            if stage != "ready":  # behind it comes another build
                total[stage] = total.get(stage, 0.0) + max(ended - begun, 0.0)
        rest = max((self._first or 0.0) - sum(total.values()), 0.0)
        parts = [f"{stage} {seconds:.2f}" for stage, seconds in (*total.items(), ("run", rest))]
        return f"{self._first or 0.0:.2f} s: {', '.join(parts)}"


class Accounts:
    """The account of the current fit.

    Args:
        settings: the settings of its graphs.

    Attributes:
        ran: how the last micro-batch ran.
        waits: measures how long its graphs wait for collectives, if requested before they are built.
    """

    def __init__(self, settings: GraphSettings) -> None:
        self.ran = Ran()
        self.waits = settings.waits
        self._settings = settings
        self._current: RunAccount | None = None

    def begin(self, trainer: Any) -> None:
        """A fit begins."""
        self.end()
        self._current = RunAccount(trainer, self._settings.options, self._settings.ranks.in_words())
        self._current.begin()
        self._settings.listeners.extend((self._current.on_build, self._current.progress.on_build))

    def step(self, run: Callable[[], Any], how: Callable[[], tuple[Mode, Ran]]) -> Any:
        """Run one micro-batch and account for it.

        Args:
            run: runs it.
            how: returns afterwards how it ran: the mode of the fit, and the record of this batch.
        """
        account = self._current
        if account is None:
            return run()
        account.step_begins()
        try:
            output = run()
        finally:
            account.progress.end()
        mode, self.ran = how()
        account.step_ran(mode, self.ran.executable)
        return output

    def tell(self) -> None:
        """Give the account of the fit."""
        if self._current is not None:
            self._current.tell()

    def end(self) -> None:
        """The fit is over."""
        self.ran = Ran()
        if self._current is not None:
            self._settings.listeners.remove(self._current.on_build)
            self._settings.listeners.remove(self._current.progress.on_build)
            self._current.end()
            self._current = None


def milliseconds_or_seconds(seconds: float) -> str:
    """Three digits, with the unit that they are read in: ``9.18 ms``, ``1.21 s``."""
    scale, unit = (1.0, "s") if seconds >= 0.9995 else (1e3, "ms")
    value = seconds * scale
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {unit}"


def _batch(executable: Executable) -> str:
    facts, axes = executable.captured.own_batch, executable.graphs.main.axes
    if facts is not None:
        return f"local: each rank's own, weighed {facts.weighed}"
    split = [axis.split for axis in axes if axis.name == "data_parallel"]
    return (
        f"global, rows by rank {list(split[0])}" if split else "one device's" if not axes else "the same on all ranks"
    )


def _communication(step: ShardedStep) -> str:
    kinds: dict[str, int] = {}
    for node in step.graph_module.graph.nodes:
        if starts_collective(node):
            name = collective_name(node).rstrip("_")
            kinds[name] = kinds.get(name, 0) + 1
    return ", ".join(f"{count} {name}" for name, count in kinds.items()) or "none"
