"""Runs iteration graphs on live state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_spmd.ir.steps import CapturedStep, IterationGraphs
from lightning_spmd.stages.runtime.live_state import LiveState


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
        self._run = self.graphs.main.graph_module.forward

    def inputs(self, batch: Sequence[Tensor]) -> list[Any]:
        """The graph's inputs for this batch (tensor leaves, in order); the captured graph's ones come first."""
        return [batch[r] if isinstance(r, int) else r() for r in self._readers]

    def run(self, batch: Sequence[Tensor]) -> Sequence[Any]:
        """Run one iteration: parameters, buffers and state are updated; returns the graph's outputs."""
        with torch.no_grad():
            inputs = self.inputs(batch)
            if self.state.streams is None:  # one device: the graph draws eager's own numbers
                outputs = self._run(*inputs)
            else:
                with self.state.streams.active():
                    outputs = self._run(*inputs)
        for position, write in self._writers:
            write(outputs[position])
        return outputs
