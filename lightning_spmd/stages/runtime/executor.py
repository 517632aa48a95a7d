"""Runs iteration graphs on live state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_spmd.ir.signature import InputRole
from lightning_spmd.ir.steps import CapturedStep, IterationGraphs
from lightning_spmd.stages.runtime.first_run import LayoutCheck, insert_repairs
from lightning_spmd.stages.runtime.live_state import LiveState


class FirstRunError(RuntimeError):
    """A freshly built graph raised in its first run; live state is as it was."""


@dataclass
class Executable:
    """A captured step, the graphs made of it, and how to feed them.

    Args:
        captured: signature, guards and recorded calls.
        graphs: what runs.
        state: the live objects.
    """

    captured: CapturedStep
    graphs: IterationGraphs
    state: LiveState

    def __post_init__(self) -> None:
        self._readers = self.state.readers(self.graphs.main.signature.inputs, self.captured.constants)
        self._writers = self.state.writers(self.captured)
        self._run: Callable[..., Sequence[Any]] | None = None

    def inputs(self, batch: Sequence[Tensor]) -> list[Any]:
        """The graph's inputs for this batch (tensor leaves, in order); the captured graph's ones come first."""
        return [batch[r] if isinstance(r, int) else r() for r in self._readers]

    def run(self, batch: Sequence[Tensor]) -> Sequence[Any]:
        """Run one iteration: parameters, buffers and state are updated; returns the graph's outputs."""
        return self._first_run(batch) if self._run is None else self._run_once(batch, self._run)

    def _first_run(self, batch: Sequence[Tensor]) -> Sequence[Any]:
        """Run node by node, checking layouts; what fails leaves buffers and random state as they were.

        Parameters and optimizer state change at the very end, so nothing is lost.
        """
        entries = zip(self.graphs.main.signature.inputs, self.inputs(batch), strict=True)
        written = [value for entry, value in entries if entry.role is InputRole.BUFFER and entry.mutated]
        saved, random_state = [value.clone() for value in written], torch.get_rng_state()
        graph_module = self.graphs.main.graph_module
        check = LayoutCheck(graph_module)
        try:
            outputs = self._run_once(batch, check.run)
        except RuntimeError as error:
            if self.graphs.main.axes or isinstance(error, torch.OutOfMemoryError):
                raise  # with several ranks it may be another rank's end, which no fallback survives
            for value, before in zip(written, saved, strict=True):
                value.copy_(before)
            torch.set_rng_state(random_state)
            raise FirstRunError(f"the graph could not be run: {str(error).splitlines()[0]}") from error
        if check.repairs:
            insert_repairs(graph_module, check.repairs)
        self._run = graph_module.forward
        return outputs

    def _run_once(self, batch: Sequence[Tensor], run: Callable[..., Sequence[Any]]) -> Sequence[Any]:
        with torch.no_grad():
            inputs = self.inputs(batch)
            if self.state.streams is None:  # one device: the graph draws eager's own numbers
                outputs = run(*inputs)
            else:
                with self.state.streams.active():
                    outputs = run(*inputs)
        for position, write in self._writers:
            write(outputs[position])
        return outputs
