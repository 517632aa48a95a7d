"""What a final graph becomes: one callable. Here a backend (Inductor regions, CUDA graphs) takes the place of Python.

The first runs of a graph go node by node, for layouts and for measurements; only what runs from then on is lowered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from lightning_spmd.ir.source import function_of
from lightning_spmd.ir.steps import ShardedStep

Lowering: TypeAlias = Callable[[ShardedStep], Callable[..., Sequence[Any]]]
"""Makes of a step what takes its inputs, in the order of its signature, and gives its outputs.

It must keep what the signature says of writes into inputs, call collectives in the order of the graph, and be the same
decision on every rank.
"""


def as_python(step: ShardedStep) -> Callable[..., Sequence[Any]]:
    """The graph as one Python function, one call an operator."""
    return function_of(step.graph_module)
