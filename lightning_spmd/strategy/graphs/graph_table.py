"""The graphs of one run, and the search for one that fits a step."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_spmd.ir.signature import OutputRole
from lightning_spmd.ir.sizes import Dimension
from lightning_spmd.ir.steps import CapturedStep
from lightning_spmd.messages import warn
from lightning_spmd.stages.capture.batch.batch import Batch
from lightning_spmd.stages.runtime.executor import Executable
from lightning_spmd.strategy.graphs.open_sizes import OpenSizes
from lightning_spmd.strategy.graphs.run_context import StepRequest

# A graph whose guards keep failing costs a capture a step: past this many for one shape, training goes on eagerly.
MAX_GRAPHS_PER_SHAPE = 16
# Graphs that are kept; of a large model each takes tens of megabytes on the host.
MOST_GRAPHS = 64


@dataclass(frozen=True)
class Found:
    """The result of a search in the table.

    Args:
        key: the key of graphs for such a step.
        split: rows of the global batch by data rank; empty without a batch.
        index: a graph whose guards hold, or None.
        reason: why the newest graph of that key does not fit; None if there is no such graph.
        vary: sizes of the batch that a graph built now should leave open, with their values.
    """

    key: tuple[Any, ...]
    split: tuple[int, ...]
    index: int | None
    reason: str | None
    vary: Mapping[Dimension, int] = field(default_factory=dict[Dimension, int])


class GraphTable:
    """All graphs of a run.

    Args:
        trainer: the Trainer.
        gradients: accumulated gradients of earlier micro-batches, by name. The dictionary is read in each step.
        rows_vary: whether graphs may leave the number of rows open.
    """

    def __init__(self, trainer: Any, gradients: Mapping[str, Tensor], *, rows_vary: bool = True) -> None:
        self._executables: dict[int, Executable] = {}
        self._built = 0
        self.open = OpenSizes(rows=rows_vary)
        self._trainer = trainer
        self._gradients = gradients
        self._indices: dict[tuple[Any, ...], list[int]] = {}
        self._gone = Counter[tuple[Any, ...]]()
        """How many graphs were forgotten where others of the same key were kept, of other numbers."""
        self._told_about_memory = False

    @property
    def executables(self) -> list[Executable]:
        """All graphs that are kept, the least recently used first."""
        return list(self._executables.values())

    def graph(self, index: int) -> Executable:
        """The graph of an index."""
        return self._executables[index]

    def find(self, request: StepRequest, split: tuple[int, ...]) -> Found:
        """Find a graph whose guards hold."""
        batch, step = request.batch, self.step_key(request)
        shapes = None if batch is None else batch.own_key() if request.variant.own_batch else batch.cache_key()
        key = (*step, shapes, split, *([request.needed] if request.needed else []))
        key = _of_path(key, request)
        index, reason = self._fitting(key, batch)
        if index is not None or batch is None:
            return Found(key, split, index, None if index is not None else reason)
        for its_key in (_of_path((*step, *open_key), request) for open_key in self.open.keys(batch, split)):
            index, why = self._fitting(its_key, batch)
            if index is not None:
                return Found(its_key, split, index, None)
            reason = reason or why
        return Found(key, split, None, reason)

    def _fitting(self, key: tuple[Any, ...], batch: Batch | None) -> tuple[int | None, str | None]:
        """A graph of one key whose guards hold, or why the newest one's do not."""
        tensors = [] if batch is None else batch.tensor_values
        reason: str | None = None
        for index in reversed(self._indices.get(key, ())):
            executable = self._executables[index]
            failure = executable.captured.guards.failure(functools.partial(executable.looked_at, tensors))
            if failure is None:
                return index, None
            reason = reason or failure
        return None, reason

    def with_open_sizes(self, found: Found, request: StepRequest) -> Found:
        """The search result for a graph about to be built, which should leave varying sizes open."""
        batch = request.batch
        if batch is None:
            return found
        self.open.note(batch)
        if request.program is not None and not request.program.for_all_sizes:
            return found
        vary = self.open.wanted(batch)
        if not vary:
            return found
        key = _of_path((*self.step_key(request), *self.open.key(batch, found.split)), request)
        return dataclasses.replace(found, key=key, vary=vary)

    def step_key(self, request: StepRequest) -> tuple[Any, ...]:
        """The key of what a graph depends on besides the batch. It is the same on all ranks that do the same."""
        trainer = self._trainer
        clip = (trainer.gradient_clip_val, trainer.gradient_clip_algorithm) if request.variant.apply else None
        return request.variant, tuple(request.arguments), trainer.accumulate_grad_batches, tuple(self._gradients), clip

    def count_use(self, index: int) -> None:
        """Count one more use of a graph. All ranks count alike."""
        self._executables[index] = self._executables.pop(index)  # the last one in the order of their use

    def forget_unused(self) -> list[int]:
        """Drop the least recently used graphs beyond the maximum."""
        gone = list(self._executables)[: max(0, len(self._executables) - MOST_GRAPHS)]
        for index in gone:
            self._forget(index)
        return gone

    def add(self, key: tuple[Any, ...], executable: Executable) -> int:
        """Add a new graph and return its index."""
        index, self._built = self._built, self._built + 1
        self._executables[index] = executable
        self._indices.setdefault(key, []).append(index)
        return index

    def _forget(self, index: int) -> None:
        """Let go of a graph; for such steps one is built anew."""
        gone = self._executables.pop(index)
        for executable in self._executables.values():
            executable.forget(gone)
        for key, indices in list(self._indices.items()):
            if index in indices:
                indices.remove(index)
                if indices:
                    self._gone[key] += 1
                else:
                    del self._indices[key]
        if not self._told_about_memory:
            self._told_about_memory = True
            warn(
                f"more than {MOST_GRAPHS} graphs were built, most of them for a batch shape of their own; the one that "
                "was not used for longest is forgotten, and built anew if it is needed again. Pad to a few sizes"
            )

    def surplus(self, found: Found) -> str | None:
        """Why no further graph should be built for such a step; None if one may be."""
        if len(self._indices.get(found.key, [])) + self._gone[found.key] >= MAX_GRAPHS_PER_SHAPE:
            return (
                f"{MAX_GRAPHS_PER_SHAPE} graphs were built for one batch shape and none fits ({found.reason}); make "
                "that value a tensor, or stop reading it in training_step"
            )
        return None

    def follows_a_first_step(self, key: tuple[Any, ...]) -> bool:
        """Whether all graphs under a key are of first steps, which another graph follows by design."""
        return all(creates_state(self._executables[i].captured) for i in self._indices.get(key, ()))


def _of_path(key: tuple[Any, ...], request: StepRequest) -> tuple[Any, ...]:
    """What graphs of a step are filed under: of one that was followed those of its path alone."""
    return key if request.program is None else (*key, request.program.key)


def creates_state(step: CapturedStep) -> bool:
    """Whether a captured step is a first step, which creates optimizer state."""
    return any(True for _ in step.signature.outputs_of(OutputRole.OPTIMIZER_STATE))
