"""Step time, peak memory and loss of one training under several strategies in turn, in one group of processes.

The ranks stay up: the first side launches them, every later Trainer finds the process group and keeps it. The sides
take turns, forwards in one round and backwards in the next, so that other work on the machine hits all of them alike.

A step is what passes from one ``on_train_batch_start`` to the next, so that work which a strategy defers into the next
iteration counts as well. Interrupted trainings do not: a step that an epoch ends is left out, and nothing validates,
saves or logs meanwhile.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.data import extract_batch_size
from lightning_utilities.core import rank_zero
from torch import Tensor

from lightning_spmd.report.peak_memory import PeakMemory
from lightning_spmd.report.sides import Side

FLAGS: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "limit_val_batches": 0,
    "num_sanity_val_steps": 0,
    "fast_dev_run": False,
    "max_epochs": -1,
    "min_epochs": None,
    "min_steps": None,
    "max_time": None,
    "profiler": None,
}
"""Of every Trainer that is measured: nothing but training, and no end but the measurement's."""

LONGEST_REASON = 500
"""Characters."""

Build = Callable[[Any, dict[str, Any], list[L.Callback]], tuple[L.Trainer, L.LightningModule, Any]]
"""(strategy, Trainer flags, callbacks) → Trainer, module and data for ``fit``; freshly seeded at each call."""


