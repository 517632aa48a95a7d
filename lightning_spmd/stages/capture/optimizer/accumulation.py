"""Gradients as ``backward`` leaves them in ``p.grad``, made by ``torch.autograd.grad``.

Autograd's own accumulation decides by reference counts whether ``p.grad`` is a copy, and whoever records holds
references.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_spmd import _private_api as private
from lightning_spmd.errors import CaptureError
from lightning_spmd.stages.capture.record.packing import in_memory_order_of


def accumulated(leaf: Tensor, held: Tensor | None, gradient: Tensor, taken: set[int], *, in_place: bool) -> Tensor:
    """``leaf.grad`` after a backward pass.

    Args:
        leaf: whose gradient it is.
        held: what was there before.
        gradient: what the pass gives.
        taken: storages that are in use; the result's is one from here on.
        in_place: what was there is written into.

    Raises:
        CaptureError: it is sparse.
    """
    if gradient.layout is not torch.strided:
        raise CaptureError(
            f"backward makes a sparse gradient ({gradient.layout}), which graphs do not know; "
            "use a dense one (sparse=False)"
        )
    if held is not None:
        return held.add_(gradient) if in_place else held + gradient
    owned = in_memory_order_of(leaf, gradient)
    if private.storage_of(owned) in taken:  # somebody else's tensor, or two parameters' gradient
        owned = owned.clone()
    taken.add(private.storage_of(owned))
    return owned


class BackwardPass(NamedTuple):
    """A call of ``backward``.

    Args:
        roots: on what it is called.
        weights: gradients of the roots.
        leaves: whose gradients it gives.
        held: what their ``.grad`` is before.
        retain: the graph is used again.
        create: the gradients have a history of their own.
        named: the leaves are those that the call names.
    """

    roots: Sequence[Tensor]
    weights: Sequence[Tensor | None] | None
    leaves: Sequence[Tensor]
    held: Sequence[Tensor | None]
    retain: bool
    create: bool
    named: bool


def gradients_behind(call: BackwardPass, taken: set[int]) -> tuple[Tensor | None, ...]:
    """``.grad`` of the leaves after a backward pass, with storages that are in use."""
    with torch.autograd.set_multithreading_enabled(False):  # other threads have no modes
        found = torch.autograd.grad(call.roots, call.leaves, call.weights, call.retain, call.create, allow_unused=True)
    with torch.set_grad_enabled(call.create):
        return tuple(
            [
                before if gradient is None else accumulated(leaf, before, gradient, taken, in_place=not call.create)
                for leaf, before, gradient in zip(call.leaves, call.held, found, strict=True)
            ]
        )
