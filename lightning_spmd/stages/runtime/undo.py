"""What a run of a graph changes beside parameters, kept until the run has ended well."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.ir.reads import ReadMiss
from lightning_spmd.ir.signature import GraphInput, InputRole


def can_be_undone(entry: GraphInput) -> bool:
    """Whether an input that a graph writes is kept: buffers, the loss scale and counters; parameters are too large."""
    value = entry.value
    counter = entry.role is InputRole.OPTIMIZER_STATE and isinstance(value, TensorSpec) and value.numel == 1
    return entry.role in (InputRole.BUFFER, InputRole.LOSS_SCALE) or counter


@contextlib.contextmanager
def random_numbers_kept(*, draws: bool, always: bool = False) -> Iterator[None]:
    """Put torch's generators back after a run that ended at a decision.

    Args:
        draws: whether there is anything to put back.
        always: after any run.
    """
    if not draws:
        yield
        return
    host, ended = torch.get_rng_state(), always
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    try:
        yield
    except ReadMiss:
        ended = True
        raise
    finally:
        if ended:
            torch.set_rng_state(host)
            if devices:
                torch.cuda.set_rng_state_all(devices)


class Before:
    """How things are before a run.

    Args:
        inputs: of the graph.
        values: of these inputs.
    """

    def __init__(self, inputs: Sequence[GraphInput], values: Sequence[Any]) -> None:
        pairs = [(e, v) for e, v in zip(inputs, values, strict=True) if e.mutated and isinstance(v, Tensor)]
        self._kept = [(value, value.clone()) for entry, value in pairs if can_be_undone(entry)]
        self._host = torch.get_rng_state()
        self._devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []

    def restore(self) -> None:
        """Put them back."""
        for value, before in self._kept:
            value.copy_(before)
        torch.set_rng_state(self._host)
        if self._devices:
            torch.cuda.set_rng_state_all(self._devices)
