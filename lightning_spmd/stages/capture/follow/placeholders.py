"""Placeholders: tensors of torch's own class without memory; those of the last step if nobody has them."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch
from torch import Tensor

from lightning_spmd import _private_api as private
from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.stages.capture.follow.notes import Made, Note

OURS = 2
"""References to a placeholder that nobody else has: that of its note, and the one of whoever counts."""


def handed_out(note: Note) -> list[Tensor]:
    """The placeholders of a call in this step."""
    handed = note.handed
    for index, mould in enumerate(note.moulds):
        if index == len(handed):
            handed.append(mould.detach())
        elif sys.getrefcount(handed[index]) > OURS:  # somebody kept that of the last step: it is theirs
            handed[index] = mould.detach()
    return handed


def moulds_of(fakes: list[Tensor]) -> list[Tensor]:
    """What placeholders of a call's results are copies of."""
    return [private.without_memory(TensorSpec.of(fake)) for fake in fakes]


def kept(given: list[Tensor]) -> list[int]:
    """Positions of those that somebody has beside this list."""
    return [index for index in range(len(given)) if sys.getrefcount(given[index]) > OURS]


def still_had(notes: Iterable[Note]) -> list[Made]:
    """The placeholders of this step that somebody else has."""
    found: list[Made] = []
    references = sys.getrefcount
    for note in notes:
        handed = note.handed
        if len(handed) == 1:  # as nearly always
            if references(handed[0]) > OURS:
                found.append(note.made[0])
            continue
        for index in range(len(handed)):  # not by a loop over the list: its variable would be a reference
            if references(handed[index]) > OURS:
                found.append(note.made[index])
    return found


def fill(placeholder: Tensor, value: Tensor, *, trained: bool) -> None:
    """Give a placeholder that somebody has its value; of its history only whether it has one is left.

    Args:
        placeholder: of a step that is over.
        value: of it.
        trained: whether it would ask for gradients.
    """
    with torch.no_grad(), private.no_torch_functions():
        placeholder.data = value.detach()
        placeholder.requires_grad_(trained)
