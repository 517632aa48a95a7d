"""Turns a final graph into a callable: Python, or a backend (Inductor regions, CUDA graphs).

The first runs of a graph go node by node, for layouts and measurements. Only the final graphs are lowered.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, TypeAlias

from lightning_spmd.ir.source import function_of
from lightning_spmd.ir.steps import ShardedStep

Lowering: TypeAlias = Callable[[ShardedStep], Callable[..., Sequence[Any]]]
"""Makes of a step what takes its inputs, in the order of its signature, and gives its outputs.

It must keep what the signature says of writes into inputs, call collectives in the order of the graph, and be the same
decision on every rank.
"""


MODES = ("auto", "inductor", "none")
"""What ``SPMDStrategy(lowering=...)`` may be."""


@dataclass(frozen=True)
class LoweringContext:
    """What the lowering of a graph may ask about the run.

    Args:
        rank: this rank's number.
        gather: gathers a value of every rank, by rank; called by all ranks in the same step.
        steps_left: how many more steps the run may take.
        on_result: called with the lowered graph (dumps).
        on_region: called with the number of each region that is about to be compiled and the number of regions; at the
            end with that number twice.
    """

    rank: int = 0
    gather: Callable[[Any], list[Any]] = lambda value: [value]
    steps_left: Callable[[], float] = lambda: float("inf")
    on_result: Callable[[str, ShardedStep], None] = lambda _stage, _step: None
    on_region: Callable[[int, int], None] = lambda _number, _count: None


class Together(ABC):
    """A lowering on which the ranks decide together, in the first runs of one graph of an iteration.

    One rank may finish pending work alone and then runs ``setup`` while others run ``main``, so ranks cannot wait for
    each other in ``main``. ``setup`` decides, and no iteration takes over another one's work until it has. ``main``
    follows the decision.
    """

    @abstractmethod
    def __call__(self, step: ShardedStep) -> Callable[..., Sequence[Any]]:
        """Makes a callable whose first runs decide; all ranks are in them."""

    @abstractmethod
    def following(self, step: ShardedStep) -> Callable[..., Sequence[Any]]:
        """A callable that follows the decision, without another exchange."""


def is_settled(run: Callable[..., Sequence[Any]]) -> bool:
    """Whether a callable only executes its graph: it no longer measures, compares, records or asks other ranks."""
    return isinstance(run, FunctionType) or bool(getattr(run, "is_settled", False))


def as_python(step: ShardedStep) -> Callable[..., Sequence[Any]]:
    """The graph as one Python function, one call an operator."""
    return function_of(step.graph_module)
