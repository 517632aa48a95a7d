"""Placeholders: tensors of torch's own class without memory, reused from the last step if unreferenced."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_spmd import _private_api as private
from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.stages.capture.follow.notes import Made, Note

OURS = 2
"""References to an otherwise unused placeholder: its note's, and the counting code's."""


def handed_out(note: Note) -> list[Tensor]:
    """The placeholders of a call in this step."""
    handed = note.handed
    for index, mould in enumerate(note.moulds):
        if index == len(handed):
            handed.append(mould.detach())
        elif sys.getrefcount(handed[index]) > OURS or handed[index].__dict__:
            handed[index] = mould.detach()  # somebody kept that of the last step, or an attribute on it: it is theirs
    return handed


class Moulds:
    """The moulds from which placeholders are copied.

    Attributes:
        show_strides: placeholders have strides of their own, since a step has used transforms of ``torch.func``: below
            these no mode sees who asks for them. Else they have memory for one element, and NaN is read there.
    """

    def __init__(self) -> None:
        self.show_strides = False

    def of(self, spec: TensorSpec) -> Tensor:
        """The mould of a result."""
        shows = self.show_strides and spec.device.type == "cpu"
        with private.no_torch_functions():  # no call of the step, wherever that is
            return private.with_strides(spec) if shows else private.without_memory(spec)

    def sized(self, mould: Tensor, shape: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
        """A mould with another size."""
        if self.show_strides:
            return self.of(TensorSpec(shape, stride, mould.dtype, mould.device))
        return mould.as_strided(shape, (0,) * len(shape))


def kept(given: list[Tensor]) -> list[int]:
    """Positions of those that are referenced elsewhere."""
    return [index for index in range(len(given)) if sys.getrefcount(given[index]) > OURS]


def end_histories(notes: Iterable[Note]) -> None:
    """Autograd histories of what a transform of ``torch.func`` has computed end: Python is done.

    Below a transform autograd itself saves placeholders and the bases of views, which would count as kept.
    """
    with private.no_torch_functions():
        for note in notes:
            for handed, mould in zip(note.handed, note.moulds, strict=False):
                if private.is_tied(handed):
                    private.exchange(handed, mould.detach())


def still_had(notes: Iterable[Note]) -> list[Made]:
    """The placeholders of this step that are referenced elsewhere."""
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


def fill(placeholder: Tensor, value: Tensor, *, trained: bool, made_at: str | None = None) -> None:
    """Give a kept placeholder its value. Of its autograd history only whether it had one remains.

    Args:
        placeholder: of a step that is over.
        value: of it.
        trained: whether it would ask for gradients.
        made_at: ``file:line`` of the call that made it, if it had a history.
    """
    if made_at is not None and trained:
        with private.no_torch_functions():
            private.exchange(placeholder, without_history(value, made_at))
        return
    with torch.no_grad(), private.no_torch_functions():
        if placeholder.is_inference():  # its data cannot become another's
            with torch.inference_mode():
                private.exchange(placeholder, value.clone())
            return
        placeholder.data = value.detach()
        placeholder.requires_grad_(trained)


class WithoutHistory(Tensor):
    """The class in kinds of tensors from earlier steps that had an autograd history. It has no instances."""


def without_history(value: Tensor, place: str) -> Tensor:
    """A tensor with this value, into which a backward pass is an error.

    Args:
        value: of a result of a step that is over.
        place: ``file:line`` of the call that made it.
    """
    with torch.enable_grad():
        made = private.error_of_backward(
            f"the backward pass reaches a tensor that an earlier step computed ({place}), whose history has ended with "
            "that step; keep tensor.detach() instead"
        )(value.detach().requires_grad_())
    made.grad_fn.metadata[_PLACE] = place
    return made


_PLACE = "lightning_spmd: made by a step that is over, at"


def place_of_gone(tensor: Tensor) -> str | None:
    """``file:line`` of the call that made a tensor whose history has ended with its step; None of others."""
    node = private.history_of(tensor)
    return None if node is None else place_at_end(node)


def place_at_end(node: Any) -> str | None:
    """The same of a node of autograd's."""
    return node.metadata.get(_PLACE) if type(node) is private.ErrorOfBackward else None
