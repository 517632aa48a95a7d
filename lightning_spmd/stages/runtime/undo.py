"""State besides parameters that a run changes, kept so that the run can be undone."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx

from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.ir.random_states import TorchRandomState
from lightning_spmd.ir.reads import ReadMiss
from lightning_spmd.ir.signature import GraphInput, InputRole


def can_be_undone(entry: GraphInput) -> bool:
    """Whether an input that a graph writes is kept: buffers, the loss scale and counters; parameters are too large."""
    value = entry.value
    counter = entry.role is InputRole.OPTIMIZER_STATE and isinstance(value, TensorSpec) and value.numel == 1
    return entry.role in (InputRole.BUFFER, InputRole.LOSS_SCALE) or counter


@contextlib.contextmanager
def random_numbers_kept(*, draws: bool) -> Iterator[None]:
    """Put torch's generators back after a run that ended at a decision.

    Args:
        draws: whether there is anything to put back.
    """
    if not draws:
        yield
        return
    before = TorchRandomState()
    try:
        yield
    except ReadMiss:
        before.restore()
        raise


@contextlib.contextmanager
def collectives_ended() -> Iterator[None]:
    """Wait for the collectives of an abandoned run. All ranks started the same ones.

    A collective that is never waited for stays in c10d's registry, with its tensors and its process group.
    """
    try:
        yield
    except ReadMiss as miss:
        for frame, _ in traceback.walk_tb(miss.__traceback__):
            wait_for_tensors_of(frame)
        raise


def wait_for_tensors_of(frame: FrameType) -> None:
    """Wait for the collectives whose tensors a frame of a run holds, as runs do: without autograd."""
    for tensor in tensors_of(frame):
        with torch.no_grad():
            torch.ops._c10d_functional.wait_tensor.default(tensor)  # noqa: SLF001 - an operator's public name


def tensors_of(frame: FrameType) -> Iterator[Tensor]:
    """What a frame of a run holds."""
    for value in list(frame.f_locals.values()):
        yield from _tensors(list(value.env.values()) if isinstance(value, fx.Interpreter) else value)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):  # several collectives in one call
        for element in value:
            yield from _tensors(element)


class Before:
    """The state before a run.

    Args:
        inputs: of the graph.
        values: of these inputs.
        all_of_them: include tensors that are too large to copy in every run, where a graph updates parameters.
    """

    def __init__(self, inputs: Sequence[GraphInput], values: Sequence[Any], *, all_of_them: bool = False) -> None:
        pairs = [(e, v) for e, v in zip(inputs, values, strict=True) if e.mutated and isinstance(v, Tensor)]
        self._kept = [(value, value.detach().clone()) for entry, value in pairs if all_of_them or can_be_undone(entry)]
        self._random = TorchRandomState()

    def apart(self, output: Any) -> Any:
        """A result of the run in memory that :meth:`restore` does not overwrite."""
        if not isinstance(output, Tensor):
            return output
        written = {value.untyped_storage().data_ptr() for value, _ in self._kept}
        return output.clone() if output.untyped_storage().data_ptr() in written else output

    def restore(self) -> None:
        """Put them back."""
        for value, before in self._kept:
            value.detach().copy_(before)
        self._random.restore()
