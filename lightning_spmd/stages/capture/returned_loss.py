"""What ``training_step`` returns under automatic optimization: a loss, or None where Lightning is to skip the batch.

A skipped batch is a graph without a backward pass, in which the optimizer steps and finds no gradient, as in eager
training. On several ranks Lightning refuses None, and beside accumulation, loss scaling and hooks that look at
gradients it means other things; there such a step stays eager.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_spmd.errors import CaptureError
from lightning_spmd.stages.capture.request import CaptureRequest


def loss_of(returned: Any, request: CaptureRequest, *, scaled: bool) -> Tensor | None:
    """The loss in what a step returned; None if the batch is skipped.

    Args:
        returned: by the step.
        request: of the capture.
        scaled: whether the loss is scaled.

    Raises:
        CaptureError: there is neither.
    """
    loss = returned.get("loss") if isinstance(returned, dict) else returned
    if loss is None and returned is None and _may_be_skipped(request, scaled):
        return None
    if not isinstance(loss, Tensor):
        raise CaptureError(
            f"training_step returned {type(returned).__name__} without a loss tensor: return the loss, or a dict "
            "with the key 'loss'"
        )
    if not loss.requires_grad:
        raise CaptureError("the loss that training_step returns does not depend on any trained parameter")
    return loss


def _may_be_skipped(request: CaptureRequest, scaled: bool) -> bool:
    variant = request.variant
    whole = variant.apply and not variant.expose_gradients and not request.accumulators and request.loss_divisor == 1
    return whole and request.rows is None and not scaled