@dataclass(frozen=True)
class Amount:
    """The number of rounds and steps to measure.

    Args:
        steps: steps measured in a round.
        warmup: steps before them that are left out: capture, compilation, caches.
        rounds: how often each side gets its turn.

    Raises:
        ValueError: one of them is too small.
    """

    steps: int = 30
    warmup: int = 10
    rounds: int = 3

    def __post_init__(self) -> None:
        for name, least in (("steps", 2), ("warmup", 1), ("rounds", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"--{name} {getattr(self, name)}: give at least {least}")

    @property
    def batches(self) -> int:
        """Batches of one round: the last one's start ends the last step that is measured."""
        return self.warmup + self.steps + 1


@dataclass
class SideResult:
    """The measurements of one side, over all rounds.

    Args:
        name: of the side.
        seconds: rank 0's time of each measured step.
        rows: samples of one global batch.
        memory: by round, the highest bytes of any rank; see :class:`PeakMemory`. Empty where it cannot be measured.
        losses: by round, the last batch's loss, the mean of the ranks. Empty where training_step returns none.
        sent: by round, bytes that rank 0 sent a step. Empty if they are not counted.
        notes: what the strategy said about itself, such as the reason to run eagerly.
        reason: why it could not run, or None.
    """

    name: str
    seconds: list[float] = field(default_factory=list)
    rows: int = 0
    memory: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    reason: str | None = None

    @property
    def median(self) -> float:
        """Seconds of the median step."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> tuple[float, float]:
        """Seconds of the 10th and the 90th percentile."""
        tenths = statistics.quantiles(self.seconds, n=10, method="inclusive")
        return tenths[0], tenths[-1]

    @property
    def peak_memory(self) -> int | None:
        """Bytes, the median of the rounds: the first also pays for what is imported and compiled once."""
        return int(statistics.median(self.memory)) if self.memory else None

    @property
    def final_loss(self) -> float | None:
        """Of the last round; rounds begin alike."""
        return self.losses[-1] if self.losses else None


@dataclass
class _Turn:
    seconds: list[float]
    batch: int  # ranks that share layers have the same one
    rows: int
    memory: int | None
    loss: float | None
    sent: float | None


class StepMarks(L.Callback):
    """Marks the start of every batch and ends the training after enough of them.

    On CUDA a mark is an event of the current stream, which takes no synchronisation and so leaves the host as far ahead
    as the strategy lets it be; elsewhere it is the clock.

    Args:
        amount: when to begin and to end.
        memory: told when warm-up is over.
        bytes_sent: see :func:`measure`.
    """

    def __init__(self, amount: Amount, memory: PeakMemory, bytes_sent: Callable[[], int] | None = None) -> None:
        self.amount = amount
        self.memory = memory
        self.bytes_sent = bytes_sent
        self.counts: list[int] = []
        self.rows = 0
        self.loss: Tensor | None = None
        self._marks: list[Any] = []
        self._epochs: list[int] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Mark the time, and begin or end the measurement."""
        seen = len(self._marks)
        if seen == self.amount.warmup:
            self.memory.begin(trainer.strategy.root_device)
        if self.bytes_sent is not None and seen in (self.amount.warmup, self.amount.batches - 1):
            self.counts.append(self.bytes_sent())
        if seen == self.amount.batches - 1:
            trainer.should_stop = True
            self.rows = extract_batch_size(batch)
        if trainer.strategy.root_device.type == "cuda":
            self._marks.append(torch.cuda.Event(enable_timing=True))
            self._marks[-1].record()
        else:
            self._marks.append(time.perf_counter())
        self._epochs.append(trainer.current_epoch)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Keep the last batch's loss; reading its value at every step would make the host wait."""
        if len(self._marks) == self.amount.batches and outputs is not None and "loss" in outputs:
            self.loss = outputs["loss"]

    def sent(self) -> float | None:
        """Bytes sent a step."""
        return None if len(self.counts) < 2 else (self.counts[1] - self.counts[0]) / self.amount.steps

    def seconds(self) -> list[float]:
        """The steps after warm-up that lie within one epoch.

        Raises:
            RuntimeError: training ended too early, or no step was within an epoch.
        """
        if len(self._marks) < self.amount.batches:
            raise RuntimeError(f"training ended after {len(self._marks)} of {self.amount.batches} batches")
        if isinstance(self._marks[-1], torch.cuda.Event):
            self._marks[-1].synchronize()
        found = [
            1e-3 * a.elapsed_time(b) if isinstance(a, torch.cuda.Event) else b - a
            for i, (a, b) in enumerate(zip(self._marks, self._marks[1:], strict=False))
            if i >= self.amount.warmup and self._epochs[i] == self._epochs[i + 1]
        ]
        if not found:
            raise RuntimeError("no step was measured: every epoch has one batch. Give it more data")
        return found


def measure(
    sides: Sequence[Side],
    build: Build,
    amount: Amount,
    on_turn: Callable[[str, int], None],
    bytes_sent: Callable[[], int] | None = None,
) -> list[SideResult]:
    """Train under each side in turn, on all ranks together.

    A side that fails is asked no further and tells why; the others go on. All ranks must fail for that: where one does
    alone, the others wait until their collective's timeout.

    Args:
        sides: what to measure; the names differ.
        build: makes the training anew, with the same seed each time.
        amount: how much.
        on_turn: told the name of the side and the number of the round before each turn.
        bytes_sent: a counter of what this process's network has sent so far, where it has a network of its own.

    Returns:
        one result a side, in their order; on every rank the same.
    """
    results = {side.name: SideResult(side.name) for side in sides}
    for number in range(amount.rounds):
        for side in sides if number % 2 == 0 else reversed(sides):
            result = results[side.name]
            if result.reason is None:
                on_turn(side.name, number)
                _take_turn(side, build, amount, result, bytes_sent)
    return list(results.values())


def _take_turn(
    side: Side, build: Build, amount: Amount, result: SideResult, bytes_sent: Callable[[], int] | None
) -> None:
    turn, reason = None, None
    with _notes() as notes:
        try:
            turn = _train(side, build, amount, bytes_sent)
        except Exception as error:  # whatever goes wrong with one side must not end the comparison
            reason = f"{type(error).__name__}: {_in_short(error)}"
        gc.collect()  # with the exception's traceback gone, so is its model
    reasons = [r for r in _gather(reason) if r is not None]
    turns: list[_Turn] = [t for t in _gather(turn) if t is not None]
    result.notes += [note for note in notes if note not in result.notes]
    if reasons or not turns:
        result.reason = reasons[0]
        return
    result.seconds += turns[0].seconds
    result.rows = sum({t.batch: t.rows for t in turns}.values())
    result.memory += [max(t.memory or 0 for t in turns)] if turns[0].memory is not None else []
    losses = [t.loss for t in turns if t.loss is not None]
    result.sent += [turns[0].sent] if turns[0].sent is not None else []
    result.losses += [sum(losses) / len(losses)] if losses else []


def _train(side: Side, build: Build, amount: Amount, bytes_sent: Callable[[], int] | None) -> _Turn:
    memory = PeakMemory()
    marks = StepMarks(amount, memory, bytes_sent)
    # A schedule asks for the number of steps that are to come; batches end it, whatever a step of the optimizer is.
    flags = {**FLAGS, "max_steps": 10 * amount.batches}
    trainer, module, data = build(side.strategy(), flags, [marks])
    trainer.fit(side.prepare(module), data)
    loss = None if marks.loss is None else float(marks.loss)
    batch = getattr(trainer.strategy, "distributed_sampler_kwargs", {}).get("rank", 0)
    turn = _Turn(marks.seconds(), batch, marks.rows, memory.peak(), loss, marks.sent())
    side.finish()
    return turn


def _gather(value: Any) -> list[Any]:
    """Every rank's value. Before the first side has launched the ranks there is one, and all of them are alike."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _in_short(error: BaseException) -> str:
    """A row's reason is one line; a compiler's output is not."""
    message = " ".join(line.strip() for line in str(error).splitlines() if line.strip())
    return message if len(message) <= LONGEST_REASON else message[:LONGEST_REASON] + " ..."


_OURS = ("strategy='spmd'", "overlap_iterations")


class _Keep(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if message.startswith(_OURS):
            self.messages.append(message)


@contextlib.contextmanager
def _notes() -> Iterator[list[str]]:
    """A context that keeps this strategy's messages for the report, and drops Lightning's banners and advice."""
    kept, spoken = _Keep(), rank_zero.log  # Lightning puts a logger of its own there
    banners = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in (spoken, *banners)]
    propagates = spoken.propagate
    spoken.addHandler(kept)
    spoken.setLevel(logging.INFO)
    spoken.propagate = False
    for logger in banners:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            yield kept.messages
        texts = [str(warning.message) for warning in warned]
        kept.messages += [" ".join(text.split()) for text in texts if text.startswith(_OURS)]
    finally:
        spoken.removeHandler(kept)
        spoken.propagate = propagates
        for logger, level in zip((spoken, *banners), levels, strict=True):
            logger.setLevel(level)
