"""Reads that depend on other ranks' rows, in steps after which each rank keeps its own rows alone.

Results of ``predict_step``, and tensors that a validation appends to a list, are a rank's own rows: a tensor is cut to
them when the graph has run. Numbers that Python has read cannot be cut. So a step that reads numbers of single rows
runs on its own rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_spmd.stages.capture.follow.notes import Given, Made, Note, Source, sources_in
from lightning_spmd.stages.capture.follow.step import Step

_DECIDE = {
    Tensor.__bool__, Tensor.is_nonzero, torch.is_nonzero, Tensor.equal, torch.equal, Tensor.allclose, torch.allclose,
    Tensor.__contains__, Tensor.__repr__, Tensor.__format__,
}  # fmt: skip
"""Of many numbers they tell one, or a text."""
_PARTS = {"unbind", "__iter__", "select", "split", "chunk", "tensor_split"}


def read_of_rows(step: Step, func: Any, tensors: Sequence[Tensor], *, rows: int) -> str | None:
    """Why Python must not read a value; None if it may.

    Args:
        step: of the read.
        func: that reads.
        tensors: that it reads.
        rows: of all ranks.
    """
    name = getattr(func, "__name__", str(func))
    with step.beside():
        is_of_many = any(tensor.numel() > 1 for tensor in tensors)
    sources = [source for tensor in tensors if (source := step.source_if_known(tensor)) is not None]
    if func not in _DECIDE and is_of_many and _of_the_batch(step, list(sources)):
        return f"{name} of a tensor that may have a number for each row"
    with step.beside():
        return f"{name} of a single row's value" if _of_one_row(step, sources, rows) else None


def _of_the_batch(step: Step, sources: list[Source]) -> bool:
    """Whether something was computed from the batch; weights and other state are the same on all ranks."""
    seen: set[int] = set()
    while sources:
        source = sources.pop()
        if type(source) is Given:
            return True
        if type(source) is Made and source.depth not in seen:
            seen.add(source.depth)
            sources += sources_in((step.notes[source.depth].args, step.notes[source.depth].kwargs))
    return False


def _of_one_row(step: Step, sources: list[Source], rows: int) -> bool:
    """Whether something was computed from some rows of the batch that were picked by their numbers."""
    seen: set[int] = set()
    while sources:
        source = sources.pop()
        if type(source) is not Made or source.depth in seen:
            continue
        seen.add(source.depth)
        note = step.notes[source.depth]
        if _has(rows, note.moulds):
            continue
        operands = sources_in((note.args, note.kwargs))
        if _picks(note) and _has(rows, [_tensor(step, operand) for operand in operands[:1]]):
            return True
        sources += operands
    return False


def _has(rows: int, tensors: Sequence[Tensor]) -> bool:
    return any(tensor.ndim > 0 and tensor.shape[0] == rows for tensor in tensors)


def _tensor(step: Step, source: Source) -> Tensor:
    if type(source) is Made:
        return step.notes[source.depth].moulds[source.index]
    return step.tensor_in_hand(source)


def _picks(note: Note) -> bool:
    if note.name != "__getitem__":
        return note.name in _PARTS
    index = note.args[1][0] if type(note.args[1]) is tuple and note.args[1] else note.args[1]
    return type(index) is int
