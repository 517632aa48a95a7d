"""What a step showed once Python is done: a path, its numbers and tensors, and which results somebody still wants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_spmd.ir.signature import OutputRole
from lightning_spmd.stages.capture.follow.notes import Note, Place, Source


@dataclass(frozen=True)
class Want:
    """A result that leaves the graph.

    Args:
        source: where it comes from.
        role: what it is for.
        after: the number of calls behind which it is told as it is then; None: as it is when the step ends.
    """

    source: Source
    role: OutputRole
    after: int | None = None


@dataclass
class Live:
    """What of the step that runs now graphs take as inputs.

    Args:
        outside: tensors that the step did not make, in the order in which it met them.
        numbers: of calls, by depth and place.
    """

    outside: Sequence[Tensor] = ()
    numbers: dict[tuple[int, Place], Any] = field(default_factory=dict[tuple[int, Place], Any])


@dataclass(frozen=True)
class Program:
    """One step's way.

    Args:
        notes: its calls.
        number: of the way, in this process.
        wants: what leaves the graph.
        loss: what ``training_step`` returned as its loss.
        live: the tensors and numbers of this step, and of each later one that goes this way.
    """

    notes: Sequence[Note]
    number: int
    wants: tuple[Want, ...]
    loss: Source | None
    live: Live

    @property
    def key(self) -> tuple[Any, ...]:
        """What must be equal for a graph to be this step's."""
        return self.number, frozenset(self.live.numbers), len(self.wants), self.loss
