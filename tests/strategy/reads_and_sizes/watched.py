"""A module that remembers what Python was told in a run, and what its graphs moved between ranks."""

from __future__ import annotations

from typing import Any

from tests.helpers.activations import activation_collectives
from tests.strategy.small import Quiet

TOLD: list[Any] = []
"""What Python was told in the run before."""
MOVED: list[Any] = []
"""Of each graph of the run before: what moves, with types by collective, and operators on gathered activations."""


class Watched(Quiet):
    """Steps add to ``TOLD``."""

    def on_train_start(self) -> None:
        TOLD.clear()

    def on_train_end(self) -> None:
        training = getattr(self.trainer.strategy, "_training", None)
        executables = [] if training is None else training.iteration.table.executables
        graphs = [executable.graphs.main for executable in executables]
        moves = [{n.name: n.args[0].meta["val"].dtype for n in activation_collectives(graph)} for graph in graphs]
        MOVED[:] = [(moved, graph.fallbacks) for moved, graph in zip(moves, graphs, strict=True)]
