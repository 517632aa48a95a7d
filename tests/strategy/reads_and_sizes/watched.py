"""A module that remembers what Python was told in a run, and what its graphs moved between ranks."""

from __future__ import annotations

from typing import Any

from lightning_spmd.ir.verify import activation_collectives
from tests.strategy.small import Quiet

TOLD: list[Any] = []
"""What Python was told in the run before."""
MOVED: list[Any] = []
"""(collectives that move activations, operators that run on gathered ones) of each graph of the run before."""


class Watched(Quiet):
    """Steps add to ``TOLD``."""

    def on_train_start(self) -> None:
        TOLD.clear()

    def on_train_end(self) -> None:
        training = getattr(self.trainer.strategy, "_training", None)
        executables = [] if training is None else training.iteration.table.executables
        graphs = [executable.graphs.main for executable in executables]
        MOVED[:] = [([node.name for node in activation_collectives(graph)], graph.fallbacks) for graph in graphs]
