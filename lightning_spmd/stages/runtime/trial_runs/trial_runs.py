"""The runs of a graph before it is final: real iterations, run node by node. One checks layouts, the next measure."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from lightning_spmd.ir.steps import IterationGraphs, ShardedStep
from lightning_spmd.stages.runtime.trial_runs.first_run import LayoutCheck, insert_repairs
from lightning_spmd.stages.runtime.trial_runs.profile import RUNS, Profile, Whole
from lightning_spmd.stages.runtime.undo import Before, can_be_undone

Finish = Callable[[ShardedStep, Mapping[str, float], float], IterationGraphs]
"""Makes the final graphs of a step, given the seconds of every node by itself, and of a run as a whole."""
Form = Callable[[ShardedStep], fx.GraphModule]
"""The form in which a graph runs, with the same names of nodes."""


class FirstRunError(RuntimeError):
    """A freshly built graph raised in its first run; live state is as it was."""


class FirstRun:
    """The first run of a graph, which checks memory layouts.

    Args:
        graphs: the graphs to begin with.
        form: of the graph that runs.
        on_repairs: called with the nodes whose results are copied into another memory layout from now on.
    """

    def __init__(self, graphs: IterationGraphs, form: Form, on_repairs: Callable[[Sequence[fx.Node]], None]) -> None:
        self._graphs = graphs
        self._form = form
        self._on_repairs = on_repairs
        self._check: LayoutCheck | None = None

    def interpreter(self) -> LayoutCheck:
        """What runs the graph."""
        self._check = LayoutCheck(self._form(self._graphs.main))
        return self._check

    @contextlib.contextmanager
    def undone(self, inputs: Sequence[Any]) -> Iterator[None]:
        """A context for the run: what fails in it leaves buffers, counters and random state as they were.

        Parameters and the rest of the optimizer's state change at the very end; once they have begun to, nothing can be
        undone, and the error is everybody's.

        Args:
            inputs: of the graph.
        """
        step = self._graphs.main
        before = Before(step.signature.inputs, inputs)
        try:
            yield
        except RuntimeError as error:
            # with several ranks it may be another rank's end, which no fallback survives; nor does a GPU its own errors
            if step.axes or isinstance(error, (torch.OutOfMemoryError, torch.AcceleratorError)):
                raise
            written = [] if self._check is None else self._check.written_inputs(step.signature)
            if any(not can_be_undone(entry) for entry in written):
                raise
            before.restore()
            raise FirstRunError(f"the graph could not be run: {str(error).splitlines()[0]}") from error

    def ended(self) -> IterationGraphs:
        """The run is over. Returns the graphs from now on."""
        check, graph_module = self._check, self._graphs.main.graph_module
        names = set() if check is None else {node.name for node in check.repairs}
        for node in graph_module.graph.nodes:
            node.meta.update({} if check is None else check.seen.get(node.name, {}))
        if repaired := [node for node in graph_module.graph.nodes if node.name in names]:
            self._on_repairs(repaired)
            insert_repairs(graph_module, repaired)
        return self._graphs


class Measurement:
    """The runs with a stopwatch.

    Args:
        graphs: the graphs to begin with.
        form: of the graph that runs.
        finish: makes the final graphs.
    """

    def __init__(self, graphs: IterationGraphs, form: Form, finish: Finish) -> None:
        self._graphs = graphs
        self._form = form
        self._finish = finish
        self._profile: Profile | None = None
        self._whole: Whole | None = None

    def interpreter(self) -> Profile | Whole:
        """What runs the graph."""
        self._profile = self._profile or Profile(self._form(self._graphs.main))
        if self._profile.runs < RUNS:
            return self._profile
        self._whole = self._whole or Whole(self._form(self._graphs.main))
        return self._whole

    def ended(self) -> IterationGraphs | None:
        """A run is over. Returns the final graphs after the last one."""
        if self._profile is None or self._whole is None or self._whole.seconds is None:
            return None
        return self._finish(self._graphs.main, self._profile.seconds, self._whole.seconds)
